"""Tensor parallelism over gloo: one, two and four ranks give the same tokens in float32, whatever the family, the
quantization and the way through the engine. How processes start and end is in test_parallel_faults.py."""

import re
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from checkpoints import load_script, make_checkpoint
from engine_helpers import SequenceLog, check_generate, check_idle, generate, greedy, make_prompts

from nanovllm import LLM, SamplingParams, distributed, loader, platform
from nanovllm.config import EngineConfig
from nanovllm.distributed import Group
from nanovllm.engine.build import DeviceSide
from nanovllm.kernels.quantize import quantize_tokens
from nanovllm.layers.embed_head import Embedding, empty_logits
from nanovllm.quantize import quantize_checkpoint

VOCAB = 509  # a prime: padded for every number of ranks
SMALL = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "kvcache_block_size": 4,
    "num_kvcache_blocks": 24, "max_num_seqs": 6, "max_num_batched_tokens": 13,
}  # fmt: skip
# Two query heads for each key head; Llama with a bias on every projection, those behind the sums included.
SHAPES = {
    "qwen3": {"head_dim": 32},
    "llama": {"tie": False, "attention_bias": True, "mlp_bias": True},
    "qwen2": {},
}
CASES = [
    *((family, quantization, 2) for family in SHAPES for quantization in (None, "int8", "w8a8")),
    *(("sansho", quantization, 2) for quantization in (None, "int8", "w8a8")),
    *(("qwen3", None, 4), ("llama", "int8", 4), ("qwen2", "w8a8", 4), ("sansho", "int8", 4)),  # the others: parallel.md
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """checkpoint(family): its directory, made once."""
    made = {}

    def make(family):
        if family not in made and family == "sansho":
            directory = tmp_path_factory.mktemp(family)
            made[family] = load_script("make_sansho_export").make_export(directory, vocab_size=VOCAB)
        elif family not in made:
            made[family] = make_checkpoint(tmp_path_factory.mktemp(family), family, vocab_size=VOCAB, **SHAPES[family])
        return made[family]

    return make


def every_way(path, size, quantization):
    """Answers of one engine to calls that take every way through it, by name."""
    with LLM(path, tensor_parallel_size=size, quantization=quantization, **SMALL) as llm:
        prompts = make_prompts(18, 3, 25, 9)
        found = {"chunks": generate(llm, prompts, greedy(8))}
        found["prefix hits"] = generate(llm, prompts, greedy(8))
        seqs = SequenceLog(llm)
        found["preemption"] = generate(llm, prompts * 2, greedy(22))
        found["preemptions"] = seqs.num_preemptions
        found["samples"] = generate(
            llm, prompts, SamplingParams(temperature=1.0, n=3, seed=7, max_tokens=12, logprobs=1)
        )
        found["engine's seeds"] = generate(llm, prompts, SamplingParams(temperature=1.0, max_tokens=30))
        mixed = [
            SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=1, max_tokens=20),
            SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=20),
            SamplingParams(temperature=1.0, logit_bias={5: 9.0, VOCAB - 1: 9.0}, max_tokens=20),
            greedy(1, logprobs=VOCAB),
        ]
        found["kinds of draws"] = generate(llm, prompts, mixed)
        found["different ends"] = generate(llm, prompts * 2, [greedy(n) for n in (1, 9, 3, 7, 2, 8, 5, 4)])
        found["scores"] = llm.score(prompts, logprobs=2)
        check_idle(llm)
    return found


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def runs(request, checkpoint, runs_of_one):
    """The answers of one rank and those of several, and whether rounding to integers may tell them apart."""
    family, quantization, size = request.param
    if (family, quantization) not in runs_of_one:
        runs_of_one[family, quantization] = every_way(checkpoint(family), 1, quantization)
    return runs_of_one[family, quantization], every_way(checkpoint(family), size, quantization), quantization == "w8a8"


@pytest.fixture(scope="module")
def runs_of_one():
    """Answers of one rank, made once."""
    return {}


def samples_of(outputs):
    return [sample for output in outputs for sample in output.get("outputs", [output])]


def check_same(runs, name):
    """The same tokens. A number that differs in its last bit can be rounded to the next integer, once in thousands of
    tokens; so of w8a8's answers nearly all have to be the same."""
    one, several, rounds = runs
    pairs = list(zip(samples_of(one[name]), samples_of(several[name]), strict=True))
    if rounds:
        same = [pair for pair in pairs if pair[0]["token_ids"] == pair[1]["token_ids"]]
        assert len(same) >= 0.75 * len(pairs)
        pairs = same
    for ours, theirs in pairs:
        assert theirs["token_ids"] == ours["token_ids"]
        assert theirs["finish_reason"] == ours["finish_reason"]
        assert ("logprobs" in theirs) == ("logprobs" in ours)
        if "logprobs" in ours:
            torch.testing.assert_close(theirs["logprobs"], ours["logprobs"], rtol=0, atol=5e-2 if rounds else 1e-4)
    return pairs


