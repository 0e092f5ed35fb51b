"""Attention with torch's own operators, on any device; the CPU path."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionMetadata, KVCache

# A mask has this many query rows at most, so that a long chunk behind a long prefix stays a bounded one.
_QUERY_ROWS = 1024


class TorchAttention:
    """scaled_dot_product_attention over keys gathered from the paged cache."""

    name = "torch"
    default_block_size = 16
    block_size_multiple = 1
    in_cuda_graph = False

    def prepare(self, metadata: AttentionMetadata, num_blocks: int, block_size: int) -> None:
        """Derive the cache slots of every sequence's keys: a padded [S, L] table for decode, else a list."""
        longest = max(metadata.seq_lens)
        device = metadata.block_table.device
        table = metadata.block_table[:, : -(-longest // block_size)].to(torch.int64)
        offsets = torch.arange(block_size, device=device)
        slots = (table[:, :, None] * block_size + offsets).flatten(1)[:, :longest]
        if not metadata.is_decode:
            metadata.scratch["slots"] = [row[:n] for row, n in zip(slots, metadata.seq_lens, strict=True)]
            return
        metadata.scratch["mask"] = None
        if min(metadata.seq_lens) < longest:
            seen = torch.arange(longest, device=device)[None] < metadata.context_lens[:, None]
            # Padding reads the block that stays zero: a freed block may hold anything, NaN too.
            slots = torch.where(seen, slots, num_blocks * block_size)
            metadata.scratch["mask"] = seen[:, None, None, :]
        metadata.scratch["slots"] = slots

    def attend(self, q: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        if metadata.is_decode:
            return _decode(q, cache, metadata.scratch["slots"], metadata.scratch["mask"], scale)
        out = torch.empty_like(q)
        start = 0
        for slots, query_len in zip(metadata.scratch["slots"], metadata.query_lens, strict=True):
            end = start + query_len
            out[start:end] = _prefill(q[start:end], cache, slots, scale)
            start = end
        return out


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of a cache tensor at `slots` (any shape [...]), as [..., KV, D]."""
    rows = cache.view(-1, cache.shape[-2] * cache.shape[-1])
    return rows.index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[-2:])


def _decode(
    q: torch.Tensor, cache: KVCache, slots: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """One query per sequence: q [S, H, D], slots [S, L], mask [S, 1, 1, L] or None; returns [S, H, D]."""
    k, v = _gather(cache.k, slots).transpose(1, 2), _gather(cache.v, slots).transpose(1, 2)  # [S, KV, L, D]
    # The query heads that share a KV head stand where query rows would, so that K and V are read once.
    grouped = q.view(q.shape[0], k.shape[1], -1, q.shape[-1])
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).reshape(q.shape)


def _prefill(q: torch.Tensor, cache: KVCache, slots: torch.Tensor, scale: float) -> torch.Tensor:
    """The last rows of one sequence: q [Lq, H, D], slots [Lk] with Lk >= Lq; returns [Lq, H, D]."""
    query_len, num_heads, _ = q.shape
    repeats = num_heads // cache.k.shape[-2]
    k = _gather(cache.k, slots).transpose(0, 1).repeat_interleave(repeats, 0)[None]  # [1, H, Lk, D]
    v = _gather(cache.v, slots).transpose(0, 1).repeat_interleave(repeats, 0)[None]
    cached = slots.shape[0] - query_len
    rows = q.transpose(0, 1)[None]  # [1, H, Lq, D]
    if cached == 0:
        return F.scaled_dot_product_attention(rows, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)
    pieces = []
    for first in range(0, query_len, _QUERY_ROWS):
        last = min(first + _QUERY_ROWS, query_len)
        visible = torch.ones(last - first, cached + last, dtype=torch.bool, device=q.device).tril(cached + first)
        pieces.append(
            F.scaled_dot_product_attention(
                rows[:, :, first:last],
                k[:, :, : cached + last],
                v[:, :, : cached + last],
                attn_mask=visible,
                scale=scale,
            )
        )
    return torch.cat(pieces, dim=2)[0].transpose(0, 1)
