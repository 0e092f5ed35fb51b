"""W8A8: int8 weights and int8 activations, whose scales are found token by token at run time."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.kernels.quant_linear import w8a8_linear
from nanovllm.kernels.quantize import QuantizedActivation, quantize_tokens
from nanovllm.quantization.base import Int8Weights


class W8A8(Int8Weights):
    """The products are those of integers, so that prefill gains too."""

    name = "w8a8"
    scales = "w_scales"

    def input_digits(self, layer: nn.Module, num_rows: int, dtype: torch.dtype) -> int:
        """One; none where this rank sees a part of each token alone, whose scale is not known yet."""
        return 0 if layer.inputs.is_partial else 1

    def apply(self, layer: nn.Module, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        """x W^T + b in x's dtype; what comes from attention is quantized here, the rest by the kernel that made it.
        A token that ranks have parts of has one scale on all of them, so that it is rounded as on one."""
        if not isinstance(x, QuantizedActivation):
            x = quantize_tokens(x, group=layer.sharers)
        return w8a8_linear(x, layer.qweight, layer.w_scales, layer.bias, layer.sharers)
