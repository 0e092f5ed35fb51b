"""Sansho with kernels: the paged ones serve rings, which runs interpreted too; the rest needs a GPU."""

import pytest
import torch
from checkpoints import load_script, sansho_reference
from triton_tools import DEVICES, INTERPRETED, assert_as_good, interpreted, nan_filled

from nanovllm import LLM, SamplingParams
from nanovllm.attention.window import Ring
from nanovllm.kernels import paged_attention as ops
from nanovllm.kernels import paged_decode_triton as decode_twin

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)


def test_interpreted():
    """The tests below that take a device, without one."""
    if not INTERPRETED:
        with interpreted(__file__) as finish:
            finish()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("window", "block_size"), [(16, 16), (40, 16), (256, 64), (256, 256)])
def test_the_decode_kernel_serves_rings(window, block_size, device):
    """Contexts that end anywhere in a ring, also where the window begins and ends in one physical block."""
    ring, device = Ring(window, block_size), torch.device(device)
    contexts = [1, block_size, window, window + 1, window + block_size - 3, 3 * window + 5, 0]
    table = ring.table(len(contexts), 1 + max(contexts) // block_size, device)
    q = torch.randn(len(contexts), 4, 64, dtype=torch.bfloat16, device=device)
    cache = torch.full((2, len(contexts) * ring.num_blocks, block_size, 1, 64), torch.nan, dtype=torch.bfloat16)
    for row, context in enumerate(contexts):
        for position in range(max(0, context - window), context):
            cache.view(2, len(contexts), ring.size, 1, 64)[:, row, position % ring.size] = torch.randn(2, 1, 64)
    k, v = cache.to(device)
    rest = (table, torch.tensor(contexts, dtype=torch.int32, device=device), max(contexts), 0.125, window)
    with nan_filled():
        got = decode_twin.decode_attention(q, k, v, *rest)
    rival = ops.decode_attention_ref(q, k, v, *rest)
    exact = ops.decode_attention_ref(q.float(), k.float(), v.float(), *rest)
    assert got.isfinite().all()
    for part in zip(got, rival, exact, strict=True):
        assert_as_good(*part)


def export(directory, **overrides):
    """A tiny export whose sizes the kernels take: heads of 16, pages of 16."""
    make_export = load_script("make_sansho_export").make_export
    return make_export(directory, tokenizer=False, sliding_window=40, **overrides)


def prompts_of(*lengths):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, 500, (n,), generator=draw).tolist() for n in lengths]


@pytest.mark.gpu
def test_float32_tokens_are_those_of_the_reference(tmp_path):
    """Alone, together, chunked, preempted, resumed."""
    path = export(tmp_path)
    prompts = prompts_of(1, 7, 33, 150)
    expected = [sansho_reference(path).greedy(prompt, 40) for prompt in prompts]
    for knobs in ({"num_kvcache_blocks": 64}, {"num_kvcache_blocks": 14, "max_num_batched_tokens": 24}):
        with LLM(path, dtype="float32", skip_tokenizer_init=True, kvcache_block_size=16, **knobs) as llm:
            for batch in [[prompt] for prompt in prompts] + [prompts, prompts]:
                outputs = llm.generate(batch, PARAMS, use_tqdm=False)
                assert [o["token_ids"] for o in outputs] == [expected[prompts.index(prompt)] for prompt in batch]


def bf16_errors(path, prompts, **knobs):
    """Root mean square errors against float32 of a bfloat16 engine's log probabilities: scored and decoded."""
    with LLM(path, dtype="bfloat16", skip_tokenizer_init=True, num_kvcache_blocks=64, **knobs) as llm:
        scores = [score["token_logprobs"][1:] for score in llm.score(prompts)]
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    pairs = [(prompt, score) for prompt, score in zip(prompts, scores, strict=True)]
    pairs += [(prompt + o["token_ids"], o["logprobs"]) for prompt, o in zip(prompts, outputs, strict=True)]
    errors = []
    for ids, logprobs in pairs:
        exact = sansho_reference(path).logits(ids).log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
        errors.append(torch.tensor(logprobs) - exact[-len(logprobs) :, 0])
    halves = errors[: len(prompts)], errors[len(prompts) :]
    return [torch.cat(half).square().mean().sqrt().item() for half in halves]


@pytest.mark.gpu
def test_bf16_error_is_at_most_twice_that_of_torch(tmp_path):
    """The rival computes the same in torch's own operators, in bfloat16 too, on the CPU."""
    path = export(tmp_path, dtype="bfloat16")
    ours, rival = (bf16_errors(path, prompts_of(33, 80, 150), device=device) for device in ("cuda", "cpu"))
    print(f"rms errors, prefill and decode: ours {ours}, torch {rival}")
    assert all(own <= 2 * theirs for own, theirs in zip(ours, rival, strict=True))


@pytest.mark.gpu
def test_graphs_give_the_tokens_of_eager_execution(tmp_path):
    """Batches on and between the buckets; also with replay for the first tokens of a sequence only."""
    path = export(tmp_path, dtype="bfloat16")
    prompts = prompts_of(*range(5, 65, 3))
    answers = []
    for knobs in ({}, {"sansho_decode_graph_replay_max_tokens": 5}, {"sansho_decode_graph_replay_max_tokens": 0}):
        with LLM(path, skip_tokenizer_init=True, max_num_seqs=20, num_kvcache_blocks=256, **knobs) as llm:
            assert (llm.engine.runner.graphs is None) == (knobs.get("sansho_decode_graph_replay_max_tokens") == 0)
            batches = [prompts[:n] for n in (1, 2, 3, 7, 8, 19, 20)]
            answers.append([o for batch in batches for o in llm.generate(batch, PARAMS, use_tqdm=False)])
    for graphs in answers[:2]:
        pairs = list(zip(graphs, answers[2], strict=True))
        assert max(abs(a["logprobs"][0] - b["logprobs"][0]) for a, b in pairs) < 0.1
        # bf16 sums differ with the shape of a product, so a near-tie may fall the other way.
        assert sum(a["token_ids"][:8] == b["token_ids"][:8] for a, b in pairs) >= 0.9 * len(pairs)
