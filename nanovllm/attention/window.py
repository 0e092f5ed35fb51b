"""Sliding-window attention whose cache is a ring: per row the last keys only, by position.

The ring is cut into pages, so that the kernels for paged caches serve it. Position p lies in ring block
(p // block_size) % blocks at offset p % block_size. A decode step attends over the rings themselves: for every block of
the whole context the table names the ring block that it fell into. The window may begin and end in the same ring block,
where the new end has not reached the old beginning yet: both are read at their own offsets. A prefill would overwrite
keys that its own first tokens still need, so it attends over scratch pages: earlier keys are copied there from the
ring, and the last ones back when all have attended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.attention.base import AttentionMetadata, KVCache
from nanovllm.kernels.paged_attention import decode_attention, prefill_attention
from nanovllm.kernels.qkv import split_norm_rotate_write


@dataclass(frozen=True)
class Ring:
    """window: keys that a query sees, its own included; block_size: tokens per page."""

    window: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        """Pages of one row."""
        return -(-self.window // self.block_size)

    @property
    def size(self) -> int:
        """Slots of one row."""
        return self.num_blocks * self.block_size

    def table(self, num_rows: int, max_blocks: int, device: torch.device) -> torch.Tensor:
        """[num_rows, max_blocks] int32: in which page of all rows' rings each logical block lies."""
        blocks = torch.arange(max_blocks, dtype=torch.int32, device=device) % self.num_blocks
        return torch.arange(num_rows, dtype=torch.int32, device=device)[:, None] * self.num_blocks + blocks


@dataclass(slots=True)
class WindowMetadata:
    """One step's way through all window caches.

    pages: where tokens are written and what they attend over: rings for a decode step, scratch pages for a prefill.
    num_pages: scratch pages to make; 0 for a decode step.
    kept: ring slots and scratch slots [K] int64 of keys of earlier steps.
    left: scratch slots and ring slots [M] int64 of keys that later steps see.
    """

    window: int
    pages: AttentionMetadata
    num_pages: int = 0
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    left: tuple[torch.Tensor, torch.Tensor] | None = None


def window_attention(
    qkv: torch.Tensor,
    num_heads: int,
    norm: tuple[torch.Tensor | None, torch.Tensor | None, float],
    rotary: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ring: KVCache,
    step: WindowMetadata,
) -> torch.Tensor:
    """Normalise, rotate, remember and attend.

    Args:
        qkv: [T, (H + 2 KV) * D].
        num_heads: H.
        norm: weights [D] of the queries' and keys' norm, or None both, and its eps.
        rotary: tables of cos and sin and the positions [T], as `split_norm_rotate_write` takes them.
        ring: [rows * blocks of a ring, block_size, KV, D], changed in place.
        step: which keys are whose.

    Returns:
        [T, H, D].
    """
    pages, meta = ring, step.pages
    if step.num_pages:
        pages = KVCache(*(tensor.new_empty(step.num_pages, *tensor.shape[1:]) for tensor in ring))
        _move(ring, pages, step.kept)
    kv_heads, dim = ring.k.shape[2:]
    q = split_norm_rotate_write(qkv, num_heads, kv_heads, *norm, *rotary, *pages, meta.slot_mapping)
    table, lens, scale = meta.block_table, meta.context_lens, dim**-0.5
    if not step.num_pages:
        return decode_attention(q, *pages, table, lens, max(meta.seq_lens), scale, step.window)
    longest = max(meta.query_lens)
    out = prefill_attention(q, *pages, table, meta.cu_seqlens_q, lens, longest, scale, step.window)
    _move(pages, ring, step.left)
    return out


def _move(source: KVCache, target: KVCache, slots: tuple[torch.Tensor, torch.Tensor]) -> None:
    for old, new in zip(source, target, strict=True) if len(slots[0]) else ():
        new.view(-1, *new.shape[2:]).index_copy_(0, slots[1], old.view(-1, *old.shape[2:])[slots[0]])
