"""Prefill attention over a paged cache: FlashAttention-2 (arXiv 2307.08691) for sequences of unequal length whose
first keys may have been computed before. See paged_attention.py for the contract.

A program takes BLOCK_M rows of one KV head, a row being a (token, head of the group) pair in this order: a short query
still fills a tile, and the part of a diagonal tile that is computed for nothing shrinks by the group size. Work is
4 * D FLOP for each visible (row, key) pair; a program reads 4 * D bytes a key (16-bit) for 4 * D * BLOCK_M FLOP, 128
FLOP a byte with 128 rows, most of it from L2, as the programs of a head run side by side.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634


class PrefillConfig(NamedTuple):
    """block_m: rows (query tokens x heads of a group) a tile; block_n: keys a tile; the rest as Triton calls them."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_config(capability: tuple[int, int], head_dim: int, windowed: bool) -> PrefillConfig:
    """Tile and pipeline for a chip. Bytes are for a head of 128, registers as triton 3.6 and 3.9 compile it.

    sm_90 and sm_100 (227 KiB for a program): 128 x 128 tiles in two warpgroups take 160 KiB and all 255 registers, and
    rescale the accumulator half as often as 128 x 64 tiles. A window adds a second masked loop, which no longer fits,
    and wide tiles compute more that its edges cut off: 64 keys then, in three stages.
    Elsewhere mma.sync wants BLOCK_M >= D: only then a warp owns whole rows, and its softmax needs no shared memory.
    Eight warps hold 128 x 64 in 213 registers, four would spill. On sm_80 (163 KiB) three stages take 96 KiB. An A10
    (sm_86, 125 TFLOP/s, 600 GB/s), sm_89 and sm_120 have 99 KiB, of which two stages take 64. At 128 FLOP a byte an
    A10 asks for 1 TB/s at most, and that of its L2: one tile ahead is enough.
    A head of 256 doubles all of it: fewer keys there, and fewer rows where registers or shared memory force it.
    """
    wide = triton.next_power_of_2(head_dim) > 128
    if capability[0] in (9, 10):
        if windowed or wide:
            return PrefillConfig(128, 64, num_warps=8, num_stages=2 if wide else 3)
        return PrefillConfig(128, 128, num_warps=8, num_stages=2)
    roomy = capability == (8, 0)
    if wide:
        return PrefillConfig(64, 64 if roomy else 32, num_warps=8, num_stages=2)
    return PrefillConfig(128, 64, num_warps=8, num_stages=3 if roomy or head_dim <= 64 else 2)


@triton.jit
def _block_ids(table_ptr, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block of each key of the tile at `start`: one id where a block holds whole tiles, else [BLOCK_N, 1] ids.
    The table is not read past `end`."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table_ptr + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)[:, None]
        return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)


