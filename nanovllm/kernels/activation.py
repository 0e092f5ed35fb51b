"""SwiGLU's activation (arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul_ref(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for x = [gate | up] of shape [T, 2F]; returns [T, F]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
