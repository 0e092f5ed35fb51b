"""Linear layers, several projections of one input packed into one matrix."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.kernels.linear import gated_linear, linear


class Linear(nn.Module):
    """y = x W^T + b for one or more projections stacked in W's rows.

    Args:
        in_features: size of the input.
        parts: rows of each projection by its checkpoint name, in order, such as {"q_proj": 64, "k_proj": 32}.
        bias: whether all parts have a bias.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        out_features = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def part(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """The rows of `param` (the weight or the bias) that belong to projection `name`, as a view."""
        start = 0
        for part, rows in self.parts.items():
            if part == name:
                return param[start : start + rows]
            start += rows
        raise KeyError(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., sum of parts]."""
        return linear(x, self.weight, self.bias)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """For parts [gate | up]: silu(gate) * up, [T, in_features] to [T, half of the parts]."""
        return gated_linear(x, self.weight, self.bias)
