"""What every attention backend is given and must do. Writing KV is apart from attending (`kernels/qkv.py`), so that
one layer can write what many layers read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch


class KVCache(NamedTuple):
    """Keys and values of one attention cache: each [num_blocks + 1, block_size, KV, D].

    The last block is never written: it stays zero, so that padding may read it. (A masked score does not hide
    a NaN: 0 x NaN is NaN.)
    """

    k: torch.Tensor
    v: torch.Tensor


@dataclass(slots=True)
class AttentionMetadata:
    """Which tokens of a step belong together and where their KV lies. S sequences, T tokens.

    slot_mapping: [T] int64, where each token's KV is written.
    block_table: [S, max_blocks] int32, block ids of each sequence.
    cu_seqlens_q, cu_seqlens_k: [S + 1] int32, running sums of query and key lengths; None for decode.
    context_lens: [S] int32, key lengths.
    query_lens, seq_lens: the same lengths on the host, so that nothing waits for the device to tell a size.
    is_decode: every sequence has exactly one query token.
    scratch: what a backend derived in `prepare`, for all layers of the step.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    context_lens: torch.Tensor
    query_lens: list[int]
    seq_lens: list[int]
    is_decode: bool
    scratch: dict[str, Any] = field(default_factory=dict)


class AttentionBackend(Protocol):
    """One way to attend over a paged cache.

    default_block_size: KV block size it works best with.
    block_size_multiple: block sizes it takes are multiples of this.
    in_cuda_graph: whether its decode waits for nothing on the host, so that a CUDA graph can hold it.
    """

    name: str
    default_block_size: int
    block_size_multiple: int
    in_cuda_graph: bool

    def prepare(self, metadata: AttentionMetadata, num_blocks: int, block_size: int) -> None:
        """Derive once per step what all its layers need."""

    def attend(self, q: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float) -> torch.Tensor:
        """Causal attention of [T, H, D] queries over their sequences' cached keys; returns [T, H, D]."""
