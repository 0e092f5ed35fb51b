"""Small pools: sequences are preempted and computed anew, and nobody can tell from the answers. Limits of a pool."""

import logging

import pytest
from engine_helpers import (
    SequenceLog,
    check_generate,
    check_idle,
    check_output,
    generate,
    greedy,
    make_prompts,
    oracle_tokens,
)

from nanovllm import SamplingParams

PROMPTS = make_prompts(12, 3, 7, 16, 5, 9, 1, 10)
# Every kind of draw; each needs something of the sequence to survive a preemption.
KINDS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 3},
    "seedless": {"temperature": 1.0},
    "filtered": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "presence penalty": {"temperature": 0, "presence_penalty": 1.5},
    "frequency penalty": {"temperature": 0.8, "frequency_penalty": 1.0},
    "repetition penalty": {"temperature": 0, "repetition_penalty": 1.8},
    "bias": {"temperature": 0.5, "logit_bias": {7: 3.0, 11: -2.0}},
}


def tiny_pool(make_llm, path, **knobs):
    """Room for two or three of eight sequences."""
    return make_llm(path, **{"num_kvcache_blocks": 9, "max_num_batched_tokens": 16, **knobs})


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_greedy_answers_survive_preemption(make_llm, request, family):
    """A18: eight prompts in a pool for two or three, against transformers."""
    path = request.getfixturevalue(f"{family}_path")
    llm = tiny_pool(make_llm, path)
    seqs = SequenceLog(llm)
    check_generate(llm, path, PROMPTS, max_tokens=20)
    assert seqs.num_preemptions >= 4


