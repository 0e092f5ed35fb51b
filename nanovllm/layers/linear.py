"""Linear layers, several projections of one input packed into one matrix."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm import distributed
from nanovllm.distributed import ALONE, Cut, Place, as_cut
from nanovllm.kernels.quantize import QuantizedActivation
from nanovllm.quantization.base import UNQUANTIZED, LinearMethod


class Linear(nn.Module):
    """y = x W^T + b for one or more projections stacked in W's rows; a method holds and multiplies W.

    Over several ranks (arXiv 1909.08053) parts that are cut give each rank its columns of y; an input that is cut is
    this rank's columns of x, and the ranks' products are summed.

    Args:
        in_features: size of the input.
        parts: rows of each projection by its checkpoint name, in order, such as {"q_proj": 64, "k_proj": 32}.
        bias: whether all parts have a bias.
    """

    def __init__(self, in_features: int | Cut, parts: dict[str, int | Cut], bias: bool = False) -> None:
        super().__init__()
        self.inputs = as_cut(in_features)
        # The ranks that each hold some columns of x.
        self.sharers = distributed.current() if self.inputs.is_partial else ALONE
        self.parts = {name: as_cut(rows) for name, rows in parts.items()}
        self.in_features = self.inputs.size
        self.out_features = sum(rows.size for rows in self.parts.values())
        self.use(UNQUANTIZED)
        self.bias = nn.Parameter(torch.empty(self.out_features), requires_grad=False) if bias else None

    def use(self, method: LinearMethod) -> None:
        """Make the parameters anew as `method` wants them, uninitialised; the bias stays."""
        for name in [name for name in self._parameters if name != "bias"]:
            delattr(self, name)
        self.method = method
        for name, (shape, dtype) in method.parameters(self.out_features, self.in_features).items():
            setattr(self, name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))

    @property
    def fixed_dtypes(self) -> dict[str, torch.dtype]:
        """Of the parameters that do not follow the model's dtype."""
        return {
            name: dtype
            for name, (_, dtype) in self.method.parameters(self.out_features, self.in_features).items()
            if dtype is not None
        }

    def input_digits(self, x: torch.Tensor | QuantizedActivation) -> int:
        """To how many int8 digits the kernel that makes the input had better quantize it, 0 for none; `x` has the
        input's dtype and number of rows."""
        return self.method.input_digits(self, x.shape[0], x.dtype)

    @property
    def added_bias(self) -> nn.Parameter | None:
        """The bias, or None where another rank adds it."""
        return None if self.sharers.rank else self.bias

    def part(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """The rows of `param` (one of the parameters) that belong to projection `name`, as a view."""
        start = 0
        for part, rows in self.parts.items():
            if part == name:
                return param[start : start + rows.size]
            start += rows.size
        raise KeyError(name)

    def places(self, name: str) -> dict[str, Place]:
        """Where the tensors of projection `name` go, by the parameter they are of."""
        cuts = self.parts[name], self.inputs
        params = self.named_parameters(recurse=False)
        return {kind: Place(self.part(param, name), cuts[: param.dim()]) for kind, param in params}

    def forward(self, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        """[..., in_features] to [..., sum of parts]."""
        return self.method.apply(self, x)


class GatedLinear(Linear):
    """Two projections [gate | up] of one input, and SwiGLU's activation of them (arXiv 2002.05202)."""

    def forward(self, x: torch.Tensor | QuantizedActivation, digits: int = 0) -> torch.Tensor | QuantizedActivation:
        """silu(gate) * up, [T, in_features] to [T, half of the parts]; quantized to `digits` if there are any."""
        return self.method.apply_gated(self, x, digits)
