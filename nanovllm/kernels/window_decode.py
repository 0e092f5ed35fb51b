"""All that a sliding-window layer does with one token of each row between its projections, as one operation: norm,
rotary, remembering in a ring, attention. Letters as in paged_attention.py, with R rows and rings of n slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.choice import overlaps_launches, twin
from nanovllm.kernels.layernorm import rms_norm_ref
from nanovllm.kernels.rotary import rotary_ref


def window_decode_ref(
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
) -> torch.Tensor:
    """RMSNorm of queries and keys (where there are weights), rotary on both, the new key and value into the row's ring,
    and softmax over the last keys there; nothing waits for the device.

    Args:
        qkv: [R, (H + 2 KV) * D], any float dtype; rows may lie apart.
        q_weight, k_weight: [D] both, or None both.
        eps: of the norm.
        cos_table, sin_table: [P, D], contiguous, as `rotary_ref` takes their rows.
        positions: [R] int64, of the new tokens.
        k_ring, v_ring: [rows, n, KV, D], contiguous, changed in place: slot p % n holds position p. Slots that no
            query sees may hold anything, NaN too.
        rows: [R] int64, whose rings; a row that belongs to nobody may be there any number of times, and its results
            are then of no use.
        window: W <= n, keys that a query sees, its own included.

    Returns:
        [R, H, D].
    """
    size, kv_heads, dim = k_ring.shape[1:]
    heads = qkv.unflatten(-1, (-1, dim))
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if q_weight is not None:
        q, k = rms_norm_ref(q, q_weight, eps), rms_norm_ref(k, k_weight, eps)
    cos, sin = cos_table[positions].unsqueeze(1), sin_table[positions].unsqueeze(1)
    slots = positions % size
    k_ring[rows, slots], v_ring[rows, slots] = rotary_ref(k, cos, sin), v
    age = (slots[:, None] - torch.arange(size, device=qkv.device)) % size  # [R, n]
    seen = (age < window) & (age <= positions[:, None])
    # Zeros for what is not seen: 0 * NaN is NaN, so a probability of 0 does not hide what lies there.
    hidden = ~seen[:, :, None, None]
    k, v = (ring.index_select(0, rows).masked_fill_(hidden, 0).transpose(1, 2).float() for ring in (k_ring, v_ring))
    q = rotary_ref(q, cos, sin).float().unflatten(1, (kv_heads, -1))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None], scale=dim**-0.5)
    return out.flatten(1, 2).to(qkv.dtype)


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
) -> torch.Tensor:
    """`window_decode_ref`, by one kernel where there is one. That begins before the launch ahead of it has ended and
    then waits for qkv alone: rings, rows and positions have to be older than what that launch writes."""
    kernel = twin("window_decode") if qkv.is_cuda else None
    rest = (eps, cos_table, sin_table, positions, k_ring, v_ring, rows, window)
    if kernel is None:
        return window_decode_ref(qkv, q_weight, k_weight, *rest)
    return kernel.window_decode(qkv, q_weight, k_weight, *rest, overlaps_launches(qkv.device))