@pytest.mark.parametrize(
    "knobs", [{"max_num_batched_tokens": 3}, {"enable_prefix_caching": False}, {"max_num_seqs": 3}]
)
def test_preemption_together_with(make_llm, qwen3_path, knobs):
    """A18: chunked prefill; no prefixes to come back to; fewer rows."""
    llm = tiny_pool(make_llm, qwen3_path, **knobs)
    seqs = SequenceLog(llm)
    check_generate(llm, qwen3_path, PROMPTS, max_tokens=20)
    assert seqs.num_preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_pool_gives_what_a_large_one_gives(make_llm, qwen3_path, kind):
    """A18: token for token, with log probabilities, for every kind of draw and three samples per prompt."""
    params = SamplingParams(max_tokens=18, ignore_eos=True, logprobs=3, n=3, **KINDS[kind])
    llm = tiny_pool(make_llm, qwen3_path)
    seqs = SequenceLog(llm)
    small, large = (generate(one, PROMPTS[:4], params) for one in (llm, make_llm(qwen3_path)))
    assert seqs.num_preemptions >= 4
    for one, other in zip(small, large, strict=True):
        assert len(one["outputs"]) == 3
        for sample, expected in zip(one["outputs"], other["outputs"], strict=True):
            assert sample["token_ids"] == expected["token_ids"]
            assert sample["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)
            assert [list(top) for top in sample["top_logprobs"]] == [list(top) for top in expected["top_logprobs"]]


def test_all_kinds_of_draws_preempted_together(make_llm, qwen3_path):
    """A18: what one row needs does not leak into the next owner of its row."""
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, logprobs=i % 3, **kind) for i, kind in enumerate(KINDS.values())
    ]
    llm = tiny_pool(make_llm, qwen3_path)
    seqs = SequenceLog(llm)
    small = generate(llm, PROMPTS, params)
    assert seqs.num_preemptions >= 4
    for i, (output, one) in enumerate(zip(small, params, strict=True)):
        fresh = make_llm(qwen3_path)
        fresh.engine._num_requests = i  # a seedless request's noise goes by its number
        (expected,) = generate(fresh, [PROMPTS[i]], one)
        assert output["token_ids"] == expected["token_ids"]
        assert output["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)


def test_stop_tokens_and_preemption(make_llm, qwen3_path):
    """A18, A24: some end while they wait for their row; the token in flight is not lost, none comes after it."""
    stops = [oracle_tokens(qwen3_path, prompt, 20)[3 + i] for i, prompt in enumerate(PROMPTS)]
    llm = tiny_pool(make_llm, qwen3_path)
    seqs = SequenceLog(llm)
    outputs = generate(llm, PROMPTS, [greedy(20, stop_token_ids=[stop]) for stop in stops])
    assert seqs.num_preemptions > 0
    for prompt, output, stop in zip(PROMPTS, outputs, stops, strict=True):
        check_output(qwen3_path, prompt, output, 20, eos_ids=(stop,))


def test_a_shared_prefix_and_preemption(make_llm, qwen3_path):
    """A31: under pressure no block of the common start is taken from those who still read it."""
    (prefix,) = make_prompts(8)
    prompts = [[*prefix, *tail] for tail in make_prompts(1, 2, 3, 4, 5, 6, seed=2)]
    llm = tiny_pool(make_llm, qwen3_path)
    seqs = SequenceLog(llm)
    outputs = check_generate(llm, qwen3_path, prompts, max_tokens=20)
    assert seqs.num_preemptions > 0
    assert sum(output["num_cached_tokens"] == 8 for output in outputs) >= 4


def test_a_stream_that_is_preempted(make_llm, qwen3_path):
    """Its tokens come once each and in order, while a whole generate() pushes it around."""
    llm = tiny_pool(make_llm, qwen3_path, num_kvcache_blocks=8)
    seqs = SequenceLog(llm)
    first, second = (llm.stream(prompt, greedy(20)) for prompt in PROMPTS[:2])
    tokens = [next(first)["token_ids"], next(second)["token_ids"]]
    check_generate(llm, qwen3_path, PROMPTS[4:6], max_tokens=12)
    for stream, own in zip((first, second), tokens, strict=True):
        for item in stream:
            own += item["token_ids"]
    assert seqs.num_preemptions > 0
    assert tokens == [oracle_tokens(qwen3_path, prompt, 20) for prompt in PROMPTS[:2]]


# Limits


def test_two_requests_in_a_pool_for_one_and_a_half(make_llm, qwen3_path):
    """A26: neither fails."""
    llm = make_llm(qwen3_path, num_kvcache_blocks=6)
    seqs = SequenceLog(llm)
    check_generate(llm, qwen3_path, make_prompts(8, 8), max_tokens=12)
    assert [seq.num_preemptions > 0 for seq in seqs] == [False, True]


def test_a_sequence_that_outgrows_the_pool_ends_with_length(make_llm, qwen3_path, caplog):
    """A10: pool of 2 blocks of 4, a prompt of 6, 50 tokens wanted: two fit, and the log says why no more."""
    with caplog.at_level(logging.WARNING, logger="nanovllm"):
        llm = make_llm(qwen3_path, num_kvcache_blocks=2)
    assert any("max_model_len is 8" in message for message in caplog.messages)
    (prompt,) = make_prompts(6)
    (output,) = generate(llm, [prompt], greedy(50))
    assert output["finish_reason"] == "length"
    check_output(qwen3_path, prompt, output, 2)
    check_generate(llm, qwen3_path, make_prompts(3), max_tokens=5)


def test_a_prompt_that_can_never_fit_is_refused_and_the_next_one_served(make_llm, qwen3_path):
    """A11: pool of 2 blocks of 4; a prompt of 20 beside a short one: nothing is queued."""
    llm = make_llm(qwen3_path, num_kvcache_blocks=2)
    short, long = make_prompts(3, 20)
    with pytest.raises(ValueError, match=r"20 tokens.* max_model_len is 8.*num_kvcache_blocks"):
        generate(llm, [short, long], greedy(4))
    check_idle(llm)
    check_generate(llm, qwen3_path, [short], max_tokens=4)


@pytest.mark.parametrize("ask", ["generate", "stream", "score"])
def test_one_token_too_many_is_refused_and_the_next_prompt_served(make_llm, qwen3_path, ask):
    """A20: a prompt of max_model_len + 1 tokens, then a normal one; then the longest that fits."""
    llm = make_llm(qwen3_path, max_model_len=32)
    for length in (32, 33) if ask != "score" else (33,):
        with pytest.raises(ValueError, match=rf"{length} tokens.*max_model_len is 32"):
            getattr(llm, ask)(make_prompts(length)[0])
        check_idle(llm)
    check_generate(llm, qwen3_path, make_prompts(5), max_tokens=4)
    check_generate(llm, qwen3_path, make_prompts(31), max_tokens=1)


def test_a_pool_of_exactly_one_sequence(make_llm, qwen3_path):
    """A10: max_model_len tokens and not a block more; eight requests take turns."""
    llm = make_llm(qwen3_path, max_model_len=28, num_kvcache_blocks=7)
    prompts = make_prompts(16, 8, 12, 1, 16, 15, 9, 4)
    check_generate(llm, qwen3_path, prompts, max_tokens=12)


@pytest.mark.parametrize(
    ("knobs", "parts"),
    [
        ({"num_kvcache_blocks": 2, "max_model_len": 9}, ["max_model_len=9", "holds 8 tokens", "num_kvcache_blocks"]),
        ({"num_kvcache_blocks": 1, "kvcache_block_size": 1}, ["too small", "holds 1 token"]),
    ],
)
def test_a_pool_too_small_for_one_sequence_is_refused(make_llm, qwen3_path, knobs, parts):
    """A10: at construction, with the numbers and the knob."""
    with pytest.raises(ValueError) as error:
        make_llm(qwen3_path, **knobs)
    assert all(part in str(error.value) for part in parts)
