"""How sequences end in the scheduler: finished, aborted at any moment, failed, scored, or lost with a step; and what
a step tells the runner about sampling. No model: a fake runner checks every step."""

import math

import pytest
from fake_runner import FakeEngine, expected_scores, expected_tokens, finish_all, sampled_rows

from nanovllm.engine.sequence import Status

B = 4


# Its own end


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
def test_the_last_token_ends_a_sequence(max_tokens):
    engine = FakeEngine()
    seq = engine.add([1, 2, 3], max_tokens=max_tokens)
    finish_all(engine)
    assert seq.num_output_tokens == max_tokens
    assert seq.finish_reason == "length"


@pytest.mark.parametrize("own", [True, False])
def test_a_stop_token_ends_a_sequence_and_is_part_of_it(own):
    """The token drawn after it, one step ahead, is dropped. Only the request's own stop ids are named."""
    engine = FakeEngine()
    tokens = expected_tokens([1, 2, 3], 8)
    stop = tokens[4]
    params = {"stop_token_ids": [stop]} if own else {}
    seq = engine.add([1, 2, 3], max_tokens=8, stop_ids=[stop], **params)
    other = engine.add([4, 5], max_tokens=12)
    finish_all(engine)
    assert seq.output_token_ids == tokens[: tokens.index(stop) + 1]
    assert seq.stop_reason == (stop if own else None)
    assert other.num_output_tokens == 12


def test_a_stop_token_at_the_limit_counts_as_a_stop():
    engine = FakeEngine()
    seq = engine.add([1, 2, 3], max_tokens=5, stop_ids=[expected_tokens([1, 2, 3], 5)[-1]])
    finish_all(engine)
    assert seq.finish_reason == "stop"


def test_logits_that_are_not_finite_fail_their_sequence_alone():
    engine = FakeEngine()
    tokens = expected_tokens([1, 2, 3], 6)
    engine.runner.broken_tokens = {tokens[3]}
    broken = engine.add([1, 2, 3], max_tokens=6)
    other = engine.add([4, 5], max_tokens=6)
    assert not engine.runner.broken_tokens & set(expected_tokens([4, 5], 6))
    finish_all(engine)
    assert broken.finish_reason == "error"
    assert broken.output_token_ids == tokens[:3]
    assert "not finite" in broken.error
    assert other.finish_reason == "length"


# Abort


def abort(engine, seq):
    engine.scheduler.finish(seq, "abort")
    engine.scheduler.check()
    held = {block_id for other in engine.scheduler.running for block_id in other.block_table}
    assert engine.blocks.num_free == len(engine.blocks.blocks) - len(held), "its blocks are free at once"
    assert seq.status is Status.FINISHED
    assert seq.block_table == []
    assert seq.row == -1


def moments():
    """Moments in a life, as conditions on the sequence that is then aborted."""
    return {
        "queued": lambda seq: True,
        "half its prompt computed": lambda seq: 0 < seq.num_computed < 10 and not seq.num_preemptions,
        "its first token in flight": lambda seq: seq.is_decoding and seq.num_output_tokens == 0,
        "decoding": lambda seq: seq.num_output_tokens == 3 and seq.is_decoding,
        "its last token in flight": lambda seq: seq.is_decoding and not seq.wants_token,
        "preempted with a token in flight": lambda seq: seq.num_preemptions and seq.num_pending,
        "preempted and all read": lambda seq: seq.num_preemptions and not seq.num_pending,
        "started again": lambda seq: seq.num_preemptions and seq.status is Status.RUNNING,
        "finished": lambda seq: seq.status is Status.FINISHED,
    }


