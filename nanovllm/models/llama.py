"""Llama 2 and 3, and Qwen2 / Qwen2.5, which is the same decoder with a bias on q, k and v alone."""

from __future__ import annotations

import torch

from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalDecoder, DecoderOptions


class LlamaForCausalLM(CausalDecoder):
    """The shared decoder with Llama's options."""

    def __init__(self, config: ModelConfig, max_positions: int, dtype: torch.dtype) -> None:
        options = DecoderOptions(qkv_bias=config.attention_bias, o_bias=config.attention_bias, mlp_bias=config.mlp_bias)
        super().__init__(config, options, max_positions, dtype)


class Qwen2ForCausalLM(CausalDecoder):
    """The shared decoder with Qwen2's options."""

    def __init__(self, config: ModelConfig, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, DecoderOptions(qkv_bias=True), max_positions, dtype)
