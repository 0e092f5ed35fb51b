"""Whatever way a prompt takes through the engine, its answer is transformers': greedy tokens identical, log
probabilities within 1e-4, in float32. Small pools are in test_preemption_paths.py, scoring is in test_scoring.py."""

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
from nanovllm.engine import block_manager
from nanovllm.engine.sequence import Status

B = 4


@pytest.fixture(params=["qwen3_path", "llama_path", "qwen2_path", "sansho_path"])
def path(request):
    """Each family's checkpoint in turn."""
    return request.getfixturevalue(request.param)


# Every family


@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_one_prompt_alone(make_llm, path, length):
    check_generate(make_llm(path), path, make_prompts(length), max_tokens=32)


def test_a_batch_of_mixed_lengths(make_llm, path):
    check_generate(make_llm(path), path, make_prompts(1, 19, 4, 33, 8, 2, 5))


def test_chunks_and_prefix_hits_in_one_run(make_llm, path):
    """The same prompts twice: first in chunks, then from the cache."""
    llm = make_llm(path, max_num_batched_tokens=7)
    prompts = make_prompts(18, 3, 25)
    check_generate(llm, path, prompts)
    outputs = check_generate(llm, path, prompts)
    assert [output["num_cached_tokens"] for output in outputs] == [16, 0, 24]


def test_eos_and_stop_tokens_end_an_answer_where_transformers_ends_it(make_llm, path):
    """The token after the last one was drawn already, one step ahead, and is dropped."""
    (prompt,) = make_prompts(9)
    stop = oracle_tokens(path, prompt, 24)[10]
    (output,) = generate(make_llm(path), [prompt], greedy(24, stop_token_ids=[stop]))
    check_output(path, prompt, output, 24, eos_ids=(stop,))
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", stop)


# Batches


@pytest.mark.parametrize("size", range(1, 9))
def test_batches_of_every_size(make_llm, qwen3_path, size):
    check_generate(make_llm(qwen3_path), qwen3_path, make_prompts(*range(1, 4 * size, 4)))


def test_more_prompts_than_rows(make_llm, qwen3_path):
    """A22: rows are reused as sequences end, each at another step."""
    llm = make_llm(qwen3_path, max_num_seqs=2)
    prompts = make_prompts(5, 1, 9, 16, 3, 12, 2, 8, 4, 7)
    lengths = [1 + 3 * i % 8 for i in range(10)]
    outputs = generate(llm, prompts, [greedy(n) for n in lengths])
    for prompt, output, n in zip(prompts, outputs, lengths, strict=True):
        check_output(qwen3_path, prompt, output, n)


def test_an_answer_does_not_depend_on_who_else_is_there(make_llm, qwen3_path):
    """A51: one prompt alone, eight times, and among others."""
    llm = make_llm(qwen3_path)
    prompt, *others = make_prompts(11, 3, 27, 6, 14)
    check_generate(llm, qwen3_path, [prompt])
    check_generate(llm, qwen3_path, [prompt] * 8)
    check_generate(llm, qwen3_path, [*others[:2], prompt, *others[2:]])


def test_a_seeded_answer_does_not_depend_on_who_else_is_there(make_llm, qwen3_path):
    """A53: seed 42 alone, beside seedless neighbours, in four runs, in another engine."""
    prompt, *others = make_prompts(6, 9, 13)
    seeded = SamplingParams(temperature=1.0, seed=42, max_tokens=24, ignore_eos=True)
    free = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    answers, neighbours = [], []
    for batch in ([prompt], [prompt, others[0]], [others[1], prompt], [others[0], others[1], prompt]):
        llm = make_llm(qwen3_path)
        for _ in range(2):
            outputs = generate(llm, batch, [seeded if one is prompt else free for one in batch])
            answers += [output["token_ids"] for output in outputs if output["prompt_token_ids"] == prompt]
            neighbours += [output["token_ids"] for output in outputs if output["prompt_token_ids"] == others[0]]
    assert len(answers) == 8
    assert all(answer == answers[0] for answer in answers)
    assert neighbours[0] != neighbours[1], "a seedless request draws anew each time"


def test_samples_of_one_prompt_are_those_of_its_seeds(make_llm, qwen3_path):
    """n=3 with seed s gives what s, s + 1 and s + 2 give alone."""
    llm = make_llm(qwen3_path)
    (prompt,) = make_prompts(9)
    params = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    (together,) = generate(llm, [prompt], SamplingParams(n=3, seed=7, **params))
    alone = [generate(llm, [prompt], SamplingParams(seed=seed, **params))[0] for seed in (7, 8, 9)]
    tokens = [sample["token_ids"] for sample in together["outputs"]]
    assert tokens == [output["token_ids"] for output in alone]
    assert tokens[0] == together["token_ids"]
    assert len(set(map(tuple, tokens))) == 3