@pytest.mark.parametrize("name", ["chunks", "different ends"])
def test_ranks_give_the_tokens_of_one(runs, name):
    """B6, B8, B25, A39, A41, A44: each part of a packed matrix and its scales are cut by themselves; rows stand in one
    order everywhere."""
    check_same(runs, name)


def test_prefix_hits(runs):
    check_same(runs, "prefix hits")
    cached = [[output["num_cached_tokens"] for output in run["prefix hits"]] for run in runs[:2]]
    assert cached[0] == cached[1]
    assert sum(cached[0]) > 0


def test_preemption(runs):
    check_same(runs, "preemption")
    assert runs[0]["preemptions"] == runs[1]["preemptions"] > 0


@pytest.mark.parametrize("name", ["samples", "engine's seeds"])
def test_drawn_tokens(runs, name):
    """A43: every rank draws from the same logits with the same noise; with n, with seeds and without."""
    pairs = check_same(runs, name)
    assert len({tuple(ours["token_ids"]) for ours, _ in pairs}) > len(pairs) // 2


def test_filters_penalties_and_biases(runs):
    check_same(runs, "kinds of draws")


def test_the_padding_of_the_vocabulary_is_never_listed(runs):
    """A42: with log probabilities of the whole vocabulary each of its tokens is there once, and nothing else."""
    for run in runs[:2]:
        assert sorted(run["kinds of draws"][3]["top_logprobs"][0]) == list(range(VOCAB))
    drawn = {
        token for name in ("samples", "kinds of draws") for s in samples_of(runs[1][name]) for token in s["token_ids"]
    }
    assert VOCAB - 1 in drawn, "the last token itself can be drawn"
    assert max(drawn) < VOCAB


def test_scores(runs):
    one, several, rounds = runs
    tolerance = 5e-2 if rounds else 1e-4
    for ours, theirs in zip(one["scores"], several["scores"], strict=True):
        torch.testing.assert_close(theirs["token_logprobs"][1:], ours["token_logprobs"][1:], rtol=0, atol=tolerance)
        assert [list(top or ()) for top in theirs["top_logprobs"]] == [list(top or ()) for top in ours["top_logprobs"]]


def test_ranks_give_the_tokens_of_transformers(checkpoint):
    """And log probabilities within 1e-4, as on one rank."""
    path = checkpoint("qwen3")
    with LLM(path, tensor_parallel_size=2, **SMALL) as llm:
        check_generate(llm, path, make_prompts(18, 3, 25))


@pytest.mark.parametrize("file_format", ["nanovllm", "compressed-tensors"])
def test_quantized_checkpoints(checkpoint, tmp_path, file_format):
    """B8, B25: weights and scales that lie in the checkpoint are cut as those made while loading."""
    path = str(tmp_path / "quantized")
    quantize_checkpoint(checkpoint("qwen3"), path, "int8", file_format=file_format, device="cpu")
    answers = []
    for size in (1, 2):
        with LLM(path, tensor_parallel_size=size, **SMALL) as llm:
            answers.append([output["token_ids"] for output in generate(llm, make_prompts(9, 20), greedy(12))])
    assert answers[0] == answers[1]


# Ranks as threads of this process: what layers hold and compute


def on_ranks(size, work):
    """What work(group) returns on each rank."""
    patience = timedelta(seconds=20)
    stores = [dist.TCPStore("127.0.0.1", 0, size, True, patience, False)]
    # A client of its own for each: one that waits lets nobody else ask.
    stores += [dist.TCPStore("127.0.0.1", stores[0].port, size, False, patience, False) for _ in range(1, size)]
    found, errors = {}, []

    def run(rank):
        try:
            found[rank] = work(Group(rank, size, stores[rank], torch.device("cpu"), "127.0.0.1"))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(size)]


def side_of(group, path, **knobs):
    config = EngineConfig(path, tensor_parallel_size=group.size, **{**SMALL, **knobs})
    return DeviceSide(config, torch.device("cpu"), group)


def test_every_rank_has_the_pool_of_the_one_with_least_memory(checkpoint, monkeypatch):
    """A13."""
    per_block = side_of(distributed.ALONE, checkpoint("qwen3")).runner.bytes_per_block // 2
    memory = {"0": 8 * 100 * per_block, "1": 8 * 50 * per_block}
    monkeypatch.setattr(platform, "cpu_memory", lambda: memory[threading.current_thread().name])
    sides = on_ranks(2, lambda group: side_of(group, checkpoint("qwen3"), num_kvcache_blocks=-1))
    assert [side.num_blocks for side in sides] == [49, 49], "one block is for padding"
    assert len({side.max_model_len for side in sides}) == 1


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_each_rank_holds_its_part_of_what_one_rank_holds(checkpoint, size, quantization):
    """B6, B8: query heads and both halves of the MLP in order of ranks, key heads shared where there are too few."""

    def parts_of(group):
        side = side_of(group, checkpoint("qwen2"), quantization=quantization)
        named = {}
        for name, _, views in loader.linear_parts(side.runner.model):
            named |= {f"{name}.{kind}": view.clone() for kind, view in views.items()}
        return named

    whole, ranks = parts_of(distributed.ALONE), on_ranks(size, parts_of)
    for name, tensor in whole.items():
        pieces, by_input = [rank[name] for rank in ranks], re.search("o_proj|down_proj", name)
        if re.search("k_proj|v_proj", name) and size == 4:
            assert torch.equal(pieces[0], pieces[1]), name
            pieces = pieces[::2]
        if by_input and tensor.dim() == 1:
            assert all(torch.equal(piece, tensor) for piece in pieces), name
        else:
            assert torch.equal(torch.cat(pieces, 1 if by_input else 0), tensor), name


