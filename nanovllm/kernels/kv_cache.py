"""Writing keys and values into their cache slots."""

from __future__ import annotations

import torch


def write_kv_ref(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store token t's key and value at slot_mapping[t].

    Args:
        k, v: [T, KV, D].
        k_cache, v_cache: [num_blocks, block_size, KV, D], changed in place.
        slot_mapping: [T] int64, block id * block_size + offset; no slot twice.
    """
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)
