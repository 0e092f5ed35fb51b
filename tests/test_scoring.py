"""score(): log probabilities of a prompt's tokens are transformers', in one piece or many, alone or among others."""

import pytest
import torch
from checkpoints import hf_full_logprobs, hf_logprobs
from engine_helpers import TOLERANCE, SequenceLog, check_generate, generate, greedy, make_prompts, oracle_tokens

from nanovllm import SamplingParams
from nanovllm.engine.sequence import Status

B = 4


def check_score(path, prompt, score, num_top=0):
    """One entry per token, the first without a number, each within the tolerance of transformers'."""
    assert score["token_ids"] == prompt
    first, *logprobs = score["token_logprobs"]
    assert first is None
    expected = hf_logprobs(path, prompt)
    torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=TOLERANCE)
    assert score["sum_logprob"] == pytest.approx(float(expected.double().sum()), abs=TOLERANCE * len(prompt))
    first, *tops = score["top_logprobs"]
    assert first is None
    for top, full in zip(tops, hf_full_logprobs(path, prompt)[:-1], strict=True):
        values = torch.tensor([entry.logprob for entry in top.values()])
        torch.testing.assert_close(values, full[list(top)], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(values, full.topk(num_top).values, rtol=0, atol=TOLERANCE)


def check_scores(llm, path, prompts, num_top=0):
    scores = llm.score(prompts, logprobs=num_top)
    assert len(scores) == len(prompts)
    for prompt, score in zip(prompts, scores, strict=True):
        check_score(path, prompt, score, num_top)
    return scores


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "sansho"])
def test_scores_are_those_of_transformers(make_llm, request, family):
    """A70: prompts of mixed lengths in one call, with the three most likely tokens of each place."""
    path = request.getfixturevalue(f"{family}_path")
    check_scores(make_llm(path), path, make_prompts(2, 30, 7, 64, 3), num_top=3)


@pytest.mark.parametrize("length", [B + 1, 2 * B, 2 * B + 1])
def test_scoring_the_same_prompt_twice(make_llm, qwen3_path, length):
    """A71: a cached prefix has no logits, so it is not used; the results are equal."""
    llm = make_llm(qwen3_path)
    prompts = make_prompts(length)
    first, second = (check_scores(llm, qwen3_path, prompts, num_top=2) for _ in range(2))
    assert first == second


def test_equal_prompts_scored_in_one_call(make_llm, qwen3_path):
    """A71, A4."""
    first, second = check_scores(make_llm(qwen3_path), qwen3_path, make_prompts(3 * B) * 2)
    assert first["token_logprobs"] == pytest.approx(second["token_logprobs"], abs=1e-5)


def test_scoring_and_generating_share_what_they_may(make_llm, qwen3_path):
    """A71: a scored prompt warms the cache for generate(), and a generated one changes no score."""
    llm = make_llm(qwen3_path)
    prompts = make_prompts(3 * B)
    check_scores(llm, qwen3_path, prompts)
    (output,) = check_generate(llm, qwen3_path, prompts)
    assert output["num_cached_tokens"] == 2 * B
    check_scores(llm, qwen3_path, [prompts[0] + output["token_ids"]])


@pytest.mark.parametrize("budget", range(1, 18))
def test_a_prompt_scored_in_chunks(make_llm, qwen3_path, budget):
    """A8: every cut of 17 tokens, beside a second prompt that starts within a cut step."""
    llm = make_llm(qwen3_path, max_num_batched_tokens=budget)
    check_scores(llm, qwen3_path, make_prompts(17, 6), num_top=1)


@pytest.mark.parametrize("length", [256, 257, 258, 400])
@pytest.mark.parametrize("budget", [512, 300])
def test_a_long_prompt_is_scored_in_pieces(make_llm, qwen3_path, length, budget):
    """More rows than logits are kept at once: the pieces meet, also where a chunk ends inside one."""
    llm = make_llm(qwen3_path, num_kvcache_blocks=128, max_num_batched_tokens=budget)
    check_scores(llm, qwen3_path, make_prompts(length, 5), num_top=1)


def test_a_single_token_has_nothing_before_it(make_llm, qwen3_path):
    llm = make_llm(qwen3_path)
    alone, longer = llm.score([[7], [7, 8]])
    assert (alone["token_logprobs"], alone["sum_logprob"]) == ([None], 0.0)
    check_score(qwen3_path, [7, 8], longer)
    assert llm.score([[7]])[0] == alone


def test_scoring_uses_the_last_place_of_the_pool(make_llm, qwen3_path):
    """A77: nothing is drawn, so max_model_len tokens may be scored."""
    llm = make_llm(qwen3_path, max_model_len=32, num_kvcache_blocks=8)
    check_scores(llm, qwen3_path, make_prompts(32))


def test_a_prompt_scored_while_a_stream_is_preempting_it(make_llm, qwen3_path):
    """A71, A18: the stream's sequence is older and takes the blocks that the long prompt's chunks hold; scores are
    neither lost nor doubled."""
    llm = make_llm(qwen3_path, num_kvcache_blocks=10, max_num_batched_tokens=3)
    short, long = make_prompts(8, 24)
    stream = llm.stream(short, greedy(24))
    tokens = next(stream)["token_ids"]
    seqs = SequenceLog(llm)
    check_scores(llm, qwen3_path, [long], num_top=2)
    assert seqs.num_preemptions > 0
    for item in stream:
        tokens += item["token_ids"]
    assert tokens == oracle_tokens(qwen3_path, short, 24)


@pytest.mark.parametrize("blocks", [11, 64])
def test_a_prompt_is_scored_and_continued_by_one_request(make_llm, qwen3_path, blocks):
    """A70: scores of the prompt and tokens after it, also when it is preempted half way and then cut elsewhere."""
    llm = make_llm(qwen3_path, num_kvcache_blocks=blocks, max_num_batched_tokens=3)
    engine = llm.engine
    older, prompt = make_prompts(8, 30)
    seqs = [*engine.add(older, greedy(24)), *engine.add(prompt, greedy(8), prompt_logprobs=0)]
    scored = seqs[1]
    scored_when_preempted = None
    while any(seq.status is not Status.FINISHED for seq in seqs):
        engine.step()
        if scored.num_preemptions and scored_when_preempted is None:
            scored_when_preempted = scored.num_scored
    engine.drain()
    if blocks == 11:
        assert 0 < scored_when_preempted < 29
        assert scored_when_preempted % 3, "anew it is cut at multiples of 3, so a chunk begins with scored tokens"
    assert scored.output_token_ids == oracle_tokens(qwen3_path, prompt, 8)
    expected = hf_logprobs(qwen3_path, prompt)
    torch.testing.assert_close(torch.tensor(scored.prompt_token_logprobs), expected, rtol=0, atol=TOLERANCE)


def test_scores_of_an_answer_are_its_own_logprobs(make_llm, qwen3_path):
    """Prefill and decode agree: an answer scored as a prompt has the log probabilities it was drawn with."""
    llm = make_llm(qwen3_path)
    (prompt,) = make_prompts(9)
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, logprobs=0)
    (output,) = generate(llm, [prompt], params)
    (score,) = llm.score([prompt + output["token_ids"]])
    assert score["token_logprobs"][len(prompt) :] == pytest.approx(output["logprobs"], abs=TOLERANCE)
