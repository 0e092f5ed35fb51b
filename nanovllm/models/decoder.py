"""The pre-norm decoder that Qwen3, Llama and Qwen2 share; a family says which of its options it uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nanovllm import distributed
from nanovllm.attention.base import KVCache
from nanovllm.cache_spec import PagedKVSpec
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import Embedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import GatedLinear, Linear
from nanovllm.layers.rotary_embedding import Rotary, RotaryEmbedding
from nanovllm.models.config import ModelConfig


@dataclass(frozen=True)
class DecoderOptions:
    """qk_norm: RMSNorm on each head's query and key; the others: which projections have a bias."""

    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False


class SelfAttention(nn.Module):
    """q, k, v projections, norm (if any) and rotary on q and k, attention, output projection."""

    def __init__(self, config: ModelConfig, options: DecoderOptions) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        q, kv = (distributed.current().cut((count * dim, count)) for count in (heads, kv_heads))
        self.qkv_proj = Linear(config.hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, options.qkv_bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if options.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if options.qk_norm else None
        self.attn = Attention(q.size // dim, kv.size // dim, dim)
        self.o_proj = Linear(q, {"o_proj": config.hidden_size}, options.o_bias)

    def forward(self, x: torch.Tensor, rotary: Rotary, cache: KVCache) -> torch.Tensor:
        q = self.attn.write(self.qkv_proj(x), self.q_norm, self.k_norm, rotary, cache)
        return self.o_proj(self.attn(q, cache))


class SwiGLU(nn.Module):
    """Gated MLP (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, options: DecoderOptions) -> None:
        super().__init__()
        size = distributed.current().cut((config.intermediate_size, config.intermediate_size))
        self.gate_up_proj = GatedLinear(config.hidden_size, {"gate_proj": size, "up_proj": size}, options.mlp_bias)
        self.down_proj = Linear(size, {"down_proj": config.hidden_size}, options.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(x, self.down_proj.input_digits(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm; the residual travels beside, so that each add meets its norm."""

    def __init__(self, config: ModelConfig, options: DecoderOptions) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, options)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config, options)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotary: Rotary,
        cache: KVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm.add(x, residual, self.self_attn.qkv_proj.input_digits(x))
        x = self.self_attn(x, rotary, cache)
        x, residual = self.post_attention_layernorm.add(x, residual, self.mlp.gate_up_proj.input_digits(x))
        return self.mlp(x), residual


class DecoderModel(nn.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(self, config: ModelConfig, options: DecoderOptions, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, options) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.head_dim, max_positions, config.rope, dtype)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, caches: list[KVCache]) -> torch.Tensor:
        x, residual = self.embed_tokens(token_ids), None
        rotary = self.rotary.at(positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, rotary, cache)
        return self.norm.add(x, residual)[0]


class CausalDecoder(nn.Module):
    """Hidden states by `forward`, logits by `compute_logits`, so that only wanted rows meet the head."""

    def __init__(self, config: ModelConfig, options: DecoderOptions, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderModel(config, options, max_positions, dtype)
        self.lm_head = None if config.tie_word_embeddings else Embedding(config.vocab_size, config.hidden_size)

    @property
    def unneeded_tensors(self) -> frozenset[str]:
        """A copy of the head that some checkpoints with tied embeddings carry."""
        return frozenset(["lm_head.weight"] if self.lm_head is None else [])

    @property
    def input_producers(self) -> dict[str, str]:
        """For each linear layer whose input has a factor per channel in front of it that can be changed, and the
        layer's columns with it: the checkpoint's name of the norm, or of the projection whose rows they are."""
        producers = {}
        for i in range(self.config.num_hidden_layers):
            layer = f"model.layers.{i}"
            producers[f"{layer}.self_attn.qkv_proj"] = f"{layer}.input_layernorm"
            producers[f"{layer}.mlp.gate_up_proj"] = f"{layer}.post_attention_layernorm"
            producers[f"{layer}.mlp.down_proj"] = f"{layer}.mlp.up_proj"
        return producers

    def cache_specs(self, dtype_size: int) -> list[PagedKVSpec]:
        """One KV cache per layer, in the order in which `forward` takes them."""
        layers = [layer.self_attn.attn for layer in self.model.layers]
        return [PagedKVSpec(attn.num_kv_heads, attn.head_dim, dtype_size) for attn in layers]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, caches: list[KVCache]) -> torch.Tensor:
        """[T] token ids and positions to [T, hidden_size]."""
        return self.model(token_ids, positions, caches)

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[R, hidden_size] to [R, vocab_size], in `out` if given."""
        return (self.lm_head or self.model.embed_tokens).logits(hidden, out)
