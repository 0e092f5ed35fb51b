"""Activations to int8, token by token, with scales found on the spot."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels.choice import overlaps_launches, twin


class QuantizedActivation(NamedTuple):
    """A batch of activations quantized token by token: x is about values * scales[:, None].

    values: int8 [T, K].
    scales: float32 [T].
    dtype: of the activation it stands for, and of the product computed from it.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype


def quantize_tokens_ref(x: torch.Tensor) -> QuantizedActivation:
    """Symmetric int8 for each row: scale = largest magnitude / 127 in float32, rounded half to even.

    Args:
        x: [T, K], any float dtype.

    Returns:
        Values within +-127. A row of zeros gives zeros and the scale 1; a row with a NaN or an infinity has a NaN as
        its scale, so that the product shows it.
    """
    wide = x.float()
    largest = wide.abs().amax(-1) if wide.numel() else wide.new_zeros(wide.shape[:-1])
    # By a tensor: on a GPU torch divides by a number by multiplying with its rounded inverse.
    scales = (largest / torch.full_like(largest, 127.0)).clamp(min=torch.finfo(torch.float32).tiny)
    scales = torch.where(largest == 0, 1.0, torch.where(largest.isfinite(), scales, torch.nan))
    values = (wide * (1 / scales)[..., None]).round().clamp(-127, 127).nan_to_num(0)
    return QuantizedActivation(values.to(torch.int8), scales, x.dtype)


def quantize_tokens(x: torch.Tensor) -> QuantizedActivation:
    """`quantize_tokens_ref`, by a kernel where there is one."""
    kernel = twin("quantize") if x.is_cuda else None
    if kernel is None:
        return quantize_tokens_ref(x)
    return QuantizedActivation(*kernel.quantize_tokens(x, overlaps_launches(x.device)), x.dtype)