@pytest.mark.parametrize("moment", moments())
def test_a_sequence_can_be_aborted_when(moment):
    """A24, A25, A81: what it holds comes back once, what is in flight for it is dropped, others lose nothing."""
    engine = FakeEngine(num_blocks=8, budget=4, max_num_seqs=2)
    older = engine.add([1] * 6, max_tokens=24)
    seq = engine.add([2] * 10, max_tokens=6 if "preempted" not in moment and "again" not in moment else 14)
    engine.add([3] * 5, max_tokens=4)
    engine.step_until(lambda: moments()[moment](seq))
    tokens = seq.output_token_ids
    abort(engine, seq)
    finish_all(engine)
    assert seq.output_token_ids == tokens, "nothing came after"
    assert older.finish_reason == "length"


@pytest.mark.parametrize("wait", range(8))
def test_cancelling_around_the_last_token_frees_once(wait):
    """A24: the step that draws it is being launched, in flight, just read, long read."""
    engine = FakeEngine(num_blocks=4)
    seq = engine.add(range(6), max_tokens=4)
    for _ in range(wait):
        engine.step()
    abort(engine, seq)
    abort(engine, seq)
    finish_all(engine)
    assert seq.output_token_ids == expected_tokens(range(6), 4)[: max(0, wait - 1)]
    late = engine.add(range(12), max_tokens=4)
    finish_all(engine)
    assert late.finish_reason == "length"


def test_a_prompt_that_waits_for_its_twin_can_be_aborted():
    engine = FakeEngine()
    engine.add(range(9))
    twin, third = engine.add(range(9)), engine.add(range(9))
    engine.step()
    abort(engine, twin)
    finish_all(engine)
    assert third.num_cached_tokens == 8


def test_the_blocks_of_an_aborted_prompt_can_be_reused():
    """Its chunk was launched, so the blocks hold what their names say, though nobody reads its result."""
    engine = FakeEngine(budget=8)
    abort_me = engine.add(range(20))
    engine.step()
    abort(engine, abort_me)
    late = engine.add(range(20))
    finish_all(engine)
    assert late.num_cached_tokens == 8


def test_all_can_be_aborted_with_a_step_in_flight():
    """Nothing is left but the step's results, and they are dropped."""
    engine = FakeEngine()
    seqs = [engine.add([i] * 5) for i in range(4)]
    engine.step()
    engine.step()
    for seq in seqs:
        abort(engine, seq)
    assert engine.scheduler.has_unfinished, "a step is still to be read"
    assert engine.step() is None
    assert not engine.scheduler.has_unfinished
    engine.check_idle()


# Losing a step


@pytest.mark.parametrize("steps", range(14))
def test_a_lost_step_ends_everything_and_poisons_nothing(steps):
    """The blocks that the lost step was to write had their names already; nobody may find them again."""
    engine = FakeEngine(num_blocks=8, budget=4, max_num_seqs=3)
    for prompt, max_tokens in ((range(6), 12), (range(10), 9), ([9] * 5, 4), (range(6), 3)):
        engine.add(prompt, max_tokens=max_tokens)
    for _ in range(steps):
        engine.step()
    engine.scheduler.schedule()  # and never run
    running = [seq for seq in engine.seqs if seq.status is not Status.FINISHED]
    assert {seq.seq_id for seq in engine.lose_step()} == {seq.seq_id for seq in running}
    assert all(seq.finish_reason == "abort" for seq in running)
    assert not engine.scheduler.has_unfinished
    engine.scheduler.check()
    engine.check_idle()
    late = [engine.add(range(10), max_tokens=3), engine.add([9] * 5, max_tokens=3)]
    finish_all(engine)
    assert late[0].num_cached_tokens == 0
    assert all(seq.num_output_tokens == 3 for seq in late)


def test_an_idle_scheduler_can_be_reset():
    engine = FakeEngine()
    assert engine.lose_step() == []
    engine.add([1, 2, 3])
    finish_all(engine)


def test_rows_that_do_not_balance_are_noticed_with_their_numbers():
    engine = FakeEngine(max_num_seqs=3)
    engine.add([1, 2, 3])
    engine.step()
    engine.scheduler._free_rows.pop()
    with pytest.raises(RuntimeError, match=r"1 running \+ 1 free of 3"):
        engine.scheduler.check()


