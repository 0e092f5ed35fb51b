"""Drawing tokens: filters, penalties and noise against plain arithmetic, then the same knobs through an engine."""

import math

import numpy as np
import pytest
import torch
from checkpoints import hf_full_logprobs, hf_model
from transformers import RepetitionPenaltyLogitsProcessor

from nanovllm import SamplingParams
from nanovllm.kernels import sampling

PROMPT = [17, 230, 5, 301, 77, 301, 140, 9, 411, 62, 5, 300]
VOCAB_SIZE = 512


def floats(*values):
    return torch.tensor(values, dtype=torch.float32)


def ints(*values):
    return torch.tensor(values)


# Filters


def kept_tokens(logits, top_k, top_p, min_p):
    """The rule in float64, one token at a time: min-p, then top-k, then top-p of what is left."""
    weights = {i: math.exp(logit - max(logits)) for i, logit in enumerate(logits)}
    kept = sorted((i for i in weights if weights[i] >= min_p), key=lambda i: -weights[i])
    kept = kept[:top_k] if top_k > 0 else kept
    total, reached, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if reached >= top_p and nucleus:
            break
        nucleus.append(i)
        reached += weights[i] / total
    return set(nucleus)


def filtered(logits, top_k, top_p, min_p):
    """Kept token ids per row; kept logits must be unchanged."""
    out = sampling.filter_logits_ref(logits, top_k, top_p, min_p)
    assert torch.equal(out[out > -torch.inf], logits[out > -torch.inf])
    return [set(row.nonzero()[:, 0].tolist()) for row in out > -torch.inf]


