"""SwiGLU's activation (arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.choice import overlaps_launches, twin


def silu_and_mul_ref(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for x = [gate | up] of shape [T, 2F]; returns [T, F]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul_ref`, by a kernel where there is one; the kernel rounds once, at the end."""
    kernel = twin("activation") if x.is_cuda else None
    return silu_and_mul_ref(x) if kernel is None else kernel.silu_and_mul(x, overlaps_launches(x.device))
