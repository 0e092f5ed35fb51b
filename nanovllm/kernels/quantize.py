"""Activations to int8, token by token, with scales found on the spot."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.distributed import ALONE, Group
from nanovllm.kernels.choice import overlaps_launches, twin


class QuantizedActivation(NamedTuple):
    """A batch of activations x [T, K] quantized token by token: x is about values * scales[:, None], or with two digits
    (values[:, 0] + values[:, 1] / 254) * scales[:, None].

    values: int8 [T, K], or [T, 2, K].
    scales: float32 [T].
    dtype: of the activation it stands for, and of the product computed from it.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of x."""
        return (*self.scales.shape, self.values.shape[-1])


def quantize_tokens_ref(x: torch.Tensor, digits: int = 1, group: Group = ALONE) -> QuantizedActivation:
    """Symmetric int8 for each row: scale = largest magnitude / 127 in float32, rounded half to even. A second digit
    holds what the first leaves over, in steps of 1/254 of the scale: the error is then 1/65000 of the row's largest
    number, where bfloat16's is 1/512 of each.

    Args:
        x: [T, K], any float dtype.
        digits: 1 or 2.
        group: ranks that each have some columns of the same rows.

    Returns:
        Values within +-127. A row of zeros gives zeros and the scale 1; a row with a NaN or an infinity has a NaN as
        its scale, so that the product shows it.
    """
    wide = x.float()
    largest = wide.abs().amax(-1) if wide.numel() else wide.new_zeros(wide.shape[:-1])
    if group.size > 1:  # as an infinity a NaN is the largest too
        largest = group.all_reduce(largest.nan_to_num(nan=torch.inf, posinf=torch.inf), largest=True)
    # By a tensor: on a GPU torch divides by a number by multiplying with its rounded inverse.
    scales = (largest / torch.full_like(largest, 127.0)).clamp(min=torch.finfo(torch.float32).tiny)
    scales = torch.where(largest == 0, 1.0, torch.where(largest.isfinite(), scales, torch.nan))
    steps = (wide * (1 / scales)[..., None]).clamp(-127, 127).nan_to_num(0)
    values = steps.round()
    if digits == 2:
        values = torch.stack((values, ((steps - values) * 254).round()), -2)
    return QuantizedActivation(values.to(torch.int8), scales, x.dtype)


def quantize_tokens(x: torch.Tensor, digits: int = 1, group: Group = ALONE) -> QuantizedActivation:
    """`quantize_tokens_ref`, by a kernel where there is one, which sees one rank's columns only."""
    kernel = twin("quantize") if x.is_cuda and group.size == 1 else None
    if kernel is None:
        return quantize_tokens_ref(x, digits, group)
    return QuantizedActivation(*kernel.quantize_tokens(x, digits, overlaps_launches(x.device)), x.dtype)
