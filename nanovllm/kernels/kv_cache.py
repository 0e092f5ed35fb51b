"""Writing keys and values into their cache slots, and moving them between caches."""

from __future__ import annotations

import torch

from nanovllm.kernels.choice import twin


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


def move_kv_ref(
    source: tuple[torch.Tensor, torch.Tensor], target: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
) -> None:
    """Copy keys and values from slots of one cache to slots of another.

    Args:
        source, target: keys and values [num_blocks, block_size, KV, D] each, contiguous; the target changes in place.
        slots: [2, M] int64, from where and to where; no target twice. To -1: nothing is copied.
    """
    begin, end = slots[:, slots[1] >= 0]
    write_kv_ref(*(cache.flatten(0, 1)[begin] for cache in source), *target, end)


def move_kv(
    source: tuple[torch.Tensor, torch.Tensor], target: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
) -> None:
    """`move_kv_ref`, by a kernel where there is one."""
    kernel = twin("kv_cache") if slots.is_cuda else None
    if slots.shape[1]:
        (move_kv_ref if kernel is None else kernel.move_kv)(source, target, slots)
