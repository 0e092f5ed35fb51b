"""Attention over a paged cache: one query per sequence (decode) or the last tokens of each sequence (prefill).

Letters: S sequences, T query tokens of all of them, H query heads, KV key heads (query head h reads key head
h // (H / KV)), D head size, L keys of one sequence.

Decode reads 2 * L * KV * D numbers a sequence for 4 * L * H * D FLOP: memory sets its time. Prefill of n tokens after
p cached ones takes 4 * H * D * n * (p + n / 2) FLOP: arithmetic does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.choice import overlaps_launches, twin


def prefill_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention where a sequence's queries are its last tokens; computed in float32.

    Args:
        q: [T, H, D], the sequences' queries one after the other; what follows them is padding, and comes out as
            anything.
        k_cache, v_cache: [num_blocks, block_size, KV, D], contiguous; slots no query sees may hold anything, NaN too.
        block_table: [S, max_blocks] int32; entries for blocks no query sees may be anything.
        cu_seqlens_q: [S + 1] int32, running sum of query lengths.
        context_lens: [S] int32, key lengths, those of the queries' own tokens included.
        scale: of the scores, positive.
        window: W, key j is seen by query i where i - W < j <= i; None sees all j <= i.

    Returns:
        [T, H, D] in q's dtype; zeros for a sequence with context length 0.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts = cu_seqlens_q.tolist()
    for seq, context in enumerate(context_lens.tolist()):
        first, last = starts[seq], starts[seq + 1]
        if first < last and context > 0:
            cached = context - (last - first)
            out[first:last] = _attend(q[first:last], k_cache, v_cache, block_table[seq], cached, scale, window)
    return out


def decode_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_seqlen_k: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """`prefill_attention_ref` for one query per sequence.

    Args:
        q: [S, H, D].
        max_seqlen_k: no context is longer; in a CUDA graph the longest that it may see. Work is cut by it, results
            do not depend on it.
        k_cache, v_cache, block_table, context_lens, scale, window: as there.

    Returns:
        [S, H, D] in q's dtype; zeros for a row with context length 0 (padding of a CUDA graph).
    """
    starts = torch.arange(len(q) + 1)
    return prefill_attention_ref(q, k_cache, v_cache, block_table, starts, context_lens, scale, window)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    blocks: torch.Tensor,
    cached: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """One sequence: q [n, H, D] at positions from `cached` on, blocks [max_blocks]; returns [n, H, D]."""
    context = cached + len(q)
    first = 0 if window is None else max(0, cached - window + 1)
    columns = torch.arange(first, context, device=q.device)
    rows = torch.arange(cached, context, device=q.device)[:, None]
    visible = columns <= rows
    if window is not None:
        visible &= columns > rows - window
    block_size = k_cache.shape[1]
    ids = blocks[columns // block_size].to(torch.int64)
    k, v = (cache[ids, columns % block_size].transpose(0, 1).float() for cache in (k_cache, v_cache))  # [KV, L, D]
    repeats = q.shape[1] // k.shape[0]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).float()[None],
        k.repeat_interleave(repeats, 0)[None],
        v.repeat_interleave(repeats, 0)[None],
        attn_mask=visible,
        scale=scale,
    )
    return out[0].transpose(0, 1).to(q.dtype)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """`prefill_attention_ref`, by a kernel where there is one: bfloat16 and float16, head sizes up to 256."""
    kernel = twin("paged_prefill") if q.is_cuda and q.dtype != torch.float32 else None
    run = prefill_attention_ref if kernel is None else kernel.prefill_attention
    return run(_rows(q), k_cache, v_cache, block_table, cu_seqlens_q, context_lens, scale, window)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_seqlen_k: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """`decode_attention_ref`, by a kernel where there is one (as `prefill_attention`); nothing waits for the device."""
    kernel = twin("paged_decode") if q.is_cuda and q.dtype != torch.float32 else None
    rest = (k_cache, v_cache, block_table, context_lens, max_seqlen_k, scale, window)
    if kernel is None:
        return decode_attention_ref(q, *rest)
    return kernel.decode_attention(_rows(q), *rest, overlap=overlaps_launches(q.device))


def _rows(q: torch.Tensor) -> torch.Tensor:
    """q with a token's heads side by side, as the kernels read them; tokens may lie apart."""
    return q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()
