"""W8A16: int8 weights, activations as they are."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.kernels.quant_linear import int8_linear
from nanovllm.quantization.base import Int8Weights


class Int8(Int8Weights):
    """Half the bytes of 16-bit weights; the products are those of floats."""

    name = "int8"
    scales = "scales"
    quantizes_input = False

    def apply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b in x's dtype, over all ranks."""
        return layer.sharers.all_reduce(int8_linear(x, layer.qweight, layer.scales, layer.added_bias))
