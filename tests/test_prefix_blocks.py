"""Blocks of the KV cache that hold a known prefix: found, shared, forgotten. No model, no scheduler."""

import pytest
from block_helpers import B, known, make_seq, start, start_twins

from nanovllm.engine import block_manager
from nanovllm.engine.block_manager import BlockManager, block_hash

# Sharing


def test_a_known_prefix_is_shared_and_counted():
    manager = BlockManager(8, B, True)
    first = start(manager, [*range(8), 50, 51])
    second = start(manager, [*range(8), 60])
    third = start(manager, [*range(4), 70, 71, 72, 73, 74])
    assert second.block_table[:2] == first.block_table[:2]
    assert third.block_table[:1] == first.block_table[:1]
    counts = [manager.blocks[block_id].ref_count for block_id in first.block_table]
    assert counts == [3, 2, 1]
    manager.check([first, second, third])


def test_a_shared_block_is_free_only_after_its_last_user():
    """A31: whoever ends first, the prefix of a running sequence stays, and under pressure too."""
    manager = BlockManager(4, B, True)
    first = start(manager, [*range(8), 50])
    second = start(manager, [*range(8), 60])
    shared = first.block_table[:2]
    manager.release(first)
    assert second.block_table[:2] == shared
    greedy = make_seq([9] * B)
    manager.grow(greedy, B)  # the pool's last free block
    assert manager.num_free == 0
    assert not set(greedy.block_table) & set(second.block_table)
    manager.check([second, greedy])
    manager.release(second)
    assert manager.num_free == 3
    manager.check([greedy])


def test_a_free_known_block_comes_back_into_use():
    manager = BlockManager(4, B, True)
    first = start(manager, range(9))
    table = first.block_table[:2]
    manager.release(first)
    second = make_seq(range(9))
    prefix = manager.find_prefix(second)
    assert manager.num_new_blocks(second, 9, prefix) == 3, "two come back into use, one is new"
    manager.share(second, prefix)
    assert second.block_table == table
    assert second.num_computed == 8
    assert manager.num_free == 2
    manager.check([second])


def test_blocks_in_use_cost_nothing_to_share():
    manager = BlockManager(4, B, True)
    first = start(manager, range(9))
    second = make_seq(range(9))
    assert manager.num_new_blocks(second, 9, manager.find_prefix(second)) == 1
    manager.check([first])


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_a_token_is_always_left_to_compute(length, cached):
    """A1: a prompt that is cached to its last token has no logits to go on from."""
    manager = BlockManager(4, B, True)
    start(manager, range(12))
    assert len(known(manager, range(length))) == cached


def test_prefixes_that_part_inside_a_block_share_only_whole_blocks():
    """A32: no block has two owners that write to it."""
    manager = BlockManager(8, B, True)
    first = start(manager, [*range(6), 50, 51, 52])
    second = start(manager, [*range(6), 60, 61, 62])
    assert second.block_table[0] == first.block_table[0]
    assert not set(first.block_table[1:]) & set(second.block_table[1:])
    manager.check([first, second])


def test_an_unfilled_block_is_not_known():
    """A32: freeing a sequence leaves only its whole blocks behind."""
    manager = BlockManager(8, B, True)
    manager.release(start(manager, range(6)))
    assert known(manager, range(9)) == [0]


def test_an_equal_block_after_another_prefix_is_not_the_same():
    manager = BlockManager(8, B, True)
    start(manager, [1, 1, 1, 1, 2, 2, 2, 2, 0])
    assert known(manager, [2, 2, 2, 2, 0]) == []
    assert known(manager, [3, 3, 3, 3, 2, 2, 2, 2, 0]) == []


def test_a_reused_block_forgets_what_it_held():
    manager = BlockManager(2, B, True)
    manager.release(start(manager, range(8)))
    other = start(manager, [9] * 8)
    assert known(manager, [*range(8), 1]) == []
    assert known(manager, [9] * 9) == other.block_table


def test_the_end_of_a_prefix_is_not_found_without_its_start():
    """The twin's last block is known under a name that goes when the named blocks are reused."""
    manager = BlockManager(7, B, True)
    named, nameless = start_twins(manager)
    nameless.token_ids += [61, 62, 63]
    nameless.num_computed = 12
    manager.remember(nameless)
    manager.release(named)
    other = start(manager, [9] * 16)
    assert known(manager, [*nameless.token_ids, 0]) == []
    manager.release(other)
    again = start(manager, [*range(8), 70])
    found = manager.find_prefix(make_seq([*nameless.token_ids, 0]))
    assert [token for block in found for token in block.token_ids][:8] == list(range(8))
    manager.check([nameless, again])


def test_tokens_are_remembered_only_once_they_are_computed_and_read():
    manager = BlockManager(4, B, True)
    seq = make_seq(range(8))
    manager.grow(seq, 8)
    for num_computed, blocks in ((3, 0), (4, 1), (7, 1), (8, 2)):
        seq.num_computed = num_computed
        manager.remember(seq)
        assert len(known(manager, range(9))) == blocks
    seq.num_computed = 12  # the device is ahead of the tokens that the host has read
    manager.grow(seq, 12)
    manager.remember(seq)
    assert seq.num_hashed_blocks == 2


