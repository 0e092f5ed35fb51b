"""Decode attention over a paged cache: Flash-Decoding (split keys, then combine) with the online softmax of
FlashAttention-2 (arXiv 2307.08691). See paged_attention.py for the contract.

A program takes one KV head of one sequence and one split of its keys. The query heads that share the KV head are the
rows of one tile, so keys and values are read once: 4 * D bytes (16-bit) a key for 4 * D * GROUP FLOP. At 2 to 8 FLOP
a byte only bandwidth counts; that a tensor core tile has 16 rows at least, most of them padding, costs nothing.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634

# Programs per multiprocessor to aim for: at two to three resident ones this is a wave and a half, enough to even out
# sequences of unequal length. More splits than that only add partial results.
_PROGRAMS_PER_SM = 4
# A split gets no fewer key tiles than this: below, starting the pipeline costs more than the split gains.
_MIN_TILES = 2
_MAX_SPLITS = 128


class DecodeConfig(NamedTuple):
    """block_n: keys a tile; the rest as Triton calls them."""

    block_n: int
    num_warps: int
    num_stages: int


def decode_config(capability: tuple[int, int], head_dim: int) -> DecodeConfig:
    """Tile and pipeline for a chip.

    Little's law sets the depth. An H200 brings 4.2 TB/s with about 0.8 us latency, so 3.4 MB must be on their way,
    25 KB per multiprocessor. A tile of 64 keys of 128 is 16 KB of K and as much of V; with three stages two of each
    are on their way, 64 KB of 227 KB, and three such programs fit a multiprocessor. An A10 needs 0.6 TB/s * 0.7 us
    / 72 = 6 KB and has 99 KiB: the same 64 KB give one program, 32 keys give three, which hide each other's softmax.
    """
    padded = triton.next_power_of_2(head_dim)
    roomy = capability[0] in (9, 10) or capability == (8, 0)
    block_n = min(64, (8192 if roomy else 4096) // padded)
    return DecodeConfig(block_n, num_warps=4, num_stages=3)


@triton.jit
def _live_tiles(context, window, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key tile that a decode query sees, and how many there are."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(context - window, 0) // BLOCK_N
    return first, tl.cdiv(context, BLOCK_N) - first


@triton.jit
def _block_ids(table_ptr, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block of each key of the tile at `start`: one id where a block holds whole tiles, else [BLOCK_N, 1] ids.
    Nothing is read past `end`."""
    if BLOCK_N <= BLOCK_SIZE:
        return tl.load(table_ptr + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)[:, None]
        return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)


@triton.jit(do_not_specialize=["window", "table_stride"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    context_ptr,
    scale_log2,
    window,
    table_stride,
    q_stride,
    block_stride,
    token_stride,
    head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One split of the keys of one KV head of one sequence; grid (KV, NUM_SPLITS, S).

    q_ptr: [S, H, D] with a stride between sequences. out_ptr: [S, H, NUM_SPLITS, D], float32 unless NUM_SPLITS is 1.
    lse_ptr: [S, H, NUM_SPLITS] float32, log2 of the sum of exponentials.
    """
    kv_head, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_ptr + seq)
    first, tiles = _live_tiles(context, window, HAS_WINDOW, BLOCK_N)
    splits = tl.minimum(NUM_SPLITS, tl.cdiv(tiles, MIN_TILES))
    if (NUM_SPLITS > 1) & (split >= splits):
        return
    splits = tl.maximum(splits, 1)
    begin = (first + tiles * split // splits) * BLOCK_N
    end = tl.minimum((first + tiles * (split + 1) // splits) * BLOCK_N, context)

    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    rows = kv_head * GROUP + heads
    mask_q = (heads < GROUP) & (dims < HEAD_DIM)
    q = tl.load(q_ptr + seq.to(tl.int64) * q_stride + rows * HEAD_DIM + dims, mask=mask_q, other=0.0)

    keys = tl.arange(0, BLOCK_N)[:, None]
    table_ptr += seq.to(tl.int64) * table_stride
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    top = tl.full([BLOCK_H], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    ids = _block_ids(table_ptr, begin, end, BLOCK_SIZE, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        offsets = ids.to(tl.int64) * block_stride + (start + keys) % BLOCK_SIZE * token_stride + dims
        live = start + keys < end
        if HAS_WINDOW:
            live &= start + keys >= context - window
        mask = live if HEAD_DIM == BLOCK_D else live & (dims < HEAD_DIM)
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
        ids = _block_ids(table_ptr, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        scores = tl.where(tl.trans(live), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top

    acc = acc / tl.maximum(total, 1e-30)[:, None]
    rows = (seq.to(tl.int64) * tl.num_programs(0) * GROUP + rows) * NUM_SPLITS + split
    tl.store(out_ptr + rows * HEAD_DIM + dims, acc.to(out_ptr.dtype.element_ty), mask=mask_q)
    if NUM_SPLITS > 1:
        lse = (top + tl.log2(total))[:, None]
        tl.store(lse_ptr + rows, lse, mask=heads < GROUP)
