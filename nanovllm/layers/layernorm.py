"""RMSNorm as a layer."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.distributed import Cut, Place, as_cut
from nanovllm.kernels.layernorm import add_rms_norm, rms_norm
from nanovllm.kernels.quantize import QuantizedActivation


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension of size `dim`."""

    def __init__(self, dim: int | Cut, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.channels = as_cut(dim)
        self.weight = nn.Parameter(torch.empty(self.channels.size), requires_grad=False)

    def place(self, param: torch.Tensor) -> Place:
        """Where the tensor of a checkpoint goes."""
        return Place(param, (self.channels,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., dim]; the input is left as it was."""
        return rms_norm(x, self.weight, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None, digits: int = 0
    ) -> tuple[torch.Tensor | QuantizedActivation, torch.Tensor]:
        """Normalise x + residual, and quantize that to `digits` if there are any; returns it and the sum, the next
        residual. None stands for no residual yet."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps, digits), x
        return add_rms_norm(x, residual, self.weight, self.eps, digits)
