"""What a decoder layer does between its qkv projection and attention, as one operation."""

from __future__ import annotations

import torch

from nanovllm.kernels.choice import overlaps_launches, twin
from nanovllm.kernels.kv_cache import write_kv_ref
from nanovllm.kernels.layernorm import rms_norm_ref
from nanovllm.kernels.rotary import rotary_ref


def split_norm_rotate_write_ref(
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
) -> torch.Tensor:
    """RMSNorm of each query and key head (where there are weights), rotary on both (where there are tables), keys and
    values into the cache.

    Args:
        qkv: [T, (H + 2 KV) * D], any float dtype; rows may lie apart.
        num_heads, num_kv_heads: H, KV; H may be 0.
        q_weight, k_weight: [D] both, or None both.
        eps: of the norm.
        cos_table, sin_table: [P, D], contiguous, as `rotary_ref` takes their rows; or None both, and positions too.
        positions: [T] int64, rows of the tables, also where nothing is written.
        k_cache, v_cache: [num_blocks, block_size, KV, D], contiguous, changed in place.
        slot_mapping: [T] int64, block id * block_size + offset, no slot twice; -1: this token's key and value are
            not written (padding of a CUDA graph).

    Returns:
        The queries, [T, H, D], a new tensor.
    """
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, k_cache.shape[-1]))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None:
        q, k = rms_norm_ref(q, q_weight, eps), rms_norm_ref(k, k_weight, eps)
    if cos_table is not None:
        cos, sin = cos_table[positions].unsqueeze(1), sin_table[positions].unsqueeze(1)
        q, k = rotary_ref(q, cos, sin), rotary_ref(k, cos, sin)
    written = slot_mapping >= 0
    if not written.all():
        k, v, slot_mapping = k[written], v[written], slot_mapping[written]
    write_kv_ref(k, v, k_cache, v_cache, slot_mapping)
    return q


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
) -> torch.Tensor:
    """`split_norm_rotate_write_ref`, by a kernel where there is one; the kernel rounds once, at the end."""
    kernel = twin("qkv") if qkv.is_cuda else None
    heads, norm = (num_heads, num_kv_heads), (q_weight, k_weight, eps)
    rest = (cos_table, sin_table, positions, k_cache, v_cache, slot_mapping)
    if kernel is None:
        return split_norm_rotate_write_ref(qkv, *heads, *norm, *rest)
    return kernel.split_norm_rotate_write(qkv, *heads, *norm, *rest, overlaps_launches(qkv.device))
