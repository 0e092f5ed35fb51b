"""Prefill attention over a paged cache: FlashAttention-2 (arXiv 2307.08691) for sequences of unequal length that may
have a cached prefix. See paged_attention.py for the contract.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634


class PrefillConfig(NamedTuple):
    """block_m: rows (query tokens x heads of a group) a tile; block_n: keys a tile; the rest as Triton calls them."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@triton.jit
def _block_ids(table_ptr, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block of each key of the tile at `start`: one id where a block holds whole tiles, else [BLOCK_N, 1] ids.
    Nothing is read past `end`."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table_ptr + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)[:, None]
        return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)


@triton.jit
def _attend_tiles(
    acc,
    top,
    total,
    q,
    positions,
    k_ptr,
    v_ptr,
    table_ptr,
    begin,
    end,
    scale_log2,
    window,
    first_key,
    block_stride,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over the key tiles of [begin, end); MASKED where some row does not see all of them."""
    keys = tl.arange(0, BLOCK_N)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    ids = _block_ids(table_ptr, begin, end, BLOCK_SIZE, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        if BLOCK_SIZE % BLOCK_N == 0:
            tile = ids.to(tl.int64) * block_stride + start % BLOCK_SIZE * TOKEN_STRIDE
            offsets = keys * TOKEN_STRIDE + dims
        else:
            tile = ids.to(tl.int64) * block_stride + (start + keys) % BLOCK_SIZE * TOKEN_STRIDE
            offsets = dims
        ids = _block_ids(table_ptr, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        if MASKED:
            live = (start + keys < end) & (start + keys >= first_key) & (dims < HEAD_DIM)
            k = tl.load(k_ptr + tile + offsets, mask=live, other=0.0)
            v = tl.load(v_ptr + tile + offsets, mask=live, other=0.0)
        elif HEAD_DIM < BLOCK_D:
            k = tl.load(k_ptr + tile + offsets, mask=dims < HEAD_DIM, other=0.0)
            v = tl.load(v_ptr + tile + offsets, mask=dims < HEAD_DIM, other=0.0)
        else:
            k = tl.load(k_ptr + tile + offsets)
            v = tl.load(v_ptr + tile + offsets)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        if MASKED:
            columns = start + tl.arange(0, BLOCK_N)[None, :]
            seen = columns <= positions
            if HAS_WINDOW:
                seen &= columns > positions - window
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["window", "table_stride"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    cu_q_ptr,
    context_ptr,
    scale_log2,
    window,
    table_stride,
    q_stride,
    out_stride,
    block_stride,
    head_stride,
    GROUP: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_M rows of one KV head of one sequence; grid (tiles of the longest query, KV, S)."""
    kv_head, seq = tl.program_id(1), tl.program_id(2)
    q_start = tl.load(cu_q_ptr + seq)
    num_rows = (tl.load(cu_q_ptr + seq + 1) - q_start) * GROUP
    # The last tile has the most keys and starts first; programs beyond the sequence come last and leave.
    tile = tl.cdiv(num_rows, BLOCK_M) - 1 - tl.program_id(0)
    if tile < 0:
        return
    context = tl.load(context_ptr + seq)
    if context == 0:
        return
    cached = context - num_rows // GROUP
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    tokens = rows // GROUP
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask_q = (rows < num_rows) & (dims < HEAD_DIM)
    columns = (kv_head * GROUP + rows % GROUP) * HEAD_DIM + dims
    q = tl.load(q_ptr + (q_start + tokens).to(tl.int64) * q_stride + columns, mask=mask_q, other=0.0)

    # Positions of the tile's first and last token, and the keys that they bound.
    low = cached + tile * BLOCK_M // GROUP
    high = tl.minimum(cached + (tile * BLOCK_M + BLOCK_M - 1) // GROUP, context - 1)
    end = high + 1
    first_key, begin, full_begin = 0, 0, 0
    if HAS_WINDOW:
        first_key = tl.maximum(low - window + 1, 0)
        begin = first_key // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(high - window + 1, 0), BLOCK_N) * BLOCK_N
    full_end = (low + 1) // BLOCK_N * BLOCK_N

    positions = cached + tokens
    table_ptr += seq.to(tl.int64) * table_stride
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_WINDOW:
        full_begin = tl.minimum(full_begin, tl.cdiv(end, BLOCK_N) * BLOCK_N)
        full_end = tl.maximum(full_end, full_begin)
        acc, top, total = _attend_tiles(
            acc,
            top,
            total,
            q,
            positions,
            k_ptr,
            v_ptr,
            table_ptr,
            begin,
            tl.minimum(full_begin, end),
            scale_log2,
            window,
            first_key,
            block_stride,
            TOKEN_STRIDE,
            HEAD_DIM,
            BLOCK_SIZE,
            HAS_WINDOW,
            BLOCK_D,
            BLOCK_N,
            True,
        )
    acc, top, total = _attend_tiles(
        acc,
        top,
        total,
        q,
        positions,
        k_ptr,
        v_ptr,
        table_ptr,
        full_begin,
        full_end,
        scale_log2,
        window,
        first_key,
        block_stride,
        TOKEN_STRIDE,
        HEAD_DIM,
        BLOCK_SIZE,
        HAS_WINDOW,
        BLOCK_D,
        BLOCK_N,
        False,
    )
    acc, top, total = _attend_tiles(
        acc,
        top,
        total,
        q,
        positions,
        k_ptr,
        v_ptr,
        table_ptr,
        full_end,
        end,
        scale_log2,
        window,
        first_key,
        block_stride,
        TOKEN_STRIDE,
        HEAD_DIM,
        BLOCK_SIZE,
        HAS_WINDOW,
        BLOCK_D,
        BLOCK_N,
        True,
    )
    acc = acc / total[:, None]
    tl.store(
        out_ptr + (q_start + tokens).to(tl.int64) * out_stride + columns, acc.to(out_ptr.dtype.element_ty), mask=mask_q
    )