@pytest.mark.parametrize("kinds", ["k", "p", "m", "kp", "km", "pm", "kpm"])
def test_filters_keep_what_the_rule_keeps(kinds):
    """top-k, top-p and min-p, alone and combined, other values in every row."""
    rows = 200
    draw = np.random.default_rng(len(kinds))
    logits = torch.tensor(draw.normal(0, 3, (rows, 40)), dtype=torch.float32)
    top_k = torch.tensor(draw.integers(-1, 45, rows) if "k" in kinds else [-1] * rows)
    top_p = torch.tensor(draw.uniform(0.05, 1, rows) if "p" in kinds else [1.0] * rows, dtype=torch.float32)
    min_p = torch.tensor(draw.uniform(0, 0.5, rows) if "m" in kinds else [0.0] * rows, dtype=torch.float32)
    expected = [
        kept_tokens(*row) for row in zip(logits.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    ]
    assert filtered(logits, top_k, top_p, min_p) == expected
    assert len({len(kept) for kept in expected}) > 5, "the rows hardly differ"


def test_filters_at_their_edges():
    """1.0 and 0 keep all however flat the distribution; tiny values keep the most likely token."""
    flat = torch.zeros(6, 70000)
    flat[:, 5] = 1e-3
    top_k, top_p, min_p = ints(-1, 0, 10**6, 1, -1, -1), floats(1, 1, 1, 1, 1e-50, 1), floats(0, 0, 0, 0, 0, 1)
    kept = filtered(flat, top_k, top_p, min_p)
    assert [len(row) for row in kept] == [70000] * 3 + [1, 1, 1]
    assert kept[3] == kept[4] == kept[5] == {5}


def test_ties_are_cut_by_count_in_top_k_and_kept_in_min_p():
    """Of four equal tokens top_k=2 keeps the first two; min_p=1 keeps all that share the first place."""
    logits = floats(1, 3, 3, 3, 3, 0).repeat(3, 1)
    by_k, by_p, by_m = filtered(logits, ints(2, -1, -1), floats(1, 0.6, 1), floats(0, 0, 1))
    assert (by_k, by_p, by_m) == ({1, 2}, {1, 2, 3}, {1, 2, 3, 4})


def test_banned_tokens_stay_banned():
    """A logit of -inf (min_tokens, logit_bias) is not revived by a filter that keeps all."""
    assert filtered(floats(-math.inf, 1, 2)[None], ints(0), floats(1), floats(0)) == [{1, 2}]


# Penalties


def test_penalties_follow_vllm():
    """Repetition over prompt and output, divided or multiplied by sign; frequency and presence over output alone."""
    draw = np.random.default_rng(0)
    logits = draw.normal(0, 2, (6, 30))
    in_prompt, counts = draw.random((6, 30)) < 0.3, draw.integers(0, 3, (6, 30))
    presence, frequency = draw.uniform(-2, 2, 6), draw.uniform(-2, 2, 6)
    repetition = np.array([1.0, 1.3, 0.7, 2.0, 1.0, 1.1])
    expected = logits.copy()
    for r, i in np.ndindex(logits.shape):
        if in_prompt[r, i] or counts[r, i]:
            expected[r, i] = logits[r, i] / repetition[r] if logits[r, i] > 0 else logits[r, i] * repetition[r]
        if counts[r, i]:
            expected[r, i] -= frequency[r] * counts[r, i] + presence[r]
    args = [torch.tensor(x) for x in (logits, in_prompt, counts, presence, frequency, repetition)]
    torch.testing.assert_close(sampling.penalize_ref(*args), torch.tensor(expected))


# Noise and draws


def chi_square(draws, probs):
    """Pearson's statistic, as distances from its mean in standard deviations."""
    observed = np.bincount(draws, minlength=len(probs))
    assert not observed[probs == 0].any(), "a token of probability 0 was drawn"
    expected = len(draws) * probs[probs > 0]
    statistic = ((observed[probs > 0] - expected) ** 2 / expected).sum()
    freedom = (probs > 0).sum() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


SOURCES = {
    "positions": lambda n: (torch.full((n,), 7), torch.arange(n)),
    "seeds": lambda n: (torch.arange(n), torch.full((n,), 11)),
    "high bits of seeds": lambda n: (torch.arange(n) << 32, torch.full((n,), 11)),
    "requests of an engine": lambda n: ((3 << 32) + (torch.arange(n) << 16), torch.full((n,), 300)),
    "a diagonal": lambda n: (torch.arange(n), torch.arange(n)),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("filters", [None, (5, 1.0, 0.0), (-1, 0.7, 0.0), (-1, 1.0, 0.2), (6, 0.9, 0.05)], ids=str)
def test_draws_have_the_exact_distribution(source, filters, monkeypatch):
    """Chi-square over 40,000 draws against softmax(logits / T), restricted to what the filters keep; three blocks."""
    monkeypatch.setattr(sampling, "_MIN_BLOCK", 4)
    count, temperature = 40000, 0.8
    logits = torch.tensor(np.random.default_rng(5).normal(0, 1.5, 12), dtype=torch.float32)
    seeds, positions = SOURCES[source](count)
    args = [torch.full((count,), temperature), seeds, positions]
    per_row = None if filters is None else tuple(torch.full((count,), value) for value in filters)
    draws = sampling.sample_ref(logits.expand(count, -1), *args, per_row).numpy()
    scaled = logits.double().numpy() / temperature
    probs = np.exp(scaled - scaled.max())
    if filters is not None:
        probs[[i not in kept_tokens(scaled.tolist(), *filters) for i in range(12)]] = 0
    assert abs(chi_square(draws, probs / probs.sum())) < 5


def noise_words(seeds, positions, counters):
    """The noise as uniform numbers in (0, 1)."""
    return -torch.expm1(-sampling.exponential_noise_ref(seeds, positions, counters).double())


@pytest.mark.parametrize("source", SOURCES)
def test_noise_is_uniform_and_uncorrelated(source):
    """2 million numbers in 64 bins; neighbours in a row and in a column have nothing in common, nor have the noise of
    a block and that of a token."""
    ids = torch.arange(1000)
    noise = noise_words(*SOURCES[source](2000), ids)
    of_blocks = noise_words(*SOURCES[source](2000), 2**32 - 1 - ids)
    bins = (noise.flatten() * 64).long().numpy()
    assert abs(chi_square(bins, np.full(64, 1 / 64))) < 5
    centred, of_blocks = ((words - 0.5) * math.sqrt(12) for words in (noise, of_blocks))
    for a, b in ((centred[:, 1:], centred[:, :-1]), (centred[1:], centred[:-1]), (centred, of_blocks)):
        assert abs((a * b).mean().item()) * math.sqrt(a.numel()) < 5
    assert len(noise.unique()) > 0.95 * noise.numel()


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 200, 2**32 - 1])
def test_noise_is_positive_and_finite_for_every_word(word, monkeypatch):
    """Infinite noise would drop the only token that a filter left and draw token 0 instead."""
    monkeypatch.setattr(sampling, "_mix32", lambda x: torch.full_like(x, word))
    noise = sampling.exponential_noise_ref(ints(1), ints(1), torch.arange(4))
    assert torch.all((noise > 0) & noise.isfinite())
    filters = (ints(1), floats(1.0), floats(0.0))
    assert sampling.sample_ref(floats(0, 1, 2, 1)[None], floats(1.0), ints(1), ints(1), filters).tolist() == [2]


