"""Decode through a ring of the last keys, in one launch from the qkv projection to attention's output. See
window_decode.py for the contract; online softmax as in FlashAttention-2 (arXiv 2307.08691).

A program takes one KV head of one row, its queries as rows of one tile. The order of keys is of no account to softmax:
the ring is read as it lies, without a block table. Old keys do not come from the kernel before, so the first tile of
keys and values (at 256 keys of 64 all of them, 64 KB) is fetched while that one ends. What then is left is mostly
latency, which splitting the keys and combining them in another launch would not shorten.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634
# Bytes of a tile of keys, and as many of values: both fit into the 99 KB that a program may have on the smallest chips.
_TILE_BYTES = 32768


@triton.jit
def _load_tile(
    k_ptr, v_ptr, start, position, window, SIZE: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keys and values of the slots from `start` on, zeros where the query does not see them or they are its own:
    0 * NaN is NaN, so a probability of 0 does not hide what lies there. And which ones it sees, [BLOCK_N, 1]."""
    slot = start + tl.arange(0, BLOCK_N)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    age = (position % SIZE).to(tl.int32) - slot
    age = tl.where(age < 0, age + SIZE, age)
    live = (slot < SIZE) & (age > 0) & (age < window) & (age <= position)
    mask = live & (dims < D)
    offsets = slot * (KV * D) + dims
    # Values first: keys are stored to shared memory as soon as they are there, and nothing is loaded meanwhile.
    v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
    return tl.load(k_ptr + offsets, mask=mask, other=0.0), v, live


@triton.jit(do_not_specialize=["window"])
def _window_decode_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, position_ptr, k_ptr, v_ptr, rows_ptr, out_ptr, qkv_stride,
    eps, scale_log2, window, SIZE: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The GROUP queries of one KV head of one row, and its new key as one more row of the same tile; grid (KV, R)."""
    kv_head, i = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(position_ptr + i)
    ring = (tl.load(rows_ptr + i) * (SIZE * KV) + kv_head) * D
    k_ptr += ring
    v_ptr += ring
    head = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    partner = tl.where(dims < D // 2, dims + D // 2, dims - D // 2)
    in_head = dims < D
    is_q, is_k = (head < GROUP) & in_head, (head == GROUP) & in_head
    cos = tl.load(cos_ptr + position * D + dims, mask=in_head, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * D + dims, mask=in_head, other=0.0).to(tl.float32)
    if NORM:
        weight = tl.load(q_weight_ptr + dims, mask=is_q, other=0.0)
        weight += tl.load(k_weight_ptr + dims, mask=is_k, other=0.0)
        other_weight = tl.load(q_weight_ptr + partner, mask=is_q, other=0.0)
        other_weight += tl.load(k_weight_ptr + partner, mask=is_k, other=0.0)
    k, v, live = _load_tile(k_ptr, v_ptr, 0, position, window, SIZE, KV, D, BLOCK_N, BLOCK_D)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    dtype = out_ptr.dtype.element_ty
    qkv_ptr += i * qkv_stride
    source = qkv_ptr + tl.where(head < GROUP, kv_head * GROUP + head, KV * GROUP + kv_head) * D
    x = tl.load(source + dims, mask=is_q | is_k, other=0.0).to(tl.float32)
    other = tl.load(source + partner, mask=is_q | is_k, other=0.0).to(tl.float32)
    own_v = tl.load(qkv_ptr + (KV * (GROUP + 1) + kv_head) * D + dims, mask=in_head, other=0.0)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * scale * weight.to(tl.float32)
        other = other * scale * other_weight.to(tl.float32)
    heads = (x * cos + other * sin).to(dtype)
    slot = position % SIZE * (KV * D)
    tl.store(k_ptr + slot + dims + tl.zeros_like(head), heads, mask=is_k)
    tl.store(v_ptr + slot + dims, own_v, mask=in_head)

    # Softmax begins with the token's own key, from registers: what was just stored nobody here reads.
    own = tl.dot(heads, tl.trans(heads), input_precision="ieee")
    top = tl.sum(tl.where(tl.arange(0, BLOCK_H)[None, :] == GROUP, own, 0.0), 1) * scale_log2
    total = tl.full([BLOCK_H], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32) + own_v.to(tl.float32)
    for start in range(0, SIZE, BLOCK_N):
        scores = tl.dot(heads, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(tl.trans(live), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
        if SIZE > BLOCK_N:
            k, v, live = _load_tile(k_ptr, v_ptr, start + BLOCK_N, position, window, SIZE, KV, D, BLOCK_N, BLOCK_D)
    acc = acc / total[:, None]
    out_ptr += (i * (tl.num_programs(0) * GROUP) + kv_head * GROUP + head) * D
    tl.store(out_ptr + dims, acc.to(dtype), mask=is_q)


def window_decode(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_table: torch.Tensor,
    sin_table: torch.Tensor,
    positions: torch.Tensor,
    k_ring: torch.Tensor,
    v_ring: torch.Tensor,
    rows: torch.Tensor,
    window: int,
    overlap: bool = False,
) -> torch.Tensor:
    """See `kernels/window_decode.py`."""
    _, size, kv_heads, dim = k_ring.shape
    group = qkv.shape[1] // (kv_heads * dim) - 2
    out = torch.empty(len(qkv), kv_heads * group, dim, dtype=qkv.dtype, device=qkv.device)
    block_d = max(16, triton.next_power_of_2(dim))
    block_n = max(16, min(triton.next_power_of_2(size), _TILE_BYTES // (block_d * qkv.element_size())))
    if len(qkv):
        _window_decode_kernel[(kv_heads, len(qkv))](
            qkv, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, cos_table, sin_table,
            positions, k_ring, v_ring, rows, out, qkv.stride(0), eps, dim**-0.5 * _LOG2_E, window, SIZE=size,
            KV=kv_heads, GROUP=group, D=dim, BLOCK_H=max(16, triton.next_power_of_2(group + 1)), BLOCK_D=block_d,
            BLOCK_N=block_n, NORM=q_weight is not None, OVERLAP=overlap, num_warps=8 if block_n >= 128 else 4,
            num_stages=1, **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return out