@pytest.mark.parametrize("quantization", [None, "w8a8"])
def test_random_weights_do_not_depend_on_the_number_of_ranks(checkpoint, quantization):
    """B25 for load_format="dummy"."""

    def tensors_of(group):
        side = side_of(group, checkpoint("llama"), load_format="dummy", quantization=quantization)
        model = side.runner.model
        down = dict(model.model.layers[1].mlp.down_proj.named_parameters())
        return model.lm_head.weight, down["weight" if quantization is None else "qweight"]

    (head, down), ranks = tensors_of(distributed.ALONE), on_ranks(2, tensors_of)
    assert torch.equal(torch.cat([rank[0] for rank in ranks])[:VOCAB], head[:VOCAB])
    assert torch.equal(torch.cat([rank[1] for rank in ranks], 1), down)


def test_embedding_and_head_over_a_padded_vocabulary():
    """A40, A41, A42: rows of several ranks together, also where a rank has no token at all."""
    weight = torch.randn(9, 6)
    ids, hidden = torch.arange(9).flip(0), torch.randn(5, 6)

    def work(group):
        with distributed.use(group):
            layer = Embedding(9, 6)
        layer.weight.fill_(torch.nan)
        layer.place(layer.weight).fill(weight)
        out = empty_logits(5, 9, torch.float32, torch.device("cpu"))
        assert layer.logits(hidden, out).data_ptr() == out.data_ptr()
        return layer(ids), layer.logits(hidden), out[:, :9]

    for rows, logits, out in on_ranks(8, work):
        assert torch.equal(rows, weight[ids])
        torch.testing.assert_close(logits, hidden @ weight.T)
        assert torch.equal(out, logits)


def test_a_token_spread_over_ranks_is_quantized_as_on_one():
    """w8a8: one scale for all ranks; zeros, and a NaN that one rank alone sees."""
    x = torch.randn(6, 16) * torch.tensor([1e-3, 1, 50, 0, 1, 1])[:, None]
    x[4, 3] = torch.nan
    x[5, 12] = -torch.inf
    whole = quantize_tokens(x)
    ranks = on_ranks(2, lambda group: quantize_tokens(x.chunk(2, 1)[group.rank], group=group))
    for rank in ranks:
        torch.testing.assert_close(rank.scales, whole.scales, rtol=0, atol=0, equal_nan=True)
    finite = whole.scales.isfinite()
    assert torch.equal(torch.cat([rank.values for rank in ranks], 1)[finite], whole.values[finite])


def test_what_ranks_tell_each_other():
    def work(group):
        values = group.exchange({"rank": group.rank})
        return (
            values,
            group.all_reduce(torch.full((2,), 1.0 + group.rank)),
            group.all_gather(torch.tensor([[group.rank]])),
        )

    for values, total, gathered in on_ranks(3, work):
        assert values == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert total.tolist() == [6.0, 6.0]
        assert gathered.tolist() == [[0, 1, 2]]


def test_one_rank_pays_nothing(monkeypatch, checkpoint):
    """No process group, no connection, no copy."""
    x = torch.randn(2, 3)
    assert distributed.ALONE.all_reduce(x) is x
    assert distributed.ALONE.all_gather(x) is x
    for name in ("ProcessGroupGloo", "TCPStore", "rendezvous"):
        monkeypatch.setattr(dist, name, None)
    with LLM(checkpoint("qwen3"), **SMALL) as llm:
        generate(llm, make_prompts(5), greedy(3))


# What cannot be cut


@pytest.mark.parametrize(
    ("shape", "size", "parts"),
    [
        ({}, 3, ["num_attention_heads=4", "1, 2, 4"]),
        ({"intermediate_size": 98}, 4, ["intermediate_size=98", "1, 2, 7"]),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, ["num_key_value_heads=3"]),
        ({}, 9, ["at most 8"]),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_refused(tmp_path, shape, size, parts):
    """With the value, the limit and the knob, before a process is started."""
    path = make_checkpoint(tmp_path, "qwen3", **shape)
    with pytest.raises(ValueError, match=f"tensor_parallel_size={size} is not allowed") as error:
        LLM(path, tensor_parallel_size=size, **SMALL)
    assert all(part in str(error.value) for part in parts)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert platform.resolve_device("cuda", 1) == torch.device("cuda", 1)
    assert platform.resolve_device("cuda:1", 0) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"needs GPU 2, and torch sees 2 .*tensor_parallel_size"):
        platform.resolve_device("cuda:1", 1)
