"""Who runs next: admission, chunks, prefix hits, block tables. No model: a fake runner checks every step.

Preemption is in test_scheduler_preemption.py, other ends than the last token in test_scheduler_ends.py.
"""

import pytest
from fake_runner import FakeEngine, finish_all

from nanovllm.engine.sequence import Status

B = 4


def chunks_of(step):
    """(start, number of tokens) of each chunk of a step."""
    return [(chunk.start, len(chunk.token_ids)) for chunk in step.chunks]


# Admission


def test_prompts_run_together_in_order_of_arrival():
    engine = FakeEngine()
    seqs = [engine.add([i] * (i + 1)) for i in range(5)]
    step = engine.step()
    assert chunks_of(step) == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]
    assert [chunk.token_ids[0] for chunk in step.chunks] == [0, 1, 2, 3, 4]
    assert engine.step().decode_rows == [seq.row for seq in seqs]
    finish_all(engine)


def test_the_prefill_budget_holds_in_every_step():
    """A27: ten prompts of six tokens in steps of at most 16, and none smaller than it could be."""
    engine = FakeEngine(budget=16, max_num_seqs=10)
    for i in range(10):
        engine.add([i] * 6, max_tokens=2)
    finish_all(engine)
    prefills = [sum(n for _, n in chunks_of(step)) for step in engine.steps if step.chunks]
    assert prefills == [16, 16, 16, 12]


def test_waiting_prompts_hold_no_blocks():
    """A7: the budget fits the first prompt, the pool one and a half; the others wait empty-handed, and all finish."""
    engine = FakeEngine(budget=8, num_blocks=3)
    first, *others = [engine.add([i] * 8, max_tokens=4) for i in range(3)]
    engine.step()
    assert first.status is Status.RUNNING
    assert engine.blocks.num_free == 1
    assert all(seq.status is Status.WAITING and not seq.block_table for seq in others)
    finish_all(engine)


def test_a_prompt_is_admitted_only_with_room_for_all_of_it():
    """Its first chunk would fit; the rest would not, and everybody behind it would be stuck or preempted."""
    engine = FakeEngine(budget=4, num_blocks=5, max_num_seqs=3)
    running = engine.add([1] * 4, max_tokens=5)
    long = engine.add([2] * 16, max_tokens=4)
    engine.step_until(lambda: running.status is Status.FINISHED)
    assert all(chunk.row == 0 for step in engine.steps[:-1] for chunk in step.chunks)
    assert long.num_preemptions == running.num_preemptions == 0
    finish_all(engine)


def test_a_block_is_left_for_each_running_sequence():
    """A prompt that takes the last block would be preempted at once."""
    engine = FakeEngine(num_blocks=3)
    engine.add([1] * 4, max_tokens=5)
    second = engine.add([2] * 8, max_tokens=2)
    finish_all(engine)
    assert second.num_preemptions == 0


def test_nobody_overtakes_a_prompt_that_waits_for_blocks():
    engine = FakeEngine(num_blocks=5)
    first = engine.add([1] * 8, max_tokens=8)
    long = engine.add([2] * 12, max_tokens=4)
    short = engine.add([3], max_tokens=1)
    engine.step_until(lambda: short.status is not Status.WAITING)
    assert first.status is Status.FINISHED
    assert long.status is not Status.WAITING
    finish_all(engine)


def test_two_rows_serve_ten_requests_through_preemption():
    """A22: nothing is lost when running and preempted sequences together reach max_num_seqs."""
    engine = FakeEngine(max_num_seqs=2, num_blocks=5, budget=8)
    for i in range(10):
        engine.add([i] * (1 + 3 * i % 7), max_tokens=3 + 5 * i % 11)
    finish_all(engine)
    assert sum(seq.num_preemptions for seq in engine.seqs) > 0
    assert max(len(step.decode_rows) for step in engine.steps) == 2


def test_a_row_is_reused_only_after_its_owner_left():
    engine = FakeEngine(max_num_seqs=3)
    for i in range(9):
        engine.add([i] * 5, max_tokens=1 + i % 4)
    finish_all(engine)
    assert {row for step in engine.steps for row in step.decode_rows} == {0, 1, 2}


# Chunks


@pytest.mark.parametrize("budget", range(1, 18))
def test_a_long_prompt_is_cut_at_the_budget(budget):
    """A8, A21: chunks meet end to end, only the last one samples, and no chunk is smaller than it must be."""
    engine = FakeEngine(budget=budget)
    engine.add(range(17), max_tokens=3)
    finish_all(engine)
    chunks = [chunk for step in engine.steps for chunk in step.chunks]
    assert [chunk.start for chunk in chunks] == list(range(0, 17, budget))
    assert [chunk.samples for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(17))


