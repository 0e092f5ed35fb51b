"""Preemption: when blocks run out the last come makes room, and goes on later as if nothing had been. No model: a fake
runner checks every step, and makes tokens from the true prefix."""

import pickle

import pytest
from fake_runner import FakeEngine, expected_tokens, finish_all

from nanovllm.engine.sequence import Status


def preempt_one(engine, **params):
    """Two sequences in a pool for one and a half; returns them once the second was preempted with three tokens."""
    first = engine.add([1] * 8, max_tokens=12)
    second = engine.add([2] * 8, max_tokens=12, **params)
    engine.step_until(lambda: second.num_preemptions)
    return first, second


def test_the_last_come_makes_room_and_goes_on_later():
    """A26: two requests, room for one and a half: both end whole, the first undisturbed, and who waited already does
    not overtake the second."""
    engine = FakeEngine(num_blocks=6, max_num_seqs=2)
    first = engine.add([1] * 8, max_tokens=12)
    second = engine.add([2] * 8, max_tokens=12)
    third = engine.add([3], max_tokens=1)
    engine.step_until(lambda: second.num_preemptions)
    assert list(engine.scheduler.waiting) == [second, third]
    engine.step_until(lambda: third.status is not Status.WAITING)
    assert second.status is not Status.WAITING
    finish_all(engine)
    assert first.num_preemptions == 0


def test_a_pool_that_just_fits_preempts_nobody():
    """A12: no block is wanted before it is needed."""
    engine = FakeEngine(num_blocks=4)
    for i in range(2):
        engine.add([i] * 4, max_tokens=5)
    finish_all(engine)
    assert not any(seq.num_preemptions for seq in engine.seqs)


def test_a_step_for_a_preempted_sequence_carries_all_its_tokens():
    """A2: the prefill that follows a preemption ships the prompt and the generated tokens, also through pickle."""
    engine = FakeEngine(num_blocks=6, prefix_caching=False)
    _, second = preempt_one(engine, seed=5, presence_penalty=0.5)
    engine.step_until(lambda: second.status is Status.RUNNING)
    step = engine.steps[-1]
    copy = pickle.loads(pickle.dumps(step))
    assert copy == step
    known = len(copy.chunks[0].token_ids)
    assert known > 8 + 2, "it had generated some"
    expected = [2] * 8 + expected_tokens([2] * 8, 12, seed=5)
    (chunk,), (start,) = copy.chunks, copy.starts
    assert (chunk.start, chunk.token_ids, chunk.samples) == (0, expected[:known], True)
    assert (start.prompt_token_ids, start.output_token_ids) == ([2] * 8, expected[8:known])
    assert (start.seed, start.params) == (5, second.params)
    finish_all(engine)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_preempted_sequence_waits_for_its_tokens_in_flight(lag):
    """A18: restarted before they are read, it would lose them or draw them twice."""
    engine = FakeEngine(num_blocks=6, lag=lag)
    _, second = preempt_one(engine)
    assert second.num_pending == max(0, lag - 1), "the newest was read behind the step that preempted it"
    finish_all(engine)


def test_a_sequence_preempted_behind_its_last_token_is_not_restarted():
    """A18, A24: the token in flight ends it while it waits."""
    engine = FakeEngine(num_blocks=4)
    # The second takes the last block for its last token; one step later, with that in flight, the first needs one.
    first = engine.add([1] * 7, max_tokens=6)
    second = engine.add([2] * 4, max_tokens=2)
    engine.step_until(lambda: second.num_preemptions or second.status is Status.FINISHED)
    finish_all(engine)
    assert first.num_preemptions == 0
    assert second.num_preemptions == 1
    assert sum(start.row == 1 for step in engine.steps for start in step.starts) == 1


def test_a_half_computed_prompt_can_be_preempted():
    """A18, A25: the running one needs the blocks that the chunks of a long prompt took."""
    engine = FakeEngine(num_blocks=8, budget=2)
    running = engine.add([1] * 7, max_tokens=24)
    long = engine.add([2] * 16, max_tokens=4)
    finish_all(engine)
    assert running.num_preemptions == 0
    assert long.num_preemptions > 0


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_sequences_keep_their_tokens_seeds_penalties_and_logprobs(caching):
    """A18: eight sequences in a pool for two or three."""
    engine = FakeEngine(num_blocks=9, budget=8, prefix_caching=caching)
    for i in range(8):
        params = {"temperature": float(i % 2), "logprobs": i % 3 or None, "frequency_penalty": 0.5 * (i % 4 == 3)}
        engine.add([i] * (1 + 5 * i % 9), max_tokens=16 + i, seed=i, **params)
    finish_all(engine)
    assert sum(seq.num_preemptions for seq in engine.seqs) >= 4


def test_cached_tokens_are_counted_once_for_a_preempted_sequence():
    """num_cached_tokens is about other requests' work, not about its own before it was preempted."""
    engine = FakeEngine(num_blocks=6)
    _, second = preempt_one(engine)
    finish_all(engine)
    assert second.num_cached_tokens == 0