def test_two_calls_do_not_mix(make_llm, qwen3_path):
    """A29: three prompts, then two others, on one LLM: as many answers as prompts, in their order."""
    llm = make_llm(qwen3_path)
    prompts = make_prompts(5, 17, 2, 30, 9)
    check_generate(llm, qwen3_path, prompts[:3])
    check_idle(llm)
    check_generate(llm, qwen3_path, prompts[3:])


# Chunks


@pytest.mark.parametrize("budget", range(1, 18))
def test_a_prompt_cut_at_every_place(make_llm, qwen3_path, budget):
    """A8: 17 tokens with budgets 1 to 17, beside a shorter prompt that starts within a cut step."""
    llm = make_llm(qwen3_path, max_num_batched_tokens=budget)
    check_generate(llm, qwen3_path, make_prompts(17, 6), max_tokens=6)


def test_a_prompt_longer_than_the_budget_is_served(make_llm, qwen3_path):
    """A21: budget 8, prompt of 20."""
    llm = make_llm(qwen3_path, max_num_batched_tokens=8)
    check_generate(llm, qwen3_path, make_prompts(20))


def test_aborting_half_a_prompt_harms_nobody(make_llm, qwen3_path):
    """A25: after the first chunk of a long prompt its blocks come back; who decodes goes on, who waits is served."""
    llm = make_llm(qwen3_path, max_num_batched_tokens=8)
    engine = llm.engine
    short, long, late = make_prompts(3, 40, 12)
    (running,) = engine.add(short, greedy(12))
    engine.step()
    (gone,) = engine.add(long, greedy(12))
    (waiting,) = engine.add(late, greedy(12))
    while not gone.num_computed:
        engine.step()
    assert gone.num_computed == 8
    held = len(running.block_table)
    engine.abort([gone])
    assert engine.scheduler.block_manager.num_free == 64 - held
    while engine.has_unfinished:
        engine.step()
    assert gone.output_token_ids == []
    assert running.output_token_ids == oracle_tokens(qwen3_path, short, 12)
    assert waiting.output_token_ids == oracle_tokens(qwen3_path, late, 12)
    (output,) = check_generate(llm, qwen3_path, [long])
    assert output["num_cached_tokens"] == 8, "the chunk was computed, so it may be reused"


def test_new_prompts_do_not_stop_a_running_answer(make_llm, qwen3_path):
    """A17: a prompt arrives before every step; each token of the long answer takes two steps at most."""
    llm = make_llm(qwen3_path, max_num_batched_tokens=8, num_kvcache_blocks=128)
    engine = llm.engine
    (prompt,) = make_prompts(5)
    (running,) = engine.add(prompt, greedy(20))
    others, steps = [], 0
    while running.status is not Status.FINISHED:
        others += engine.add([steps, 7, 9, 11, 13, 15], greedy(2))
        engine.step()
        steps += 1
    assert steps <= 2 * 20 + 2
    assert running.output_token_ids == oracle_tokens(qwen3_path, prompt, 20)
    while engine.has_unfinished:
        engine.step()
    for seq in others[::7]:
        assert seq.output_token_ids == oracle_tokens(qwen3_path, seq.token_ids[:6], 2)


# Prefixes


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_prompt_that_is_cached_to_its_last_token(make_llm, qwen3_path, blocks):
    """A1: exactly B, then 2B tokens, twice; at least one token is computed again."""
    llm = make_llm(qwen3_path)
    prompts = make_prompts(blocks * B)
    check_generate(llm, qwen3_path, prompts, max_tokens=1)
    (again,) = check_generate(llm, qwen3_path, prompts, max_tokens=1)
    assert again["num_cached_tokens"] == (blocks - 1) * B


def test_equal_prompts_in_one_call(make_llm, qwen3_path):
    """A4: what the first one has not written yet is not read by the second."""
    llm = make_llm(qwen3_path)
    outputs = check_generate(llm, qwen3_path, make_prompts(2 * B + 1) * 2)
    assert [output["num_cached_tokens"] for output in outputs] == [0, 2 * B]


def test_equal_prompts_that_end_at_different_times(make_llm, qwen3_path):
    """A5: three of them, and a fourth later: right tokens, and each block comes back once."""
    llm = make_llm(qwen3_path)
    (prompt,) = make_prompts(2 * B + 1)
    lengths = (9, 2, 5)
    outputs = generate(llm, [prompt] * 3, [greedy(n) for n in lengths])
    for output, n in zip(outputs, lengths, strict=True):
        check_output(qwen3_path, prompt, output, n)
    check_idle(llm)
    check_generate(llm, qwen3_path, [prompt], max_tokens=9)


