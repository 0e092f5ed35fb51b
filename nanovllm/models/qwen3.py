"""Qwen3, dense: RMSNorm on each head's query and key; a bias on attention's projections only where stated."""

from __future__ import annotations

import torch

from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalDecoder, DecoderOptions


class Qwen3ForCausalLM(CausalDecoder):
    """The shared decoder with Qwen3's options."""

    def __init__(self, config: ModelConfig, max_positions: int, dtype: torch.dtype) -> None:
        options = DecoderOptions(qk_norm=True, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
        super().__init__(config, options, max_positions, dtype)