@triton.jit
def _attend_tiles(
    acc, top, total, q, positions, k_ptr, v_ptr, table_ptr, begin, end, scale_log2, window, first_key, block_stride,
    TOKEN_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
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
        # One tile ahead and carried by the loop, so that the pipeline gives all its stages to keys and values.
        ids = _block_ids(table_ptr, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        live, fill = None, None
        if MASKED:
            # Zeros for what is not live: 0 * NaN is NaN, so a probability of 0 does not hide what lies there.
            live, fill = (start + keys < end) & (start + keys >= first_key) & (dims < HEAD_DIM), 0.0
        elif HEAD_DIM < BLOCK_D:
            live, fill = dims < HEAD_DIM, 0.0
        k = tl.load(k_ptr + tile + offsets, mask=live, other=fill)
        v = tl.load(v_ptr + tile + offsets, mask=live, other=fill)
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            columns = start + tl.arange(0, BLOCK_N)[None, :]
            seen = columns <= positions
            if HAS_WINDOW:
                seen &= columns > positions - window
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
        p = tl.exp2(scores * scale_log2 - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc)
        top = new_top
    return acc, top, total


@triton.jit
def _owner(cu_q_ptr, num_seqs, index, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sequence that program `index` works for. Those of sequence s begin with number cu_q[s] * GROUP // BLOCK_M +
    s, so that no sequence's length has to be known to the host, nor does a long one make work for short ones."""
    first, end = 0, num_seqs
    while end - first > 1:
        middle = (first + end) // 2
        begun = tl.load(cu_q_ptr + middle) * GROUP // BLOCK_M + middle <= index
        first = tl.where(begun, middle, first)
        end = tl.where(begun, end, middle)
    return first


@triton.jit(do_not_specialize=["num_seqs", "window", "table_stride"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, cu_q_ptr, context_ptr, num_seqs, scale_log2, window,
    table_stride, q_stride, out_stride, block_stride, head_stride,
    GROUP: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of one KV head of one sequence; grid (T * GROUP // BLOCK_M + S, KV): a
    program or none too many for each sequence, wherever its queries begin."""
    index, kv_head = tl.program_id(0), tl.program_id(1)
    seq = _owner(cu_q_ptr, num_seqs, index, GROUP, BLOCK_M)
    q_start = tl.load(cu_q_ptr + seq)
    num_rows = (tl.load(cu_q_ptr + seq + 1) - q_start) * GROUP
    # The last tile has the most keys and starts first; programs beyond the sequence come last and leave.
    tile = tl.cdiv(num_rows, BLOCK_M) - 1 - (index - (q_start * GROUP // BLOCK_M + seq))
    if tile < 0:
        return
    context = tl.load(context_ptr + seq)
    cached = context - num_rows // GROUP
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    tokens = rows // GROUP
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask_q = (rows < num_rows) & (dims < HEAD_DIM)
    columns = (kv_head * GROUP + rows % GROUP) * HEAD_DIM + dims
    q = tl.load(q_ptr + (q_start + tokens).to(tl.int64) * q_stride + columns, mask=mask_q, other=0.0)

    # Positions of the tile's first and last token. Keys of [begin, end) are seen by some row; those of
    # [full_begin, full_end) by every row, whole tiles that need no mask.
    low = cached + tile * BLOCK_M // GROUP
    high = tl.minimum(cached + (tile * BLOCK_M + BLOCK_M - 1) // GROUP, context - 1)
    end = high + 1
    first_key, begin, full_begin = 0, 0, 0
    full_end = (low + 1) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        first_key = tl.maximum(low - window + 1, 0)
        begin = first_key // BLOCK_N * BLOCK_N
        full_begin = tl.minimum(tl.cdiv(tl.maximum(high - window + 1, 0), BLOCK_N) * BLOCK_N, end)
        full_end = tl.maximum(full_end, full_begin)

    positions = cached + tokens
    table_ptr += seq.to(tl.int64) * table_stride
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    # Finite, so that a tile in which a row sees no key gives exp2(-inf - top) = 0 and not NaN.
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.static_range(3):
        if part > 0 or HAS_WINDOW:
            part_begin = begin if part == 0 else (full_begin if part == 1 else full_end)
            part_end = full_begin if part == 0 else (full_end if part == 1 else end)
            acc, top, total = _attend_tiles(
                acc, top, total, q, positions, k_ptr, v_ptr, table_ptr, part_begin, part_end, scale_log2, window,
                first_key, block_stride, TOKEN_STRIDE, HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, BLOCK_D, BLOCK_N, part != 1,
            )  # fmt: skip
    out_ptr += (q_start + tokens).to(tl.int64) * out_stride + columns
    tl.store(out_ptr, (acc / tl.maximum(total, 1e-30)[:, None]).to(out_ptr.dtype.element_ty), mask=mask_q)


@functools.lru_cache
def _capability(index: int | None) -> tuple[int, int]:
    """Of a device; of an imaginary chip under the interpreter, which runs on the CPU."""
    return (8, 0) if index is None else torch.cuda.get_device_capability(index)


def prefill_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, context_lens: Tensor,
    scale: float, window: int | None = None, config: PrefillConfig | None = None,
) -> Tensor:  # fmt: skip
    """See `paged_attention.prefill_attention`. `config` is for measurements."""
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    config = config or prefill_config(_capability(q.device.index), head_dim, window is not None)
    group = num_heads // num_kv_heads
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    num_seqs = len(context_lens)
    grid = (num_tokens * group // config.block_m + num_seqs, num_kv_heads)
    _prefill_kernel[grid](
        q, k_cache, v_cache, out, block_table, cu_seqlens_q, context_lens, num_seqs, scale * _LOG2_E,
        window or 0, block_table.stride(0), q.stride(0), out.stride(0), k_cache.stride(0), k_cache.stride(2),
        TOKEN_STRIDE=k_cache.stride(1), GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        HAS_WINDOW=window is not None, BLOCK_M=config.block_m, BLOCK_D=max(triton.next_power_of_2(head_dim), 16),
        BLOCK_N=config.block_n, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
