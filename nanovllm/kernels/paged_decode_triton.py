"""Decode attention over a paged cache: Flash-Decoding (split the keys, then combine) with the online softmax of
FlashAttention-2 (arXiv 2307.08691). See paged_attention.py for the contract.

A program takes one KV head of one sequence and one split of its keys. The query heads that share the KV head are the
rows of one tile, so that keys and values are read once: 4 * D bytes a key (16-bit) for 4 * D * GROUP FLOP. At GROUP
FLOP a byte only bandwidth counts; that a tensor core wants 16 rows, most of them padding here, costs nothing.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634

# Programs to aim for on each multiprocessor. Two or three fit at once; the rest evens out sequences of unequal length.
# Beyond that more splits only write more partial results.
_PROGRAMS_PER_SM = 4
# A split has at least as many key tiles: with fewer, filling the pipeline takes longer than the split saves.
_MIN_TILES = 2
_MAX_SPLITS = 128
# Query heads of one program. Larger groups take several programs, the second of which finds the keys in L2.
_MAX_HEADS = 32


class DecodeConfig(NamedTuple):
    """block_n: keys of a tile; the rest as Triton calls it."""

    block_n: int
    num_warps: int
    num_stages: int


def decode_config(capability: tuple[int, int], head_dim: int) -> DecodeConfig:
    """Tile and pipeline for a chip.

    By Little's law an H200 (4.2 TB/s, about 0.8 us to memory) has to have 3.4 MB on their way, 25 KB for each of 132
    multiprocessors. 64 keys of 128 are 16 KB of K and 16 KB of V; three stages hold two such tiles, 70 KB of the
    228 KB there are: three programs fit, and while one waits at a barrier the others' loads go on. An A10 (0.6 TB/s,
    72 multiprocessors, 99 KB for a program, 100 KB for all) needs 6 KB: with 32 keys two programs fit, with 64 one.
    """
    roomy = capability == (8, 0) or capability[0] in (9, 10)
    block_n = (8192 if roomy else 4096) // triton.next_power_of_2(head_dim)
    return DecodeConfig(min(64, block_n), num_warps=4, num_stages=3)


def num_splits(num_programs: int, max_keys: int, multiprocessors: int, block_n: int) -> int:
    """Splits of each sequence, from what the host knows: enough programs to fill the device at any batch size, one
    split where sequences and heads alone do. It is an argument at run time: one kernel serves every batch size."""
    return max(
        1, min(_PROGRAMS_PER_SM * multiprocessors // num_programs, max_keys // (_MIN_TILES * block_n), _MAX_SPLITS)
    )


@triton.jit
def _live_splits(context, window, HAS_WINDOW: tl.constexpr, MIN_TILES: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key tile that the query sees, how many there are, and how many splits they are worth."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(context - window, 0) // BLOCK_N
    tiles = tl.cdiv(context, BLOCK_N) - first
    return first, tiles, tl.cdiv(tiles, MIN_TILES)


@triton.jit
def _block_ids(table_ptr, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block of each key of the tile at `start`: one id where a block holds whole tiles, else [BLOCK_N, 1] ids.
    The table is not read past `end`."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table_ptr + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)[:, None]
        return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)


@triton.jit(do_not_specialize=["window", "table_stride"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, context_ptr, scale_log2, window, table_stride, q_stride,
    block_stride, head_stride, TOKEN_STRIDE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, SPLIT: tl.constexpr, MIN_TILES: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One split of the keys for BLOCK_H heads of a group; grid (KV * tiles of a group, splits, S).

    q_ptr: [S, H, D], rows of D in order. out_ptr: [S, H, D], with SPLIT [S, H, splits, D] float32.
    lse_ptr: [S, H, splits] float32, log2 of the sum of exponentials; untouched without SPLIT.
    """
    HEAD_TILES: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head, head_tile = tl.program_id(0) // HEAD_TILES, tl.program_id(0) % HEAD_TILES
    split, seq = tl.program_id(1), tl.program_id(2).to(tl.int64)
    # Lengths and block tables are a step's, so they are looked up while the kernel before ends.
    context = tl.load(context_ptr + seq)
    first, tiles, splits = _live_splits(context, window, HAS_WINDOW, MIN_TILES, BLOCK_N)
    # The grid is fixed, perhaps in a graph; how a sequence is cut is decided here, by its length: into equal parts,
    # and into fewer than there are programs where it is short.
    splits = tl.minimum(splits, tl.num_programs(1))
    is_live = split < splits
    splits = tl.maximum(splits, 1)
    begin = (first + tiles * split // splits) * BLOCK_N
    end = tl.minimum((first + tiles * (split + 1) // splits) * BLOCK_N, context)
    table_ptr += seq * table_stride
    ids = _block_ids(table_ptr, begin, tl.where(is_live, end, begin), BLOCK_SIZE, BLOCK_N)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SPLIT and not is_live:
        return

    in_group = head_tile * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    heads = kv_head * GROUP + in_group
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask_q = (in_group < GROUP) & (dims < HEAD_DIM)
    q = tl.load(q_ptr + seq * q_stride + heads * HEAD_DIM + dims, mask=mask_q, other=0.0)

    keys = tl.arange(0, BLOCK_N)[:, None]
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    # Finite, so that a tile without any visible key gives exp2(-inf - top) = 0 and not NaN.
    top = tl.full([BLOCK_H], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        if BLOCK_SIZE % BLOCK_N == 0:
            tile = ids.to(tl.int64) * block_stride + start % BLOCK_SIZE * TOKEN_STRIDE
            offsets = keys * TOKEN_STRIDE + dims
        else:
            tile = ids.to(tl.int64) * block_stride + (start + keys) % BLOCK_SIZE * TOKEN_STRIDE
            offsets = dims
        # One tile ahead, and carried by the loop: were it loaded where it is used, the pipeline would spend half
        # of its stages on this load.
        ids = _block_ids(table_ptr, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        live = start + keys < end
        if HAS_WINDOW:
            live &= start + keys >= context - window
        # Zeros for what is not live: 0 * NaN is NaN, so a probability of 0 does not hide what lies there.
        mask = live & (dims < HEAD_DIM)
        k = tl.load(k_ptr + tile + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
        v = tl.load(v_ptr + tile + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
        scores = tl.where(tl.trans(live), tl.dot(q, tl.trans(k)), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
        p = tl.exp2(scores * scale_log2 - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top

    acc = acc / tl.maximum(total, 1.0e-30)[:, None]
    rows = (seq * (tl.num_programs(0) // HEAD_TILES * GROUP) + heads) * tl.num_programs(1) + split
    tl.store(out_ptr + rows * HEAD_DIM + dims, acc.to(out_ptr.dtype.element_ty), mask=mask_q)
    if SPLIT:
        tl.store(lse_ptr + rows, (top + tl.log2(total))[:, None], mask=in_group < GROUP)


@triton.jit(do_not_specialize=["window", "num_splits"])
def _combine_kernel(
    part_ptr, lse_ptr, out_ptr, context_ptr, window, num_splits, HEAD_DIM: tl.constexpr, HAS_WINDOW: tl.constexpr,
    MIN_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Mean of the splits that had keys, weighted by their sums; grid (H, S). A program reads 4 * D + 8 bytes a split
    and writes D numbers.
    """
    seq = tl.program_id(1).to(tl.int64)
    row = seq * tl.num_programs(0) + tl.program_id(0)
    part_ptr += row * num_splits * HEAD_DIM
    lse_ptr += row * num_splits
    every = tl.arange(0, MAX_SPLITS)
    _, _, splits = _live_splits(tl.load(context_ptr + seq), window, HAS_WINDOW, MIN_TILES, BLOCK_N)
    splits = tl.minimum(splits, num_splits)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    all_lse = tl.load(lse_ptr + every, mask=every < splits, other=float("-inf"))
    top = tl.maximum(tl.max(all_lse, 0), -1.0e30)
    total = tl.sum(tl.exp2(all_lse - top), 0)

    dims = tl.arange(0, BLOCK_D)[None, :]
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, splits, CHUNK):
        index = start + tl.arange(0, CHUNK)[:, None]
        there = index < splits
        part = tl.load(part_ptr + index * HEAD_DIM + dims, mask=there & (dims < HEAD_DIM), other=0.0)
        lse = tl.load(lse_ptr + index, mask=there, other=float("-inf"))
        acc += tl.sum(part * tl.exp2(lse - top), 0)
    acc = acc / tl.maximum(total, 1.0e-30)
    dims = tl.arange(0, BLOCK_D)
    tl.store(out_ptr + row * HEAD_DIM + dims, acc.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@functools.lru_cache
def _device(index: int | None) -> tuple[tuple[int, int], int]:
    """Capability and multiprocessors; of an imaginary small chip under the interpreter, which runs on the CPU."""
    if index is None:
        return (8, 0), 4
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.multi_processor_count


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_seqlen_k: int,
    scale: float,
    window: int | None = None,
    splits: int | None = None,
    config: DecodeConfig | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """See `paged_attention.decode_attention`. `splits` (up to 128) and `config` are for measurements."""
    num_seqs, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    capability, multiprocessors = _device(q.device.index)
    config = config or decode_config(capability, head_dim)
    group = num_heads // num_kv_heads
    block_h = min(max(triton.next_power_of_2(group), 16), _MAX_HEADS)
    programs = num_kv_heads * triton.cdiv(group, block_h)
    if splits is None:
        max_keys = max_seqlen_k if window is None else min(max_seqlen_k, window)
        splits = num_splits(programs * num_seqs, max_keys, multiprocessors, config.block_n)

    out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype, device=q.device)
    part, lse = out, out
    if splits > 1:
        part = torch.empty((num_seqs, num_heads, splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((num_seqs, num_heads, splits), dtype=torch.float32, device=q.device)
    shared = {
        "HEAD_DIM": head_dim,
        "HAS_WINDOW": window is not None,
        "MIN_TILES": _MIN_TILES,
        "BLOCK_D": max(triton.next_power_of_2(head_dim), 16),
        "BLOCK_N": config.block_n,
        "OVERLAP": overlap,
        **({"launch_pdl": True} if overlap else {}),
    }
    _decode_kernel[(programs, splits, num_seqs)](
        q, k_cache, v_cache, part, lse, block_table, context_lens, scale * _LOG2_E, window or 0,
        block_table.stride(0), q.stride(0), k_cache.stride(0), k_cache.stride(2), TOKEN_STRIDE=k_cache.stride(1),
        GROUP=group, BLOCK_SIZE=block_size, SPLIT=splits > 1, BLOCK_H=block_h, num_warps=config.num_warps,
        num_stages=config.num_stages, **shared,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(num_heads, num_seqs)](
            part, lse, out, context_lens, window or 0, splits, MAX_SPLITS=_MAX_SPLITS,
            CHUNK=4096 // shared["BLOCK_D"], num_warps=4, **shared,
        )  # fmt: skip
    return out
