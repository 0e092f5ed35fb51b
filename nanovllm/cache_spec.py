"""A model's cache needs, as data: the engine sizes pools and decides on prefix reuse from these alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PagedKVSpec:
    """Keys and values of one attention cache, kept for the whole context in blocks of a shared pool.

    Args:
        num_kv_heads: heads of K (and of V).
        head_dim: numbers per head.
        dtype_size: bytes per number.
    """

    num_kv_heads: int
    head_dim: int
    dtype_size: int

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of K and V of one block of `block_size` tokens."""
        return 2 * block_size * self.num_kv_heads * self.head_dim * self.dtype_size
