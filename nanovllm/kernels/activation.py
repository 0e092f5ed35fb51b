"""SwiGLU's activation (arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.choice import overlaps_launches, twin
from nanovllm.kernels.quantize import QuantizedActivation, quantize_tokens_ref


def silu_and_mul_ref(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for x = [gate | up] of shape [T, 2F]; returns [T, F]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_and_mul(x: torch.Tensor, digits: int = 0) -> torch.Tensor | QuantizedActivation:
    """`silu_and_mul_ref`, by a kernel where there is one, which rounds once, at the end; with `digits` then
    `quantize_tokens`, in the same pass."""
    kernel = twin("activation") if x.is_cuda else None
    if kernel is None:
        return quantize_tokens_ref(silu_and_mul_ref(x), digits) if digits else silu_and_mul_ref(x)
    out = kernel.silu_and_mul(x, overlaps_launches(x.device), digits)
    return QuantizedActivation(*out, x.dtype) if digits else out