def test_blocks_of_running_sequences_are_part_of_the_check():
    engine = FakeEngine()
    seq = engine.add([1, 2, 3])
    engine.step()
    seq.block_table.clear()
    with pytest.raises(RuntimeError, match="KV blocks do not balance"):
        engine.scheduler.check()


# Scoring


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 16, 17, 64])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_is_scored_in_pieces(budget, max_tokens):
    """A70, A71: one score per prompt token but the first, whatever the chunks, with or without tokens drawn."""
    engine = FakeEngine(budget=budget)
    seqs = [engine.add(range(17), max_tokens=max_tokens, prompt_logprobs=k) for k in (0, 2)]
    finish_all(engine)
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0]
    assert [len(top) for top in seqs[1].prompt_top_logprobs] == [2] * 16


def test_scoring_draws_nothing():
    engine = FakeEngine()
    seq = engine.add(range(9), max_tokens=0, prompt_logprobs=0)
    finish_all(engine)
    assert seq.output_token_ids == []
    assert not any(sampled_rows(step) for step in engine.steps)


def test_scored_and_generated_prompts_share_steps():
    engine = FakeEngine(budget=12)
    for i in range(6):
        engine.add([i] * 7, max_tokens=3 * (i % 2), prompt_logprobs=(None, 1)[i % 2 == 0 or i == 3])
    finish_all(engine)


@pytest.mark.parametrize("budget", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_scores_are_neither_lost_nor_doubled_by_preemption(budget, max_tokens):
    """A18, A71: half scored, preempted, and gone on with where it was."""
    engine = FakeEngine(num_blocks=10, budget=budget)
    engine.add([1] * 8, max_tokens=24)
    scored = engine.add(range(24), max_tokens=max_tokens, prompt_logprobs=1)
    finish_all(engine)
    assert scored.num_preemptions > 0


def test_scores_that_are_not_finite_fail_their_sequence_alone():
    engine = FakeEngine(budget=4)
    engine.runner.broken_tokens = {6}
    broken = engine.add(range(9), max_tokens=0, prompt_logprobs=0)
    other = engine.add(range(20, 29), max_tokens=0, prompt_logprobs=0)
    finish_all(engine)
    assert broken.finish_reason == "error"
    assert broken.prompt_token_logprobs[:5] == expected_scores(range(6))
    assert math.isnan(broken.prompt_token_logprobs[5])
    assert other.finish_reason == "length"


# Sampling


def test_a_step_says_what_its_rows_need():
    """The runner compares the flags with the rows' own parameters; here each of them occurs alone and mixed."""
    engine = FakeEngine(max_num_seqs=3, budget=8)
    kinds = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"repetition_penalty": 1.5}]
    for i in range(12):
        engine.add([i] * 3, max_tokens=1 + i % 5, **kinds[i % 4])
    finish_all(engine)
    assert {step.sampling.greedy for step in engine.steps if step.sampling} == {True, False}
    assert {step.sampling.filtered for step in engine.steps if step.sampling} == {True, False}


def test_each_row_gets_as_many_logprobs_as_it_asked_for():
    engine = FakeEngine()
    for i, logprobs in enumerate((None, 0, 1, 5)):
        engine.add([i] * 3, logprobs=logprobs)
    finish_all(engine)
    assert [len(seq.logprobs) for seq in engine.seqs] == [0, 4, 4, 4]
    assert [[len(top) for top in seq.top_logprobs] for seq in engine.seqs] == [[], [0] * 4, [1] * 4, [5] * 4]


def test_no_stop_token_is_drawn_before_min_tokens():
    """Also where the host, one step behind, has not read all of them."""
    stops = range(0, 101, 2)
    for min_tokens in range(6):
        engine = FakeEngine()
        seq = engine.add([3], max_tokens=30, stop_ids=stops, min_tokens=min_tokens)
        finish_all(engine)
        assert seq.num_output_tokens > min_tokens or min_tokens == 0
        assert seq.finish_reason == "stop"