def test_noise_depends_on_its_own_row_alone():
    """A53: neither the other rows nor the order of the batch matters; nor does what other numbers are wanted."""
    seeds, positions, ids = torch.randint(2**62, (50,)), torch.randint(40000, (50,)), torch.arange(200)
    noise = sampling.exponential_noise_ref(seeds, positions, ids[:100])
    order = torch.randperm(50)
    assert torch.equal(sampling.exponential_noise_ref(seeds[order], positions[order], ids[:100]), noise[order])
    assert torch.equal(sampling.exponential_noise_ref(seeds[3:4], positions[3:4], ids)[:, :100], noise[3:4])
    assert not torch.equal(sampling.exponential_noise_ref(seeds ^ 2**61, positions, ids[:100]), noise)


def test_temperature_zero_row_by_row():
    """A50: greedy rows take the largest logit beside rows that draw what they draw alone."""
    logits = torch.randn(40, 30)
    temperature = torch.tensor([0.0, 1.0] * 20)
    seeds, positions = torch.arange(40), torch.arange(40) + 5
    mixed = sampling.sample_ref(logits, temperature, seeds, positions, None)
    assert torch.equal(mixed[::2], logits.argmax(-1)[::2])
    alone = [sampling.sample_ref(*(x[i : i + 1] for x in (logits, temperature, seeds, positions)), None)
             for i in range(1, 40, 2)]  # fmt: skip
    assert torch.equal(mixed[1::2], torch.cat(alone))
    assert not torch.equal(mixed, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_finite_logits_are_marked(temperature):
    """A49: NaN, +inf or nothing but -inf give -1; a banned token beside finite ones does not."""
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[1, 2, nan], [1, inf, 2], [-inf, -inf, -inf], [-inf, 1, -inf]])
    rows = torch.arange(4)
    for filters in (None, (ints(2, 2, 2, 2), floats(0.9, 0.9, 0.9, 0.9), floats(0, 0, 0, 0))):
        drawn = sampling.sample_ref(logits, torch.full((4,), temperature), rows, rows, filters)
        assert drawn.tolist() == [-1, -1, -1, 1]
    assert sampling.greedy_ref(logits).tolist() == [-1, -1, -1, 1]
    chosen, _, _ = sampling.token_logprobs_ref(logits, torch.tensor([0, 0, 0, 1]), 0)
    assert chosen.isnan().tolist() == [True, True, True, False], "an infinite logit gives no log probability"


# Through an engine


@pytest.fixture
def llm(make_llm, qwen3_path):
    return make_llm(qwen3_path, max_num_seqs=64)


def run(llm, prompts, **params):
    params = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, **params}
    return llm.generate(prompts, SamplingParams(**params), use_tqdm=False)


def tokens(llm, prompts, **params):
    return [output["token_ids"] for output in run(llm, prompts, **params)]


def test_answer_does_not_depend_on_the_batch(llm):
    """A50, A51, A53: greedy and seeded requests alone, eightfold, and beside seedless and greedy neighbours."""
    kinds = [{"temperature": 0}, {"temperature": 1.0, "seed": 42}, {"temperature": 0.9, "seed": 7, "top_p": 0.8}]
    for kind in kinds:
        one = SamplingParams(max_tokens=12, ignore_eos=True, **kind)
        noisy = SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.3, top_k=50)
        (alone,) = llm.generate([PROMPT], one, use_tqdm=False)
        eight = llm.generate([PROMPT] * 8, one, use_tqdm=False)
        for _ in range(4):
            mixed = llm.generate([[3, 4], PROMPT, [8] * 30, [5]], [noisy, one, noisy, one], use_tqdm=False)
            assert mixed[1]["token_ids"] == alone["token_ids"]
        assert all(output["token_ids"] == alone["token_ids"] for output in eight)


