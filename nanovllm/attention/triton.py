"""Attention with our own Triton kernels, which read the paged cache in place: no package beyond torch's own needs."""

from __future__ import annotations

import torch

from nanovllm.attention.base import AttentionMetadata, KVCache
from nanovllm.kernels.paged_attention import decode_attention, prefill_attention


class TritonAttention:
    """Flash-Decoding for decode, FlashAttention-2 for prefill.

    The default block is one key tile of the decode kernel, which then looks up one block id a tile and adds it to the
    address once instead of per key. Larger blocks gain nothing more and waste half a block a sequence; smaller ones
    share prefixes more finely and cost address arithmetic only.
    """

    name = "triton"
    default_block_size = 64
    block_size_multiple = 16
    in_cuda_graph = True

    def prepare(self, metadata: AttentionMetadata, num_blocks: int, block_size: int) -> None:
        """Longest context of the step; for a CUDA graph `seq_lens` holds the longest it may see."""
        metadata.scratch["max_seqlen_k"] = max(metadata.seq_lens)

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`; with `window` a query sees its last `window` keys, its own included."""
        table, lens = metadata.block_table, metadata.context_lens
        if metadata.is_decode:
            longest = metadata.scratch["max_seqlen_k"]
            return decode_attention(q, cache.k, cache.v, table, lens, longest, scale, window)
        return prefill_attention(q, cache.k, cache.v, table, metadata.cu_seqlens_q, lens, scale, window)
