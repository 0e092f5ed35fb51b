"""On a GPU: bf16 stays within twice transformers' own bf16 error, and every path gives the same tokens."""

import pytest
import torch
from checkpoints import hf_greedy, hf_model, make_checkpoint
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.gpu
FAMILIES = ("qwen3", "llama", "qwen2")


def prompts_of(vocab_size, lengths=(1, 7, 33, 150)):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab_size, (n,), generator=draw).tolist() for n in lengths]


def bf16_errors(path, sequences, ours):
    """Root mean square errors against float32 of log probabilities: ours and transformers', both bf16 on the GPU.

    sequences: token ids; ours: for each, the log probabilities of its last len(ours[i]) tokens.
    """
    reference = hf_model(path)
    rival = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda().eval()
    errors = ([], [])
    for ids, logprobs in zip(sequences, ours, strict=True):
        tokens = torch.tensor([ids])
        with torch.no_grad():
            pair = [reference(tokens).logits[0].float(), rival(tokens.cuda()).logits[0].float().cpu()]
        exact, theirs = (
            logits.log_softmax(-1)[:-1].gather(-1, tokens[0, 1:, None])[-len(logprobs) :, 0] for logits in pair
        )
        errors[0].append(torch.tensor(logprobs) - exact)
        errors[1].append(theirs - exact)
    return tuple(torch.cat(parts).square().mean().sqrt().item() for parts in errors)


def check_bf16(path, prompts, **knobs):
    """Prefill (score) and decode (generate with logprobs) of one checkpoint."""
    with LLM(path, dtype="bfloat16", skip_tokenizer_init=True, **knobs) as llm:
        scores = [score["token_logprobs"][1:] for score in llm.score(prompts)]
        params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=0)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    longer = [(ids, logprobs) for ids, logprobs in zip(prompts, scores, strict=True) if logprobs]
    prefill = bf16_errors(path, *map(list, zip(*longer, strict=True)))
    texts = [ids + output["token_ids"] for ids, output in zip(prompts, outputs, strict=True)]
    decode = bf16_errors(path, texts, [output["logprobs"] for output in outputs])
    print(f"rms errors, ours / transformers: prefill {prefill}, decode {decode}")
    assert prefill[0] <= 2 * prefill[1]
    assert decode[0] <= 2 * decode[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_error_is_at_most_twice_that_of_transformers(family, tmp_path):
    path = make_checkpoint(tmp_path, family, dtype="bfloat16", num_hidden_layers=4)
    check_bf16(path, prompts_of(500), num_kvcache_blocks=256)


def test_bf16_error_of_torchs_attention(tmp_path):
    """The other backend that needs no further package."""
    path = make_checkpoint(tmp_path, "qwen3", dtype="bfloat16", num_hidden_layers=4)
    check_bf16(path, prompts_of(500), num_kvcache_blocks=256, attention_backend="torch")


@pytest.mark.parametrize("method", ["int8", "w8a8"])
def test_quantized_kernels_err_no_more_than_bf16_does(method, tmp_path):
    """Prefill and decode with a quantized model in bf16 on the GPU against the same integers in float32 on a CPU: twice
    the error that bf16 alone makes of the float model. For w8a8 bf16 also moves activations to a neighbouring step."""
    path = make_checkpoint(tmp_path, "qwen3", dtype="bfloat16", num_hidden_layers=4)
    prompts = prompts_of(500, (1, 7, 33, 150, 450))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logit_bias={9: 100.0}, logprobs=0)

    def logprobs(device, dtype, quantization):
        knobs = {"skip_tokenizer_init": True, "num_kvcache_blocks": 256, "quantization": quantization}
        with LLM(path, device=device, dtype=dtype, **knobs) as llm:
            scored = [lp for score in llm.score(prompts) for lp in score["token_logprobs"][1:]]
            decoded = [lp for output in llm.generate(prompts, params, use_tqdm=False) for lp in output["logprobs"]]
        return torch.tensor(scored), torch.tensor(decoded)

    plain, quantized = (
        [(a - b).square().mean().sqrt().item() for a, b in zip(*map(logprobs, *zip(*runs, strict=True)), strict=True)]
        for runs in (
            [("cuda", "bfloat16", None), ("cpu", "float32", None)],
            [("cuda", "bfloat16", method), ("cpu", "float32", method)],
        )
    )
    print(f"rms errors, {method} / plain: prefill {quantized[0]} / {plain[0]}, decode {quantized[1]} / {plain[1]}")
    bound = 2 if method == "int8" else 4
    assert quantized[0] <= bound * plain[0] and quantized[1] <= bound * plain[1]


def test_bf16_error_on_the_demo_model(demo_path):
    texts = ["The capital of France is Paris, and the capital of Italy is Rome.", "def add(a, b):\n    return a + b\n"]
    with LLM(str(demo_path), num_kvcache_blocks=64) as llm:
        prompts = llm.engine.tokenizer.encode(texts)
    check_bf16(str(demo_path), prompts, num_kvcache_blocks=256)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_tokens_are_those_of_transformers_on_every_path(family, tmp_path):
    """One prompt alone, all together, chunked prefill, a pool so small that sequences are preempted, a prefix hit."""
    path = make_checkpoint(tmp_path, family)
    prompts = prompts_of(500)
    expected = [hf_greedy(path, ids, 40) for ids in prompts]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for knobs in ({"num_kvcache_blocks": 64}, {"num_kvcache_blocks": 14, "max_num_batched_tokens": 24}):
        with LLM(path, dtype="float32", skip_tokenizer_init=True, kvcache_block_size=16, **knobs) as llm:
            for batch in [[ids] for ids in prompts] + [prompts, prompts]:
                outputs = llm.generate(batch, params, use_tqdm=False)
                wanted = [expected[prompts.index(ids)] for ids in batch]
                assert [output["token_ids"] for output in outputs] == wanted


def test_a_seed_gives_the_same_tokens_in_any_company(tmp_path):
    path = make_checkpoint(tmp_path, "qwen3")
    prompts = prompts_of(500)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=32, ignore_eos=True)
    with LLM(path, dtype="float32", skip_tokenizer_init=True, num_kvcache_blocks=64) as llm:
        alone = [llm.generate(ids, params, use_tqdm=False)[0]["token_ids"] for ids in prompts]
        together = [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
    assert alone == together


def test_the_pool_is_sized_from_what_is_free(tmp_path):
    """A89: weights and the peak of the largest prefill are subtracted; a second engine on the card still fits."""
    path = make_checkpoint(tmp_path, "qwen3")
    knobs = {"skip_tokenizer_init": True, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    with LLM(path, gpu_memory_utilization=0.3, **knobs) as one, LLM(path, gpu_memory_utilization=0.3, **knobs) as two:
        for llm in (one, two):
            assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))[0]["token_ids"]
    free, total = torch.cuda.mem_get_info()
    assert free > 0.9 * total, "exit() gives the memory back"