def test_drawn_tokens_have_transformers_distribution(llm, qwen3_path):
    """Temperature and top-k of a real model's logits, over 600 seeds."""
    count = 600
    drawn = [output["token_ids"][0] for output in run(llm, PROMPT, n=count, temperature=0.7, top_k=6, max_tokens=1,
                                                      seed=0)[0]["outputs"]]  # fmt: skip
    top = (hf_full_logprobs(qwen3_path, PROMPT)[-1] / 0.7).topk(6)
    probs = np.zeros(VOCAB_SIZE)
    probs[top.indices.numpy()] = top.values.softmax(-1).double().numpy()
    assert abs(chi_square(drawn, probs)) < 5


def test_seeds(llm, make_llm, qwen3_path):
    """The same seed repeats, others differ; without one, requests differ and a new engine repeats them."""
    hot = {"temperature": 1.0, "max_tokens": 16}
    assert tokens(llm, PROMPT, seed=1, **hot) == tokens(llm, PROMPT, seed=1, **hot)
    assert len({tuple(tokens(llm, PROMPT, seed=seed, **hot)[0]) for seed in (1, 2, 3, 2**32 + 1, 2**63 - 1)}) == 5
    again = [tokens(make_llm(qwen3_path, seed=seed), [PROMPT] * 3, **hot) for seed in (5, 5, 6)]
    assert again[0] == again[1] != again[2]
    assert len({tuple(ids) for ids in again[0]}) == 3


def test_n_samples(llm):
    """Sample i is what a request with seed + i gives; the request's own fields are the first sample's."""
    (output,) = run(llm, [PROMPT], n=4, seed=10, temperature=1.0, max_tokens=10, logprobs=2)
    singles = [run(llm, [PROMPT], seed=10 + i, temperature=1.0, max_tokens=10)[0] for i in range(4)]
    assert [sample["token_ids"] for sample in output["outputs"]] == [single["token_ids"] for single in singles]
    assert [sample["text"] for sample in output["outputs"]] == [single["text"] for single in singles]
    assert len({tuple(sample["token_ids"]) for sample in output["outputs"]}) == 4
    assert all(output[name] == output["outputs"][0][name] for name in output["outputs"][0])
    assert "outputs" not in singles[0]


def test_min_tokens(llm):
    """eos and stop_token_ids cannot be drawn before it, and can right after."""
    eos = sorted(llm.engine.eos_token_ids)[0]
    for extra in ({"ignore_eos": False}, {"stop_token_ids": [eos]}):
        for temperature in (0, 1.0):
            params = {"logit_bias": {eos: 100.0}, "temperature": temperature, "max_tokens": 9, **extra}
            assert tokens(llm, PROMPT, **params) == [[eos]]
            for least in (1, 4):
                (output,) = run(llm, PROMPT, min_tokens=least, **params)
                assert len(output["token_ids"]) == least + 1
                assert output["token_ids"].index(eos) == least
                assert output["finish_reason"] == "stop"


def test_logit_bias(llm, qwen3_path):
    """Added to the logit; log probabilities stay the model's own."""
    best, second = hf_full_logprobs(qwen3_path, PROMPT)[-1].topk(2).indices.tolist()
    assert tokens(llm, PROMPT, max_tokens=1, logit_bias={best: -100}) == [[second]]
    (output,) = run(llm, PROMPT, logit_bias={9: 100, 200: 1.5}, logprobs=1)
    assert output["token_ids"] == [9] * 8
    expected = hf_full_logprobs(qwen3_path, PROMPT + [9] * 8)[len(PROMPT) - 1 : -1]
    torch.testing.assert_close(torch.tensor(output["logprobs"]), expected[:, 9], atol=1e-4, rtol=0)