def test_the_rest_of_a_prompt_shares_its_step_with_the_next_one():
    engine = FakeEngine(budget=8)
    engine.add([1] * 11, max_tokens=2)
    engine.add([2] * 9, max_tokens=2)
    finish_all(engine)
    assert [chunks_of(step) for step in engine.steps if step.chunks] == [[(0, 8)], [(8, 3), (0, 5)], [(5, 4)]]


def test_a_short_prompt_does_not_wait_for_all_chunks_of_a_long_one():
    """Newcomers that fit whole share a long prompt's steps, in order of arrival, with up to half of the budget; what
    does not fit keeps its place. The long prompt goes on with the rest."""
    engine = FakeEngine(budget=8, num_blocks=64)
    long = engine.add([1] * 40, max_tokens=2)
    engine.step_until(lambda: long.num_computed == 8)
    short, next_short = engine.add([2] * 3, max_tokens=2), engine.add([3], max_tokens=2)
    larger, last = engine.add([4] * 5, max_tokens=2), engine.add([5], max_tokens=2)
    engine.step_until(lambda: long.num_computed > 8)
    assert long.num_computed == 12 and short.is_decoding and next_short.is_decoding
    engine.step_until(lambda: long.is_decoding)
    assert short.status is next_short.status is Status.FINISHED
    assert larger.num_computed <= 5 and last.num_computed <= 1 and last.arrival_time > larger.arrival_time
    finish_all(engine)
    assert long.num_preemptions == 0


def test_newcomers_leave_a_long_prompt_the_blocks_that_it_needs():
    """They are admitted beside it only if there are blocks for all of both."""
    engine = FakeEngine(block_size=1, num_blocks=34, budget=8)
    long = engine.add([1] * 30, max_tokens=2)
    engine.step_until(lambda: long.num_computed == 8)
    shorts = [engine.add([2 + i] * 3, max_tokens=1) for i in range(3)]
    finish_all(engine)
    assert long.num_preemptions == 0 and all(short.num_preemptions == 0 for short in shorts)


def test_nobody_overtakes_a_prompt_whose_next_chunk_waits_for_blocks():
    """Three sequences decode between its chunks and take their blocks; a short prompt would still fit."""
    engine = FakeEngine(block_size=1, num_blocks=39, budget=10)
    for i in range(3):
        engine.add([i], max_tokens=20)
    engine.step()
    long = engine.add([4] * 30, max_tokens=2)
    engine.step_until(lambda: long.num_computed == 20)
    short = engine.add([5], max_tokens=2)
    engine.step()
    assert 5 < engine.blocks.num_free < 10, "room for the short one, not for the chunk"
    while long.num_computed == 20:
        assert short.status is Status.WAITING
        engine.step()
    finish_all(engine)


def test_new_prompts_delay_a_running_sequence_by_one_step():
    """A17: however many prompts keep coming, a token takes at most one prefill step more."""
    engine = FakeEngine(budget=8, num_blocks=64)
    running = engine.add([1, 2, 3], max_tokens=30)
    gaps, last, prompts = [], 0, 0
    while running.status is not Status.FINISHED:
        prompts += 1
        engine.add([prompts % 90] * 20, max_tokens=3)
        engine.step()
        if running.status is Status.RUNNING and running.row in engine.steps[-1].decode_rows:
            gaps.append(len(engine.steps) - last)
            last = len(engine.steps)
    assert len(gaps) >= 29
    assert set(gaps[1:]) == {2}, "prefill and decode take turns"
    finish_all(engine, limit=5000)


def test_prompts_do_not_wait_for_running_sequences_either():
    """A17, the other way: a queued prompt that fits starts with the next prefill step."""
    engine = FakeEngine(budget=16)
    engine.add([1, 2, 3], max_tokens=40)
    for _ in range(10):
        engine.step()
    late = engine.add([9] * 5)
    engine.step()
    engine.step()
    assert late.status is Status.RUNNING
    finish_all(engine)


# Prefixes


def test_a_cached_prefix_leaves_only_the_rest_to_compute():
    """A6: what is scheduled is the prompt less what is cached, and the budget pays for that alone."""
    engine = FakeEngine(budget=B + 1)
    engine.add(range(2 * B), max_tokens=1)
    engine.add([*range(2 * B), 90], max_tokens=1)
    finish_all(engine)
    late = engine.add([*range(2 * B), 50, 51, 52], max_tokens=3)
    step = engine.step()
    assert chunks_of(step) == [(2 * B, 3)]
    assert late.num_cached_tokens == 2 * B
    assert len(late.block_table) == 3
    finish_all(engine)


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_prompt_of_whole_cached_blocks_computes_its_last_block(blocks):
    """A1: something must be computed, or there are no logits."""
    engine = FakeEngine()
    prompt = list(range(blocks * B))
    engine.add(prompt, max_tokens=1)
    engine.run()
    engine.add(prompt, max_tokens=1)
    step = engine.step()
    assert chunks_of(step) == [((blocks - 1) * B, B)]
    finish_all(engine)


