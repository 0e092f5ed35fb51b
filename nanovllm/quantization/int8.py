"""W8A16: int8 weights, activations of 16 bits."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.kernels.quant_linear import int8_linear, int8_linear_digits
from nanovllm.kernels.quantize import QuantizedActivation
from nanovllm.quantization.base import Int8Weights


class Int8(Int8Weights):
    """Half the bytes of 16-bit weights. Where rows are few, a GPU takes activations as two int8 digits, which hold
    more than bfloat16 does, and multiplies integers; elsewhere the products are those of floats."""

    name = "int8"
    scales = "scales"

    def input_digits(self, layer: nn.Module, num_rows: int, dtype: torch.dtype) -> int:
        """Two or none, as the product's kernel wants."""
        return int8_linear_digits(num_rows, dtype, layer.qweight)

    def apply(self, layer: nn.Module, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        """x W^T + b in x's dtype, over all ranks."""
        return layer.sharers.all_reduce(int8_linear(x, layer.qweight, layer.scales, layer.added_bias))
