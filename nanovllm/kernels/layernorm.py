"""RMSNorm (arXiv 1910.07467), alone or after a residual add."""

from __future__ import annotations

import torch

from nanovllm.kernels.choice import overlaps_launches, twin
from nanovllm.kernels.quantize import QuantizedActivation, quantize_tokens_ref


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, computed in float32; `x` is left as it was.

    Args:
        x: [..., D], any float dtype.
        weight: [D].
        eps: added to the mean square.

    Returns:
        [..., D] in x's dtype.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm_ref(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x + residual, and the sum itself as the next residual; shapes as in `rms_norm_ref`."""
    residual = x + residual
    return rms_norm_ref(residual, weight, eps), residual


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, digits: int = 0) -> torch.Tensor | QuantizedActivation:
    """`rms_norm_ref`, by a kernel where there is one; with `digits` then `quantize_tokens`, in the same pass."""
    kernel = twin("layernorm") if x.is_cuda else None
    if kernel is None:
        normed = rms_norm_ref(x, weight, eps)
        return quantize_tokens_ref(normed, digits) if digits else normed
    normed = kernel.rms_norm(x, weight, eps, overlaps_launches(x.device), digits)
    return QuantizedActivation(*normed, x.dtype) if digits else normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, digits: int = 0
) -> tuple[torch.Tensor | QuantizedActivation, torch.Tensor]:
    """`add_rms_norm_ref`, likewise; both inputs are left as they were."""
    kernel = twin("layernorm") if x.is_cuda else None
    if kernel is None:
        normed, total = add_rms_norm_ref(x, residual, weight, eps)
        return (quantize_tokens_ref(normed, digits) if digits else normed), total
    normed, total = kernel.add_rms_norm(x, residual, weight, eps, overlaps_launches(x.device), digits)
    return (QuantizedActivation(*normed, x.dtype) if digits else normed), total
