"""Attention over a cache that is handed in: one set of weights may own several caches."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.attention.base import KVCache
from nanovllm.context import get_context
from nanovllm.kernels.qkv import split_norm_rotate_write
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import Rotary


class Attention(nn.Module):
    """Grouped-query attention of `num_heads` queries over `num_kv_heads` keys of size `head_dim`."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5

    def write(
        self, qkv: torch.Tensor, q_norm: RMSNorm | None, k_norm: RMSNorm | None, rotary: Rotary, cache: KVCache
    ) -> torch.Tensor:
        """Store this step's keys and values; queries and keys are normalised (if there are norms) and rotated.

        Args:
            qkv: [T, (num_heads + 2 num_kv_heads) * head_dim].

        Returns:
            the queries, [T, num_heads, head_dim].
        """
        return split_norm_rotate_write(
            qkv,
            self.num_heads,
            self.num_kv_heads,
            q_norm.weight if q_norm is not None else None,
            k_norm.weight if k_norm is not None else None,
            q_norm.eps if q_norm is not None else 0.0,
            *rotary,
            cache.k,
            cache.v,
            get_context().attention.slot_mapping,
        )

    def forward(self, q: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Attend [T, num_heads, head_dim] queries over `cache`; returns [T, num_heads * head_dim]."""
        context = get_context()
        return context.backend.attend(q, cache, context.attention, self.scale).flatten(1)
