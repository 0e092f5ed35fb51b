"""Steps as CUDA graphs: a bucket for every batch size, and the tokens of eager execution."""

import itertools

import pytest
import torch
from checkpoints import make_checkpoint

from nanovllm import LLM, SamplingParams
from nanovllm.engine.batch import Rows, pack_prefill, prefill_inputs
from nanovllm.engine.cuda_graph import graph_batch_sizes, graph_token_counts
from nanovllm.engine.step import PrefillChunk


@pytest.mark.parametrize("max_num_seqs", [*range(1, 521), 768, 1000, 1024])
def test_every_batch_has_a_bucket_and_none_is_larger_than_the_buffers(max_num_seqs):
    """A14, A16: also where max_num_seqs lies on no stride; so no batch can be above the largest captured size."""
    sizes = graph_batch_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    assert sizes[0] == 1
    assert all(b - a <= max(8, a // 4) for a, b in itertools.pairwise(sizes)), "little is wasted"


def test_number_of_graphs_stays_small():
    assert len(graph_batch_sizes(512)) < 50
    assert len(graph_batch_sizes(1024)) < 70


def answers(path, batches, params, **knobs):
    with LLM(path, skip_tokenizer_init=True, dtype="bfloat16", max_num_seqs=20, num_kvcache_blocks=256, **knobs) as llm:
        assert (llm.engine.runner.graphs is None) == knobs.get("enforce_eager", False)
        return [llm.generate(batch, params, use_tqdm=False) for batch in batches]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_graphs_give_the_tokens_of_eager_execution(family, tmp_path):
    """Every batch size from 1 to max_num_seqs, on and between the buckets."""
    path = make_checkpoint(tmp_path, family, dtype="bfloat16")
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 500, (5 + 3 * i,), generator=draw).tolist() for i in range(20)]
    batches = [prompts[:n] for n in range(1, 21)]
    for params in (
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=7, top_p=0.9, repetition_penalty=1.2, max_tokens=12, ignore_eos=True),
    ):
        graphs, eager = (answers(path, batches, params, enforce_eager=flag) for flag in (False, True))
        pairs = [(a, b) for x, y in zip(graphs, eager, strict=True) for a, b in zip(x, y, strict=True)]
        same = sum(a["token_ids"] == b["token_ids"] for a, b in pairs)
        # bf16 sums differ with the shape of a product, so a near-tie may fall the other way; not in one of fifty.
        assert same >= 0.95 * len(pairs), f"{same} of {len(pairs)}"
        if params.logprobs is not None:
            first = [abs(a["logprobs"][0] - b["logprobs"][0]) for a, b in pairs]
            assert max(first) < 0.1


def test_a_padded_prefill_computes_what_an_exact_one_does():
    """Rows, tokens and slots of padding belong to nobody: what a graph with room to spare is given, on a CPU."""
    draw = torch.Generator().manual_seed(5)
    rows = Rows(num_rows=6, max_blocks=4, vocab_size=100, device=torch.device("cpu"))
    rows.block_table[:6] = torch.randperm(24, generator=draw).view(6, 4)
    chunks = [PrefillChunk(row, start, list(range(n)), True, 0, [], 0) for row, start, n in ((4, 0, 5), (1, 7, 9))]
    results = []
    for num_seqs, num_tokens in ((2, 14), (4, 32)):
        packed = torch.from_numpy(pack_prefill(chunks, num_seqs, num_tokens, rows.padding_row))
        results.append(prefill_inputs(packed, num_seqs, rows, 4, [5, 9], [5, 16]))
    (exact_rows, exact), (padded_rows, padded) = results
    assert exact_rows.tolist() == [4, 1]
    assert exact.positions.tolist() == [*range(5), *range(7, 16)]
    assert exact.attention.cu_seqlens_q.tolist() == [0, 5, 14]
    assert exact.attention.cu_seqlens_k.tolist() == [0, 5, 21]
    slots = [
        (rows.block_table[row, p // 4] * 4 + p % 4).item()
        for row, p in zip([4] * 5 + [1] * 9, exact.positions, strict=True)
    ]
    assert exact.attention.slot_mapping.tolist() == slots

    assert padded_rows.tolist() == [4, 1, rows.padding_row, rows.padding_row]
    assert padded.token_ids[:14].equal(exact.token_ids) and padded.positions[:14].equal(exact.positions)
    assert padded.attention.slot_mapping.tolist() == slots + [-1] * 18
    assert padded.attention.cu_seqlens_q.tolist() == [0, 5, 14, 14, 14]
    assert padded.attention.context_lens.tolist() == [5, 16, 0, 0]
    assert padded.positions.max() < 16, "a position of padding is one that tables have"


def test_short_prefills_have_buckets():
    sizes = graph_token_counts(16384)
    assert sizes == sorted(sizes) and sizes[-1] >= 1024
    assert all(b <= 2 * a for a, b in itertools.pairwise(sizes))
    assert graph_token_counts(16384, longest=5000) == [*sizes, 3072, 4096]
    assert max(graph_token_counts(300)) <= 300, "none is larger than the largest step"
    assert graph_token_counts(8) == []


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["int8", "w8a8"])
def test_graphs_of_quantized_models_give_the_tokens_of_eager_execution(method, tmp_path):
    """The kernels that serve few rows, and those that split K, in decode and in short prefills."""
    path = make_checkpoint(tmp_path, "qwen3", dtype="bfloat16")
    draw = torch.Generator().manual_seed(6)
    prompts = [torch.randint(3, 500, (5 + 3 * i,), generator=draw).tolist() for i in range(20)]
    batches = [prompts[:n] for n in (1, 2, 7, 16, 20)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    graphs, eager = (answers(path, batches, params, enforce_eager=flag, quantization=method) for flag in (False, True))
    pairs = [(a, b) for x, y in zip(graphs, eager, strict=True) for a, b in zip(x, y, strict=True)]
    same = sum(a["token_ids"][:4] == b["token_ids"][:4] for a, b in pairs)
    assert same >= 0.9 * len(pairs), f"{same} of {len(pairs)}"


@pytest.mark.gpu
def test_captured_prefills_answer_as_eager_ones(tmp_path):
    """One to more sequences than a captured prefill takes, shared prefixes, scored prompts, filters, preemption's
    long chunks: the same first tokens and scores."""
    path = make_checkpoint(tmp_path, "qwen3", dtype="bfloat16")
    draw = torch.Generator().manual_seed(4)
    shared = torch.randint(3, 500, (70,), generator=draw).tolist()
    prompts = [shared[: 40 + i] + torch.randint(3, 500, (1 + 9 * i,), generator=draw).tolist() for i in range(20)]
    batches = [[p] for p in prompts] + [prompts[:3], prompts[3:19], prompts]
    for params in (
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.7, seed=3, max_tokens=2, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=3, top_k=5, max_tokens=2, ignore_eos=True),
    ):
        graphs, eager = (answers(path, batches, params, enforce_eager=flag) for flag in (False, True))
        pairs = [(a, b) for x, y in zip(graphs, eager, strict=True) for a, b in zip(x, y, strict=True)]
        same = sum(a["token_ids"] == b["token_ids"] for a, b in pairs)
        # The first token's product has other shapes in a bucket, so more near-ties fall the other way than in decode.
        assert same >= 0.9 * len(pairs), f"{same} of {len(pairs)}"
        if params.logprobs is not None:
            assert max(abs(a["logprobs"][0] - b["logprobs"][0]) for a, b in pairs) < 0.1
