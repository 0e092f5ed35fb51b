"""RMSNorm as a layer."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.kernels.layernorm import PendingNorm, add_rms_norm, rms_norm
from nanovllm.kernels.quantize import QuantizedActivation
from nanovllm.layers.linear import Linear


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension of size `dim`."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., dim]; the input is left as it was."""
        return rms_norm(x, self.weight, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None, reader: Linear | None = None
    ) -> tuple[torch.Tensor | QuantizedActivation | PendingNorm, torch.Tensor]:
        """Normalise x + residual, in the form that `reader` takes if there is one; returns it and the sum, the next
        residual, which is there when `reader` has read. None stands for no residual yet."""
        if reader is not None and reader.takes_norm(x):
            total = x if residual is None else torch.empty_like(x)
            return PendingNorm(x, residual, total, self.weight, self.eps), total
        digits = 0 if reader is None else reader.input_digits(x)
        if residual is None:
            return rms_norm(x, self.weight, self.eps, digits), x
        return add_rms_norm(x, residual, self.weight, self.eps, digits)
