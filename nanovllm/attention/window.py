"""Sliding-window attention whose cache is a ring: per row the last keys only, by position.

Position p lies in slot p % size of its row's ring. A decode step attends over the rings themselves, in whatever order
keys lie there. A prefill would overwrite keys that its own first tokens still need, so it attends over scratch pages,
which the kernels for paged caches serve: earlier keys are copied there from the ring, and the last ones back when all
have attended. A ring is cut into whole pages, so that both have one shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.attention.base import KVCache
from nanovllm.kernels.kv_cache import move_kv
from nanovllm.kernels.paged_attention import prefill_attention
from nanovllm.kernels.qkv import split_norm_rotate_write
from nanovllm.kernels.window_decode import window_decode


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


@dataclass(slots=True)
class WindowMetadata:
    """One step's way through all window caches, T tokens of S sequences.

    rows: [T] int64, of a decode step, whose rings; it needs nothing else.
    slots: [T] int64, of a prefill, scratch slots of its tokens; -1: nowhere.
    table: [S, max_pages] int32, scratch pages of each sequence.
    cu_seqlens_q: [S + 1] int32, running sum of the sequences' tokens.
    lens: [S] int32, their keys, those of earlier steps included.
    num_pages: scratch pages to make.
    kept: [2, K] int64, ring slots and scratch slots of keys of earlier steps; to -1: none.
    left: [2, M] int64, scratch slots and ring slots of keys that later steps see; as there.
    """

    window: int
    rows: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    table: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    lens: torch.Tensor | None = None
    num_pages: int = 0
    kept: torch.Tensor | None = None
    left: torch.Tensor | None = None


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
    block_size, kv_heads, dim = ring.k.shape[1:]
    if step.rows is not None:
        size = Ring(step.window, block_size).size
        rings = (tensor.view(-1, size, kv_heads, dim) for tensor in ring)
        return window_decode(qkv, *norm, *rotary, *rings, step.rows, step.window)
    pages = KVCache(*(tensor.new_empty(step.num_pages, *tensor.shape[1:]) for tensor in ring))
    move_kv(ring, pages, step.kept)
    q = split_norm_rotate_write(qkv, num_heads, kv_heads, *norm, *rotary, *pages, step.slots)
    out = prefill_attention(q, *pages, step.table, step.cu_seqlens_q, step.lens, dim**-0.5, step.window)
    move_kv(pages, ring, step.left)
    return out