def test_stop_token_ids(llm):
    """The id ends the text, is part of token_ids, and is the stop reason."""
    (free,) = tokens(llm, PROMPT, max_tokens=16)
    stop = free[5]
    (output,) = run(llm, PROMPT, max_tokens=16, stop_token_ids=[stop, 1])
    assert output["token_ids"] == free[: free.index(stop) + 1]
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize(
    "penalties",
    [{"repetition": 1.7}, {"repetition": 0.8}, {"frequency": 1.5}, {"presence": 2.0}, {"frequency": -1.0},
     {"repetition": 1.2, "frequency": 0.7, "presence": 0.4}],
    ids=str,
)  # fmt: skip
def test_penalties_match_transformers(penalties, llm, qwen3_path):
    """Greedy with RepetitionPenaltyLogitsProcessor, and vLLM's formula for the other two; a neighbour has none."""
    ids = list(PROMPT)
    for _ in range(32):
        with torch.inference_mode():
            logits = hf_model(qwen3_path)(torch.tensor([ids])).logits[0, -1:]
        processor = RepetitionPenaltyLogitsProcessor(penalties.get("repetition", 1.0))
        scores = processor(torch.tensor([ids]), logits.clone())[0]
        counts = torch.bincount(torch.tensor(ids[len(PROMPT) :], dtype=torch.int64), minlength=VOCAB_SIZE)
        scores -= penalties.get("frequency", 0) * counts + penalties.get("presence", 0) * (counts > 0)
        ids.append(int(scores.argmax()))
    plain = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    named = {f"{name}_penalty": value for name, value in penalties.items()}
    penalized = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, **named)
    outputs = llm.generate([PROMPT] * 3, [plain, penalized, plain], use_tqdm=False)
    assert outputs[1]["token_ids"] == ids[len(PROMPT) :]
    assert outputs[0]["token_ids"] == outputs[2]["token_ids"] == tokens(llm, PROMPT, max_tokens=32)[0]
    assert outputs[0]["token_ids"] != outputs[1]["token_ids"], "the penalty does not show"


@pytest.mark.parametrize("k", [0, 1, 5, VOCAB_SIZE])
def test_logprobs_are_the_models_own(k, llm, qwen3_path):
    """Before temperature, penalties, bias and filters; k entries keyed by id, most likely first, none lost though
    many tokens share one text."""
    params = {"temperature": 1.5, "seed": 3, "top_k": 40, "repetition_penalty": 1.5, "logit_bias": {4: 2.0}}
    (output, other) = run(llm, [PROMPT, [1, 2]], logprobs=k, **params)
    expected = hf_full_logprobs(qwen3_path, PROMPT + output["token_ids"])[len(PROMPT) - 1 : -1]
    chosen = expected.gather(1, torch.tensor(output["token_ids"])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output["logprobs"]), chosen, atol=1e-4, rtol=0)
    assert len(output["top_logprobs"]) == len(other["top_logprobs"]) == 8
    for top, row in zip(output["top_logprobs"], expected, strict=True):
        values = [entry.logprob for entry in top.values()]
        assert len(top) == k
        assert values == sorted(values, reverse=True)
        torch.testing.assert_close(torch.tensor(values), row.topk(k).values, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(values), row[list(top)], atol=1e-4, rtol=0)


def test_each_request_gets_as_many_logprobs_as_it_asked_for(llm):
    """Whatever its neighbours in the batch want."""
    params = [SamplingParams(temperature=0, max_tokens=4, logprobs=k) for k in (None, 0, 2, 7)]
    outputs = llm.generate([PROMPT] * 4, params, use_tqdm=False)
    assert "logprobs" not in outputs[0] and "top_logprobs" not in outputs[0]
    assert [[len(top) for top in output["top_logprobs"]] for output in outputs[1:]] == [[0] * 4, [2] * 4, [7] * 4]
    assert outputs[1]["logprobs"] == outputs[2]["logprobs"] == outputs[3]["logprobs"]


@pytest.mark.parametrize("bad", [VOCAB_SIZE, -1, 10**12, True, "a", 1.0, None])
def test_bad_token_id_is_named(bad, llm):
    """A66: nothing outside the vocabulary reaches the model; the engine goes on."""
    for call in (llm.generate, llm.score, llm.stream):
        with pytest.raises(ValueError, match=rf"{bad!r}.*\[0, 512\)"):
            call([[5, bad, 6]])
    assert len(tokens(llm, PROMPT)[0]) == 8


def test_max_tokens(make_llm, qwen3_path):
    """A69: 1 gives exactly one token, None as many as fit; 0 and less are refused."""
    llm = make_llm(qwen3_path, max_model_len=50)
    assert [len(ids) for ids in tokens(llm, [PROMPT, [1]], max_tokens=1)] == [1, 1]
    outputs = run(llm, [PROMPT, [1], [2] * 49], max_tokens=None)
    assert [len(output["token_ids"]) for output in outputs] == [38, 49, 1]
    assert {output["finish_reason"] for output in outputs} == {"length"}
    assert len(tokens(llm, [PROMPT], max_tokens=1000)[0]) == 38
    for bad in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=rf"max_tokens={bad!r}"):
            SamplingParams(max_tokens=bad)
