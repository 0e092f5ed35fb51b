"""How int8 weights lie in a checkpoint: our own layout, and the two of compressed-tensors that vLLM loads."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

# From a checkpoint's tensor and the shape of what it is meant for to what that becomes; None if it holds nothing.
Decoder = Callable[[torch.Tensor, torch.Size], torch.Tensor | None]


class Layout:
    """Our own: `qweight` int8 [n, k], and the scales float32 [n] under the method's name for them."""

    name = "nanovllm"

    def encode(self, qweight: torch.Tensor, scales: torch.Tensor, scales_name: str) -> dict[str, torch.Tensor]:
        """A layer's tensors by the last part of their names."""
        return {"qweight": qweight, scales_name: scales}

    def decoders(self, scales_name: str) -> dict[str, tuple[str, Decoder]]:
        """By the last part of a stored tensor's name: the parameter it belongs to, and how to decode it."""
        return {"qweight": ("qweight", _same), scales_name: (scales_name, _same)}


class IntQuantized(Layout):
    """`weight` int8 [n, k], `weight_scale` [n, 1]."""

    name = "int-quantized"

    def encode(self, qweight: torch.Tensor, scales: torch.Tensor, scales_name: str) -> dict[str, torch.Tensor]:
        """As in `Layout`."""
        return {"weight": qweight, "weight_scale": scales[:, None]}

    def decoders(self, scales_name: str) -> dict[str, tuple[str, Decoder]]:
        """As in `Layout`."""
        return {"weight": ("qweight", _same), "weight_scale": (scales_name, _column)}


class PackQuantized(Layout):
    """`weight_packed` int32 [n, ceil(k / 4)]: four weights + 128 as the bytes of a word, the first one lowest;
    `weight_scale` [n, 1]; `weight_shape` int64 [2] = (n, k)."""

    name = "pack-quantized"

    def encode(self, qweight: torch.Tensor, scales: torch.Tensor, scales_name: str) -> dict[str, torch.Tensor]:
        """As in `Layout`."""
        shifted = F.pad(qweight, (0, -qweight.shape[1] % 4)).view(torch.uint8) ^ 128
        shape = torch.tensor(qweight.shape, dtype=torch.int64)
        return {"weight_packed": shifted.view(torch.int32), "weight_scale": scales[:, None], "weight_shape": shape}

    def decoders(self, scales_name: str) -> dict[str, tuple[str, Decoder]]:
        """As in `Layout`; the shape is checked and adds nothing."""
        return {
            "weight_packed": ("qweight", _unpack),
            "weight_scale": (scales_name, _column),
            "weight_shape": ("qweight", _check_shape),
        }


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (Layout(), IntQuantized(), PackQuantized())}


def _same(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return tensor


def _column(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """[n, 1] to [n]; another shape is left for the reader to refuse."""
    return tensor.squeeze(1) if tensor.dim() == 2 else tensor


def _unpack(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if tensor.dtype != torch.int32:
        raise ValueError(f"a weight_packed tensor is of {tensor.dtype}; pack-quantized needs torch.int32")
    unpacked = (tensor.contiguous().view(torch.uint8) ^ 128).view(torch.int8)
    k = shape[1]
    return unpacked[:, :k] if tensor.shape[1] == -(-k // 4) else unpacked


def _check_shape(tensor: torch.Tensor, shape: torch.Size) -> None:
    if tensor.tolist() != list(shape):
        raise ValueError(f"a weight_shape is {tensor.tolist()}, the model needs {list(shape)}")
