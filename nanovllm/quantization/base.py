"""What a linear layer leaves to its method: which tensors it has, how a checkpoint fills them, how x is multiplied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from nanovllm.distributed import Place
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.linear import gated_linear, linear
from nanovllm.kernels.quant_linear import kernel_path
from nanovllm.kernels.quantize import QuantizedActivation
from nanovllm.quantization.layouts import Decoder, Layout
from nanovllm.quantization.quantizer import dequantize, quantize_weight

# Takes a checkpoint's tensor (its name is for messages) and puts it in its place.
Reader = Callable[[str, torch.Tensor], None]
Views = dict[str, torch.Tensor]
Places = dict[str, Place]


class LinearMethod:
    """How a Linear stores and multiplies its weights; this one in the model's dtype, others inherit. Each parameter has
    the output channels as its first dimension, so that projections packed into one matrix are rows of all of them.

    name: as in `EngineConfig.quantization`.
    """

    name: str | None = None

    def parameters(self, n: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Shape and dtype (None: the model's) of each parameter for n output and k input channels."""
        return {"weight": ((n, k), None)}

    def readers(self, places: Places) -> dict[str, Reader]:
        """By the last part of a tensor's name in the checkpoint: who puts it into `places`, one projection's rows."""
        return {"weight": copy_into(places["weight"])}

    def store(self, weight: torch.Tensor, places: Places) -> None:
        """Put a whole float weight [n, k] into its place."""
        places["weight"].fill(weight)

    def input_digits(self, layer: nn.Module, num_rows: int, dtype: torch.dtype) -> int:
        """How many int8 digits of each number `apply` wants of an input [num_rows, k] in `dtype`, a QuantizedActivation
        made by the kernel that produces it; 0 for the numbers themselves."""
        return 0

    def apply(self, layer: nn.Module, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        """x W^T + b with the parameters of `layer`, [M, k] to [M, n], summed over the ranks that share x."""
        return layer.sharers.all_reduce(linear(x, layer.weight, layer.added_bias))

    def apply_gated(
        self, layer: nn.Module, x: torch.Tensor | QuantizedActivation, digits: int
    ) -> torch.Tensor | QuantizedActivation:
        """silu of the first half of `apply`'s columns times the other half; quantized to `digits` if there are any."""
        if digits:
            return silu_and_mul(self.apply(layer, x), digits)
        return gated_linear(x, layer.weight, layer.bias)


class Int8Weights(LinearMethod):
    """int8 [n, k] weights, float32 [n] scales, one per output channel.

    Args:
        layout: how a checkpoint holds them; None for one with float weights, which are quantized as they are read.
    """

    scales: str  # name of the scales

    def __init__(self, layout: Layout | None = None) -> None:
        self.layout = layout

    def parameters(self, n: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """qweight, and the scales under the name that tells the methods apart."""
        return {"qweight": ((n, k), torch.int8), self.scales: ((n,), torch.float32)}

    def readers(self, places: Places) -> dict[str, Reader]:
        """From a quantized checkpoint in its layout, from any other by quantizing."""
        if self.layout is None:
            return {"weight": lambda name, tensor: self.store(check_shape(name, tensor, places["qweight"]), places)}
        decoders = self.layout.decoders(self.scales)
        return {kind: _decode(places[param], decode) for kind, (param, decode) in decoders.items()}

    def store(self, weight: torch.Tensor, places: Places) -> None:
        """Quantize a whole float weight [n, k] on the device of `places`, then take this rank's part: where it is cut
        makes no difference to a scale."""
        qweight, scales = quantize_weight(weight.to(places["qweight"].view.device))
        places["qweight"].fill(qweight)
        places[self.scales].fill(scales)

    def apply_gated(
        self, layer: nn.Module, x: torch.Tensor | QuantizedActivation, digits: int
    ) -> torch.Tensor | QuantizedActivation:
        """As the other, in two launches."""
        return silu_and_mul(self.apply(layer, x), digits)

    def dequantize(self, views: Views) -> torch.Tensor:
        """The float32 [n, k] weights that `views` stand for."""
        return dequantize(views["qweight"], views[self.scales])

    def kernel_path(self, device: torch.device) -> str:
        """Which kernels multiply there, in words."""
        return kernel_path(self.name, device)


UNQUANTIZED = LinearMethod()


def check_shape(name: str, tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """`tensor` itself.

    Raises:
        ValueError: its shape is not the one that `place` wants.
    """
    if tensor.shape != place.shape:
        raise ValueError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the model needs {tuple(place.shape)}")
    return tensor


def copy_into(place: Place) -> Reader:
    """A reader that copies; it raises ValueError where shapes differ, or one is of integers and the other is not."""
    return _decode(place, lambda tensor, shape: tensor)


def _decode(place: Place, decode: Decoder) -> Reader:
    def read(name: str, tensor: torch.Tensor) -> None:
        decoded = decode(tensor, place.shape)
        if decoded is None:
            return
        if check_shape(name, decoded, place).is_floating_point() != place.view.is_floating_point():
            raise ValueError(f"tensor {name!r} is of {tensor.dtype}, the model needs {place.view.dtype}")
        place.fill(decoded)

    return read
