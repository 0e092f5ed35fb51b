"""Blocks of the KV cache: taking them, giving them back, and the books. No model, no scheduler.

Which prefixes are known is in test_prefix_blocks.py.
"""

import random
from time import perf_counter

import pytest
from block_helpers import B, known, make_seq, start

from nanovllm.engine.block_manager import BlockManager

# Taking and giving back


def test_a_pool_starts_free_and_unknown():
    manager = BlockManager(3, B, True)
    assert manager.num_free == 3
    assert known(manager, range(9)) == []
    manager.check([])


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_tokens_fill_whole_blocks(num_tokens, blocks):
    """A12: no spare block, none missing."""
    manager = BlockManager(4, B, True)
    seq = make_seq([7] * 9)
    assert manager.num_blocks_for(num_tokens) == blocks
    assert len(manager.grow(seq, num_tokens)) == len(seq.block_table) == blocks
    assert manager.num_free == 4 - blocks
    manager.check([seq])


def test_growing_takes_only_what_is_missing():
    manager = BlockManager(4, B, True)
    seq = make_seq(range(5))
    first = manager.grow(seq, 5)
    assert manager.grow(seq, 8) == []
    second = manager.grow(seq, 9)
    assert seq.block_table == first + second
    assert len(first) == 2
    assert len(second) == 1


def test_no_two_sequences_get_the_same_block():
    manager = BlockManager(6, B, True)
    seqs = [start(manager, [i] * 8) for i in range(3)]
    held = [block_id for seq in seqs for block_id in seq.block_table]
    assert sorted(held) == list(range(6))
    manager.check(seqs)


def test_the_least_recently_freed_block_is_taken_first():
    manager = BlockManager(4, B, True)
    seqs = [start(manager, [i] * B) for i in range(4)]
    for i in (2, 0, 3, 1):
        manager.release(seqs[i])
    taken = manager.grow(make_seq([9] * 16), 16)
    assert taken == [2, 0, 3, 1]


def test_a_prefix_loses_its_end_before_its_start():
    """Blocks of one sequence are freed last first, so that under pressure the common start lives longest."""
    manager = BlockManager(4, B, True)
    seq = start(manager, range(16))
    manager.release(seq)
    other = make_seq([90] * 8)
    manager.grow(other, 8)
    assert known(manager, [*range(16), 1]) == [0, 1]
    manager.check([other])


def test_released_sequences_hold_nothing_and_can_start_again():
    manager = BlockManager(4, B, True)
    seq = start(manager, range(9))
    manager.release(seq)
    assert seq.block_table == []
    assert (seq.num_computed, seq.num_hashed_blocks, seq.prefix_uid) == (0, 0, 0)
    assert manager.num_free == 4
    again = start(manager, range(9))
    assert len(again.block_table) == 3
    manager.check([again])


def test_taking_and_freeing_take_the_same_time_in_any_pool():
    """A list in place of the ordered one would make a block of the larger pool at least ten times as dear."""

    def seconds(num_blocks):
        manager = BlockManager(num_blocks, B, True)
        manager.grow(make_seq([]), num_blocks // 2 * B)
        best = float("inf")
        for _ in range(5):
            begin = perf_counter()
            for _ in range(100):
                seq = make_seq([1])
                manager.grow(seq, B)
                manager.release(seq)
            best = min(best, perf_counter() - begin)
        return best

    assert seconds(200_000) < 5 * seconds(100)


# Losing a step, and checking the books


def test_forgetting_all_prefixes():
    """After a lost step no block may be trusted; the blocks themselves stay where they are."""
    manager = BlockManager(8, B, True)
    seq = start(manager, range(9))
    manager.release(start(manager, [7] * 9))
    manager.forget_all()
    assert known(manager, range(9)) == known(manager, [7] * 9) == []
    manager.check([seq])
    manager.release(seq)
    manager.check([])
    again = start(manager, range(9))
    assert known(manager, range(9)) == again.block_table[:2]


def cook_free(manager, seqs):
    manager._free.popitem()


def cook_count(manager, seqs):
    manager.blocks[seqs[0].block_table[0]].ref_count += 1


def cook_table(manager, seqs):
    seqs[0].block_table.pop()


def cook_owner(manager, seqs):
    manager._free[seqs[0].block_table[0]] = None


def cook_swap(manager, seqs):
    """A held block in the list of free ones in place of a free one: every sum is right."""
    manager._free.popitem()
    manager._free[seqs[0].block_table[0]] = None


@pytest.mark.parametrize("cook", [cook_free, cook_count, cook_table, cook_owner, cook_swap])
def test_cooked_books_are_noticed_with_their_numbers(cook):
    manager = BlockManager(9, B, True)
    seqs = [start(manager, range(9)), start(manager, [7] * 9)]
    manager.check(seqs)
    cook(manager, seqs)
    with pytest.raises(RuntimeError, match="KV blocks do not balance") as error:
        manager.check(seqs)
    held = len({block_id for seq in seqs for block_id in seq.block_table})
    for number in (f"{manager.num_free} free", f"{held} held by 2 sequence", "of 9"):
        assert number in str(error.value)


def test_random_histories_keep_the_books():
    """A23: 3000 random starts, ends and growths, in a pool that is nearly always full."""
    draw = random.Random(3)
    manager = BlockManager(12, B, True)
    seqs = []
    for _ in range(3000):
        prompt = [draw.choice((1, 2)) for _ in range(draw.randint(1, 20))]
        seq = make_seq(prompt)
        prefix = manager.find_prefix(seq)
        for i, block in enumerate(prefix):
            assert block.token_ids == prompt[i * B : (i + 1) * B]
        if manager.num_new_blocks(seq, len(prompt), prefix) <= manager.num_free:
            manager.share(seq, prefix)
            manager.grow(seq, len(prompt))
            seq.num_computed = len(prompt)
            manager.remember(seq)
            seqs.append(seq)
        elif seqs:
            manager.release(seqs.pop(draw.randrange(len(seqs))))
        manager.check(seqs)
    for seq in seqs:
        manager.release(seq)
    manager.check([])
    assert manager.num_free == 12
