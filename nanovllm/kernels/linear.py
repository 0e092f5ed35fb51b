"""y = x W^T + b. For a few rows the weights' bytes are all that counts, and cuBLAS leaves most of the bandwidth."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.activation import silu_and_mul, silu_and_mul_ref
from nanovllm.kernels.choice import overlaps_launches, twin
from nanovllm.kernels.layernorm import PendingNorm

# Elements of W up to which the kernel with matrix units was measured against cuBLAS, and rows.
_MATRIX_SIZE = 8 << 20
_MATRIX_ROWS = 64
# Rows up to which these kernels normalise x themselves. Each program does so for all of its rows, and keeps two tiles
# of them under way.
_NORM_ROWS = 16


def small_kernel(num_rows: int, n: int, k: int, overlaps: bool) -> str | None:
    """Which kernel measured faster than cuBLAS (docs/performance.md), "vector" or "matrix", or None.

    Without matrix units arithmetic shows from the second row on, except where cuBLAS leaves most multiprocessors
    without work. With them a kernel alone is hardly faster than cuBLAS's, but its start hides behind the one before.
    """
    if num_rows == 1 or (num_rows <= 4 and n <= 2048):
        return "vector"
    return "matrix" if overlaps and num_rows <= _MATRIX_ROWS and n * k <= _MATRIX_SIZE else None


def linear_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[M, K] times [N, K] transposed, plus [N]; returns [M, N], in `out` if given (only without a bias). Accumulates
    in float32 or wider."""
    return F.linear(x, weight, bias) if out is None else torch.mm(x, weight.T, out=out)


def gated_linear_ref(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`silu_and_mul_ref` of `linear_ref`: [M, K] and [2 N, K] to [M, N]."""
    return silu_and_mul_ref(linear_ref(x, weight, bias))


def takes_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` and `gated_linear` take a PendingNorm of x [M, K]: where a kernel for few rows reads it."""
    return len(x) <= _NORM_ROWS and _small_kernel_for(x, weight) is not None


def linear(
    x: torch.Tensor | PendingNorm, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear_ref`, for few rows of 16-bit numbers on a GPU by a kernel that streams W once, and that computes a
    PendingNorm itself: products with x and the sum of its squares are summed up side by side, and the norm's factor
    comes last. `out` may have rows that lie apart.

    Bytes: 2 N K for the weights; x and y stay in L2.
    """
    kind = _small_kernel_for(x, weight)
    return linear_ref(x, weight, bias, out) if kind is None else _small_linear(x, weight, bias, out, kind, gated=False)


def gated_linear(x: torch.Tensor | PendingNorm, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`gated_linear_ref`, for few rows in one launch that rounds once, at the end; x as in `linear`."""
    kind = _small_kernel_for(x, weight)
    if kind is None:
        return silu_and_mul(linear_ref(x, weight, bias))
    return _small_linear(x, weight, bias, None, kind, gated=True)


def _small_kernel_for(x: torch.Tensor | PendingNorm, weight: torch.Tensor) -> str | None:
    """As `small_kernel`; None on a CPU and for 32-bit numbers too."""
    source = x.x if isinstance(x, PendingNorm) else x
    if not source.is_cuda or source.element_size() != 2 or not source.is_contiguous() or twin("linear") is None:
        return None
    return small_kernel(len(source), *weight.shape, overlaps_launches(source.device))


def _small_linear(
    x: torch.Tensor | PendingNorm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    kind: str,
    gated: bool,
) -> torch.Tensor:
    overlaps = overlaps_launches(weight.device)
    norm = (None, x, None, 0.0)
    if isinstance(x, PendingNorm):
        x, *norm = x
    return twin("linear").small_linear(x, norm, weight, bias, out, gated, kind == "vector", overlaps)