def test_generated_tokens_become_known_too():
    manager = BlockManager(4, B, True)
    seq = start(manager, range(6))
    seq.token_ids += [50, 51]
    seq.num_computed = 8
    manager.remember(seq)
    assert known(manager, [0, 1, 2, 3, 4, 5, 50, 51, 9]) == seq.block_table


def test_scored_prompts_reuse_nothing_and_can_be_reused():
    """A71: all rows of a scored prompt are wanted, so all are computed."""
    manager = BlockManager(8, B, True)
    first = start(manager, range(9))
    scored = start(manager, range(9), prompt_logprobs=0)
    assert not set(first.block_table) & set(scored.block_table)
    manager.check([first, scored])


def test_nothing_is_remembered_without_prefix_caching():
    manager = BlockManager(4, B, False)
    start(manager, range(9))
    assert known(manager, range(9)) == []
    assert not any(block.uid or block.token_ids for block in manager.blocks)


# Hashes


def test_the_hash_of_a_block_depends_on_all_before_it():
    one, other = block_hash(0, [1, 2, 3, 4]), block_hash(0, [1, 2, 4, 3])
    assert one != other
    assert block_hash(one, [5, 6, 7, 8]) != block_hash(other, [5, 6, 7, 8])
    assert block_hash(one, [5, 6, 7, 8]) != block_hash(0, [5, 6, 7, 8])
    assert block_hash(0, [1]) != block_hash(0, [1, 0])
    assert block_hash(0, [2**31]) != block_hash(0, [0]), "ids are hashed whole"


def test_equal_hashes_are_not_trusted(monkeypatch):
    """A30: with every hash equal, only equal tokens after an equal prefix are a hit."""
    monkeypatch.setattr(block_manager, "block_hash", lambda parent_hash, token_ids: 42)
    manager = BlockManager(12, B, True)
    first = start(manager, [1] * 8 + [0])
    second = start(manager, [2] * 8 + [0])
    assert not set(first.block_table) & set(second.block_table)
    # The block that has the hash now is second's second one. Its tokens alone are equal, but not at the start.
    assert known(manager, [2] * 4 + [0]) == known(manager, [2] * 9) == []
    # The hash now belongs to one block only; whatever is found must hold what it says.
    for token in (1, 2):
        for block in manager.find_prefix(make_seq([token] * 9)):
            assert block.token_ids == [token] * 4
    manager.release(first)
    manager.release(second)
    manager.check([])
    other = start(manager, [3] * 48)  # takes every block, also those whose hash another took over
    manager.check([other])
    assert not [block for block in manager.blocks if block.token_ids not in ([], [3] * 4)]


def test_a_colliding_block_does_not_evict_the_name_of_another(monkeypatch):
    """A30: reusing the block that lost the hash leaves the one that took it over known."""
    monkeypatch.setattr(block_manager, "block_hash", lambda parent_hash, token_ids: 42)
    manager = BlockManager(3, B, True)
    first = start(manager, [1] * B)
    second = start(manager, [2] * B)
    manager.release(first)
    manager.grow(make_seq([9]), 1)
    reused = make_seq([8])
    manager.grow(reused, 1)
    assert reused.block_table == [0]
    assert known(manager, [2] * 5) == second.block_table


# The same prefix computed twice at once


@pytest.mark.parametrize("gone", [0, 1])
def test_twins_have_one_name_and_each_its_own_blocks(gone):
    """A5: whichever ends first, nothing is freed twice, and the prefix stays known while a block has its name."""
    manager = BlockManager(10, B, True)
    twins = start_twins(manager)
    assert not set(twins[0].block_table) & set(twins[1].block_table)
    assert twins[0].prefix_uid == twins[1].prefix_uid != 0
    assert known(manager, [*range(8), 1]) == twins[0].block_table[:2]
    manager.release(twins[gone])
    manager.check([twins[1 - gone]])
    third = start(manager, [*range(8), 60])
    manager.check([twins[1 - gone], third])
    manager.release(twins[1 - gone])
    manager.release(third)
    assert manager.num_free == 10
    manager.check([])


def test_a_twin_without_the_name_is_reused_silently():
    """A5: taking the nameless twin's block leaves the named one known."""
    manager = BlockManager(6, B, True)
    named, nameless = start_twins(manager)
    manager.release(nameless)
    other = start(manager, [9] * 12)
    assert known(manager, [*range(8), 1]) == named.block_table[:2]
    manager.check([named, other])


def test_what_follows_a_twin_is_shared():
    """Both twins' next blocks go on from the same name."""
    manager = BlockManager(10, B, True)
    named, nameless = start_twins(manager)
    nameless.token_ids += [61, 62, 63]
    nameless.num_computed = 12
    manager.remember(nameless)
    assert known(manager, [*nameless.token_ids, 0]) == named.block_table[:2] + nameless.block_table[2:]
