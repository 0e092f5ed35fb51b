"""What stands between the qkv projection and attention, in one launch: every head is read once and written once.

Bytes moved for T tokens, H query and KV key heads of D elements of s bytes: 2 T (H + 2 KV) D s, and 2 T D s of tables.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Heads of all tokens of a program together; with fewer tokens a program takes one token, to spread the work.
_ROWS = 32
_MANY_TOKENS = 512


@triton.jit(do_not_specialize=["num_tokens"])
def _qkv_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr, q_ptr, k_cache_ptr, v_cache_ptr,
    num_tokens, qkv_stride, eps, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens, HEADS neighbouring heads, which are all queries, all keys or all values: HEADS divides H and KV.

    A head is held as its two halves [TOKENS * HEADS, D / 2], the partners of the rotation.
    """
    HALF: tl.constexpr = D // 2
    first_head = tl.program_id(1) * HEADS
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0) * TOKENS + row // HEADS
    live = token < num_tokens
    # Where the tokens stand is known since the step began: it is looked up, and the tables with it, while the kernel
    # before ends.
    slot = tl.load(slot_ptr + token, mask=live, other=-1)
    if ROTATE:
        position = tl.load(position_ptr + token, mask=live, other=0)
    token = token.to(tl.int64)
    head = first_head + row % HEADS
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    in_head = pair < HALF
    mask = live[:, None] & in_head
    if ROTATE:
        # The halves of a table's row differ in nothing but the sign of the first sines.
        angle = (position * D)[:, None] + HALF + pair
        turns = mask & (head < H + KV)[:, None]
        cos = tl.load(cos_ptr + angle, mask=turns, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=turns, other=0.0).to(tl.float32)
    if NORM:
        other = pair + HALF
        of_q = in_head & (first_head + tl.zeros_like(pair) < H)
        of_k = in_head & (first_head + tl.zeros_like(pair) >= H)
        x_weight = tl.load(q_weight_ptr + pair, mask=of_q, other=0.0)
        x_weight += tl.load(k_weight_ptr + pair, mask=of_k, other=0.0)
        y_weight = tl.load(q_weight_ptr + other, mask=of_q, other=0.0)
        y_weight += tl.load(k_weight_ptr + other, mask=of_k, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = qkv_ptr + (token * qkv_stride + head * D)[:, None] + pair
    low = tl.load(source, mask=mask, other=0.0)
    high = tl.load(source + HALF, mask=mask, other=0.0)
    cached = (slot >= 0)[:, None] & in_head
    if first_head >= H + KV:
        target = v_cache_ptr + (slot * (KV * D) + (head - H - KV) * D)[:, None] + pair
        tl.store(target, low, mask=cached)
        tl.store(target + HALF, high, mask=cached)
    else:
        x = low.to(tl.float32)
        y = high.to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(x * x + y * y, 1) / D + eps)[:, None]
            x = x * scale * x_weight.to(tl.float32)
            y = y * scale * y_weight.to(tl.float32)
        if ROTATE:
            x, y = x * cos - y * sin, y * cos + x * sin
        turned_x = x.to(q_ptr.dtype.element_ty)
        turned_y = y.to(q_ptr.dtype.element_ty)
        if first_head < H:
            target = q_ptr + (token * (H * D) + head * D)[:, None] + pair
            tl.store(target, turned_x, mask=mask)
            tl.store(target + HALF, turned_y, mask=mask)
        else:
            target = k_cache_ptr + (slot * (KV * D) + (head - H) * D)[:, None] + pair
            tl.store(target, turned_x, mask=cached)
            tl.store(target + HALF, turned_y, mask=cached)


def split_norm_rotate_write(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_table: torch.Tensor | None,
    sin_table: torch.Tensor | None,
    positions: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    overlap: bool = False,
) -> torch.Tensor:
    """See `kernels/qkv.py`."""
    num_tokens, dim = qkv.shape[0], k_cache.shape[-1]
    q = torch.empty((num_tokens, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return q
    # The largest power of two that divides both head counts, at most 8.
    heads = (num_heads | num_kv_heads | 8) & -(num_heads | num_kv_heads | 8)
    tokens = _ROWS // heads if num_tokens >= _MANY_TOKENS else 1
    half_block = triton.next_power_of_2(dim // 2)
    grid = (triton.cdiv(num_tokens, tokens), (num_heads + 2 * num_kv_heads) // heads)
    rotate = cos_table is not None
    rotary = (cos_table, sin_table, positions) if rotate else (qkv, qkv, slot_mapping)
    _qkv_kernel[grid](
        qkv, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, *rotary, slot_mapping,
        q if num_heads else qkv, k_cache, v_cache, num_tokens, qkv.stride(0), eps, H=num_heads, KV=num_kv_heads, D=dim,
        HALF_BLOCK=half_block, TOKENS=tokens, HEADS=heads, NORM=q_weight is not None, ROTATE=rotate, OVERLAP=overlap,
        num_warps=min(8, max(1, tokens * heads * half_block // 512)), **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return q
