"""Attention over a cache that is handed in: one set of weights may own several caches."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.attention.base import KVCache
from nanovllm.context import get_context


class Attention(nn.Module):
    """Grouped-query attention of `num_heads` queries over `num_kv_heads` keys of size `head_dim`."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5

    def write(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache) -> None:
        """Store this step's keys and values, each [T, num_kv_heads, head_dim]."""
        context = get_context()
        context.backend.write(k, v, cache, context.attention)

    def forward(self, q: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Attend [T, num_heads, head_dim] queries over `cache`; returns [T, num_heads * head_dim]."""
        context = get_context()
        return context.backend.attend(q, cache, context.attention, self.scale).flatten(1)