def test_equal_prompts_of_one_step_are_computed_once():
    """A4, A5: the second waits one step for the first one's blocks; different ends free each block once."""
    engine = FakeEngine()
    seqs = [engine.add(range(2 * B + 1), max_tokens=n) for n in (3, 1, 2)]
    assert chunks_of(engine.step()) == [(0, 2 * B + 1)]
    finish_all(engine)
    assert [seq.num_cached_tokens for seq in seqs] == [0, 2 * B, 2 * B]
    fourth = engine.add(range(2 * B + 1), max_tokens=2)
    finish_all(engine)
    assert fourth.num_cached_tokens == 2 * B


def test_other_prompts_pass_the_one_that_waits_for_an_equal_prefix():
    """It keeps its place in the queue."""
    engine = FakeEngine(max_num_seqs=3)
    engine.add(range(9))
    twins = [engine.add(range(9)), engine.add(range(9))]
    others = [engine.add([50] * 3), engine.add([60] * 3)]
    assert chunks_of(engine.step()) == [(0, 9), (0, 3), (0, 3)]
    assert [seq.status for seq in others] == [Status.RUNNING, Status.RUNNING]
    late = engine.add([70] * 3)
    assert list(engine.scheduler.waiting) == [*twins, late]
    finish_all(engine)


def test_equal_long_prompts_wait_until_the_chunks_are_through():
    """A4 with chunks: the twin starts when the last whole block is there, not with the first."""
    engine = FakeEngine(budget=B)
    first, twin = engine.add(range(3 * B + 1)), engine.add(range(3 * B + 1))
    for _ in range(3):
        engine.step()
        assert (first.status, twin.status) == (Status.RUNNING, Status.WAITING)
    finish_all(engine)
    assert twin.num_cached_tokens == 3 * B


def test_a_shared_prefix_survives_pressure_until_its_last_user_ends():
    """A31: others take every free block meanwhile; the runner would see an overwritten prefix."""
    engine = FakeEngine(num_blocks=8, max_num_seqs=3)
    prefix = list(range(2 * B))
    engine.add([*prefix, 50], max_tokens=1)
    engine.run()
    long = engine.add([*prefix, 60], max_tokens=12)
    short = engine.add([*prefix, 61], max_tokens=2)
    engine.step()
    assert long.block_table[:2] == short.block_table[:2]
    for i in range(6):
        engine.add([70 + i] * 7, max_tokens=4)
    finish_all(engine)
    assert long.num_preemptions == 0, "the oldest is never preempted"


def test_prefixes_that_part_inside_a_block_share_no_block_that_is_written():
    """A32: the runner refuses a write to a block of two owners."""
    engine = FakeEngine()
    for i in range(B):
        engine.add([*range(B + i), 90 + i, 91, 92], max_tokens=6)
        engine.step()
    finish_all(engine)


def test_generated_tokens_are_reused_by_a_prompt_that_goes_on_from_them():
    engine = FakeEngine()
    first = engine.add(range(6), max_tokens=11)
    engine.run()
    second = engine.add([*first.token_ids, 90], max_tokens=2)
    finish_all(engine)
    assert second.num_cached_tokens == 16


# Tables


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1])
@pytest.mark.parametrize("caching", [True, False])
def test_a_table_is_as_long_as_its_tokens_need(length, caching):
    """A12: after every step, for every number of tokens up to 2B + 1; no block spare, none missing."""
    engine = FakeEngine(block_size=B, prefix_caching=caching)
    seq = engine.add([7] * length, max_tokens=2 * B + 1)
    lengths = []
    while engine.scheduler.has_unfinished:
        engine.step()
        if seq.status is Status.RUNNING:
            assert len(seq.block_table) == -(-seq.num_computed // B)
            lengths.append(seq.num_computed)
    assert lengths == list(range(length, length + 2 * B + 1)), "one token a step, none twice"
    finish_all(engine)


def test_a_sequence_may_fill_the_whole_pool():
    """A10: the last token needs no block of its own, for its KV is never wanted."""
    engine = FakeEngine(num_blocks=2)
    seq = engine.add([1] * 6, max_tokens=2)
    finish_all(engine)
    assert seq.num_preemptions == 0
