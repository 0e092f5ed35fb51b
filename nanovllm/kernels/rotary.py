"""Rotary position embedding (arXiv 2104.09864), half-split convention as in Llama."""

from __future__ import annotations

import torch


def rotary_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) of each head by its token's angles.

    Args:
        x: [T, H, D].
        cos, sin: [T, 1, D], x's dtype; the second half repeats the first, with the sines of the first half negated.

    Returns:
        [T, H, D], a new tensor.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin)
