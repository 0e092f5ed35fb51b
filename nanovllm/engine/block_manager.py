"""The pool of KV blocks: who holds which, and which hold a known prefix that another sequence can reuse."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import xxhash

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.snapshots import Snapshots


@dataclass(slots=True, eq=False)
class Block:
    """One block. `uid` names the whole prefix that ends with this block, 0 while that is not known.

    Equal hashes are not trusted: a hit also needs equal `token_ids` after the same prefix (`parent_uid`).
    """

    block_id: int
    ref_count: int = 0
    uid: int = 0
    parent_uid: int = 0
    hash: int = 0
    token_ids: list[int] = field(default_factory=list)

    def forget(self) -> None:
        """The block's contents are no longer a known prefix."""
        self.uid, self.parent_uid, self.hash, self.token_ids = 0, 0, 0, []


def block_hash(parent_hash: int, token_ids: list[int]) -> int:
    """xxh64 of a full block's tokens, chained to the hash of the prefix before it."""
    digest = xxhash.xxh64(parent_hash.to_bytes(8, "little"))
    digest.update(array("q", token_ids).tobytes())
    return digest.intdigest()


class BlockManager:
    """Reference-counted blocks. Taking and freeing one is O(1); the least recently freed one is reused first.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        enable_prefix_caching: whether prefixes are remembered.
        num_snapshots: slots for snapshots, without which no prefix can be resumed; None where blocks are all there is
            to a prefix.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool, num_snapshots: int | None = None
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_hash: dict[int, Block] = {}
        self._last_uid = 0
        self._snapshots = None if num_snapshots is None else Snapshots(num_snapshots)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, whether they keep a known prefix or not."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """Blocks that already hold the start of the sequence; at least one token is always left to compute,
        because its logits are wanted. Scored prompts reuse nothing: all their rows are wanted.

        Where snapshots are needed the prefix ends at one. Worth a new one are the end of what blocks are known of, as
        it occurs a second time, and the last boundary that an equal prompt could go on from.
        """
        seq.snapshot_at = set()
        if not self.enable_prefix_caching or seq.prompt_logprobs is not None:
            return []
        found: list[Block] = []
        parent_hash, parent_uid = 0, 0
        for start in range(0, len(seq.token_ids) - self.block_size, self.block_size):
            token_ids = seq.token_ids[start : start + self.block_size]
            parent_hash = block_hash(parent_hash, token_ids)
            block = self._lookup(parent_hash, parent_uid, token_ids)
            if block is None:
                break
            found.append(block)
            parent_uid = block.uid
        if self._snapshots is not None:
            seq.snapshot_at = {
                len(found) * self.block_size,
                (len(seq.token_ids) - 1) // self.block_size * self.block_size,
            }
            while found and found[-1].uid not in self._snapshots:
                found.pop()
        return found

    def num_new_blocks(self, seq: Sequence, num_tokens: int, prefix: list[Block]) -> int:
        """Blocks that leave the free ones when `seq`, given `prefix`, grows to `num_tokens` tokens."""
        held = len(seq.block_table) + len(prefix)
        return self.num_blocks_for(num_tokens) - held + sum(block.ref_count == 0 for block in prefix)

    def snapshot_slot(self, prefix: list[Block]) -> int | None:
        """Slot of the snapshot of a known prefix; None where none is needed."""
        return self._snapshots.use(prefix[-1].uid) if prefix and self._snapshots is not None else None

    def share(self, seq: Sequence, prefix: list[Block]) -> None:
        """Give a sequence without blocks the blocks of its known prefix."""
        for block in prefix:
            if block.ref_count == 0:
                del self._free[block.block_id]
            block.ref_count += 1
            seq.block_table.append(block.block_id)
        seq.num_computed = len(prefix) * self.block_size
        seq.num_hashed_blocks = len(prefix)
        seq.prefix_uid = prefix[-1].uid if prefix else 0

    def grow(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Take the blocks that `seq` lacks to hold `num_tokens` tokens; there must be enough free ones."""
        taken = []
        for _ in range(self.num_blocks_for(num_tokens) - len(seq.block_table)):
            block = self.blocks[self._free.popitem(last=False)[0]]
            if self._by_hash.get(block.hash) is block:  # another block may have taken over the hash
                del self._by_hash[block.hash]
            if self._snapshots is not None:
                self._snapshots.drop(block.uid)
            block.forget()
            block.ref_count = 1
            taken.append(block.block_id)
        seq.block_table += taken
        return taken

    def release(self, seq: Sequence) -> None:
        """Give up all blocks of a sequence, last first: a prefix's end is less often wanted than its start."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
        seq.block_table = []
        seq.num_computed = seq.num_hashed_blocks = seq.prefix_uid = 0

    def remember(self, seq: Sequence) -> list[tuple[int, int]]:
        """Make the full blocks whose KV a launched step has written, or will, known as prefixes.

        Steps run in launch order, so a step launched after this may read them.

        Returns:
            (length of a prefix, slot) of the snapshots that this step must take, ascending.
        """
        taken: list[tuple[int, int]] = []
        if not self.enable_prefix_caching:
            return taken
        full = min(seq.num_computed, len(seq.token_ids)) // self.block_size
        for index in range(seq.num_hashed_blocks, full):
            block = self.blocks[seq.block_table[index]]
            parent_hash = self.blocks[seq.block_table[index - 1]].hash if index else 0
            token_ids = seq.token_ids[index * self.block_size : (index + 1) * self.block_size]
            block.hash = block_hash(parent_hash, token_ids)
            known = self._lookup(block.hash, seq.prefix_uid, token_ids)
            if known is None:
                self._last_uid += 1
                block.uid, block.parent_uid, block.token_ids = self._last_uid, seq.prefix_uid, token_ids
                self._by_hash[block.hash] = known = block
            seq.prefix_uid = known.uid  # of two that were computed in parallel the first gives the name
            length = (index + 1) * self.block_size
            if length in seq.snapshot_at and (slot := self._snapshots.take(seq.prefix_uid)) is not None:
                taken.append((length, slot))
        seq.num_hashed_blocks = max(seq.num_hashed_blocks, full)
        return taken

    def forget_all(self) -> None:
        """Drop every known prefix: a step was lost, so what its blocks hold is not known."""
        for block in self.blocks:
            block.forget()
        self._by_hash.clear()
        if self._snapshots is not None:
            self._snapshots.reset()

    def reset(self) -> None:
        """Free every block, whoever holds it, and drop every known prefix."""
        for block in self.blocks:
            block.ref_count = 0
        self._free = OrderedDict.fromkeys(range(len(self.blocks)))
        self.forget_all()

    def check(self, sequences: list[Sequence]) -> None:
        """Compare the books with what `sequences` hold.

        Raises:
            RuntimeError: they do not balance; the message has the numbers.
        """
        held = Counter(block_id for seq in sequences for block_id in seq.block_table)
        counted = {block.block_id: block.ref_count for block in self.blocks if block.ref_count}
        if held != counted or len(held) + self.num_free != len(self.blocks) or held.keys() & self._free.keys():
            raise RuntimeError(
                f"KV blocks do not balance: {self.num_free} free + {len(held)} held by {len(sequences)} sequence(s) "
                f"of {len(self.blocks)}; reference counts say {sum(counted.values())}, tables {sum(held.values())}"
            )

        if self._snapshots is not None:
            self._snapshots.check({block.uid for block in self.blocks})

    def _lookup(self, key: int, parent_uid: int, token_ids: list[int]) -> Block | None:
        block = self._by_hash.get(key)
        same = block is not None and block.parent_uid == parent_uid and block.token_ids == token_ids
        return block if same else None
