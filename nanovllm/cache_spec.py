"""A model's cache needs, as data: the engine sizes pools and decides on prefix reuse from these alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class PagedKVSpec:
    """Keys and values of one attention cache, kept for the whole context in blocks of a shared pool.

    Args:
        num_kv_heads: heads of K (and of V).
        head_dim: numbers per head.
        dtype_size: bytes per number.
    """

    # Whether a prefix can be resumed at any block boundary, from the blocks themselves.
    resumes_anywhere: ClassVar[bool] = True
    num_kv_heads: int
    head_dim: int
    dtype_size: int

    def bytes_per_row(self, block_size: int) -> int:
        """None: a sequence holds blocks only."""
        return 0

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of K and V of one block of `block_size` tokens."""
        return 2 * block_size * self.num_kv_heads * self.head_dim * self.dtype_size


@dataclass(frozen=True)
class WindowKVSpec:
    """Keys and values of the last `window` tokens of each row, in a ring of whole blocks. A prefix can be resumed only
    where a snapshot of the row was kept."""

    resumes_anywhere: ClassVar[bool] = False
    window: int
    num_kv_heads: int
    head_dim: int
    dtype_size: int

    def bytes_per_row(self, block_size: int) -> int:
        """Bytes of K and V of one ring."""
        return 2 * -(-self.window // block_size) * block_size * self.num_kv_heads * self.head_dim * self.dtype_size

    def bytes_per_block(self, block_size: int) -> int:
        """None: the ring does not grow."""
        return 0


@dataclass(frozen=True)
class StateSpec:
    """Recurrent state of each row, numbers of `dtype_size` bytes in `shape`; it stands at one position, so a prefix can
    be resumed only where a snapshot was kept."""

    resumes_anywhere: ClassVar[bool] = False
    shape: tuple[int, ...]
    dtype_size: int

    def bytes_per_row(self, block_size: int) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype_size

    def bytes_per_block(self, block_size: int) -> int:
        """None: the state does not grow."""
        return 0


CacheSpec = PagedKVSpec | WindowKVSpec | StateSpec
