"""Activation of the MLP."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.kernels.activation import silu_and_mul


class SiluAndMul(nn.Module):
    """[T, 2F] = [gate | up] to silu(gate) * up, [T, F]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        return silu_and_mul(x)
