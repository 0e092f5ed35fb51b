"""Attention with the flash-attn package (arXiv 2307.08691), which reads the paged cache in place."""

from __future__ import annotations

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from nanovllm.attention.base import AttentionMetadata, KVCache


class FlashAttention:
    """flash-attn's varlen kernel for prefill and its KV-cache kernel for decode."""

    name = "flash"
    default_block_size = 256
    block_size_multiple = 256
    in_cuda_graph = True

    def prepare(self, metadata: AttentionMetadata, num_blocks: int, block_size: int) -> None:
        """Nothing: the kernels take the metadata as it is."""

    def attend(self, q: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        if metadata.is_decode:
            return flash_attn_with_kvcache(
                q.unsqueeze(1),
                cache.k,
                cache.v,
                cache_seqlens=metadata.context_lens,
                block_table=metadata.block_table,
                softmax_scale=scale,
                causal=True,
            ).squeeze(1)
        return flash_attn_varlen_func(
            q,
            cache.k,
            cache.v,
            cu_seqlens_q=metadata.cu_seqlens_q,
            cu_seqlens_k=metadata.cu_seqlens_k,
            max_seqlen_q=max(metadata.query_lens),
            max_seqlen_k=max(metadata.seq_lens),
            softmax_scale=scale,
            causal=True,
            block_table=metadata.block_table,
        )