def test_a_cached_prefix_with_a_budget_smaller_than_the_prompt(make_llm, qwen3_path):
    """A6: the prefix of 2B tokens is warm; prefix + 3 tokens fits a budget of B + 1."""
    llm = make_llm(qwen3_path, max_num_batched_tokens=B + 1)
    (prompt,) = make_prompts(2 * B + 3)
    check_generate(llm, qwen3_path, [prompt[: 2 * B + 1]], max_tokens=1)
    (output,) = check_generate(llm, qwen3_path, [prompt])
    assert output["num_cached_tokens"] == 2 * B


def test_a_prompt_that_goes_on_from_an_answer(make_llm, qwen3_path):
    """A conversation: the blocks of the first turn's answer, computed by decode steps, serve the second turn."""
    llm = make_llm(qwen3_path)
    (prompt,) = make_prompts(6)
    (first,) = check_generate(llm, qwen3_path, [prompt], max_tokens=15)
    (second,) = check_generate(llm, qwen3_path, [prompt + first["token_ids"] + [3, 4]])
    assert second["num_cached_tokens"] == 20


def test_prompts_that_part_inside_a_block(make_llm, qwen3_path):
    """A32: together and one after the other."""
    (prefix,) = make_prompts(7)
    prompts = [[*prefix[:n], *tail] for n, tail in ((7, [1]), (6, [2, 3]), (5, [4, 5, 6]), (4, [7] * 5), (3, [8] * 6))]
    llm = make_llm(qwen3_path)
    check_generate(llm, qwen3_path, prompts)
    for prompt in prompts:
        check_generate(llm, qwen3_path, [prompt], max_tokens=5)


def test_equal_hashes_do_not_serve_another_prompts_cache(make_llm, qwen3_path, monkeypatch):
    """A30: every block hashes to the same number."""
    monkeypatch.setattr(block_manager, "block_hash", lambda parent_hash, token_ids: 42)
    llm = make_llm(qwen3_path)
    prompts = make_prompts(2 * B + 1, 2 * B + 1)
    swapped = prompts[0][B : 2 * B] + prompts[0][:B] + [5]
    for prompt in (*prompts, prompts[0], swapped, *prompts):
        check_generate(llm, qwen3_path, [prompt], max_tokens=4)
    check_generate(llm, qwen3_path, [*prompts, swapped])


def test_prefix_caching_can_be_turned_off(make_llm, qwen3_path):
    llm = make_llm(qwen3_path, enable_prefix_caching=False)
    prompts = make_prompts(13) * 2
    for _ in range(2):
        outputs = check_generate(llm, qwen3_path, prompts)
        assert [output["num_cached_tokens"] for output in outputs] == [0, 0]


# Tables, limits, streams


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1])
def test_every_place_around_a_block_boundary(make_llm, qwen3_path, length):
    """A12: prompts of kB - 1, kB, kB + 1 tokens and 2B + 1 new ones; the table is as long as they need."""
    llm = make_llm(qwen3_path)
    seqs = SequenceLog(llm)
    (prompt,) = make_prompts(length)
    stream = llm.stream(prompt, greedy(2 * B + 1))
    tokens = []
    for item in stream:
        tokens += item["token_ids"]
        (seq,) = seqs
        assert len(seq.block_table) == -(-seq.num_computed // B)
    assert tokens == oracle_tokens(qwen3_path, prompt, 2 * B + 1)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_other_block_sizes(make_llm, qwen3_path, block_size):
    llm = make_llm(qwen3_path, kvcache_block_size=block_size, num_kvcache_blocks=-(-256 // block_size))
    prompts = make_prompts(1, 16, 33)
    for _ in range(2):
        check_generate(llm, qwen3_path, prompts)


def test_streams_and_calls_at_the_same_time(make_llm, qwen3_path):
    """Two streams take turns, a whole generate() comes between, one stream is left early."""
    llm = make_llm(qwen3_path)
    prompts = make_prompts(5, 9, 14)
    streams = [llm.stream(prompt, greedy(12)) for prompt in prompts[:2]]
    tokens = [next(stream)["token_ids"] for stream in streams]
    check_generate(llm, qwen3_path, prompts[2:])
    for item in streams[0]:
        tokens[0] += item["token_ids"]
    tokens[1] += next(streams[1])["token_ids"]
    streams[1].close()
    check_idle(llm)
    assert tokens[0] == oracle_tokens(qwen3_path, prompts[0], 12)
    assert len(tokens[1]) >= 2
    assert tokens[1] == oracle_tokens(qwen3_path, prompts[1], 12)[: len(tokens[1])]
