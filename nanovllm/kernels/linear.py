"""y = x W^T + b. For a few rows the weights' bytes are all that counts, and cuBLAS leaves most of the bandwidth."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.activation import silu_and_mul, silu_and_mul_ref
from nanovllm.kernels.choice import overlaps_launches, twin

# Elements of W up to which the kernel with matrix units was measured against cuBLAS, and rows.
_MATRIX_SIZE = 8 << 20
_MATRIX_ROWS = 64


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


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear_ref`, for few rows of 16-bit numbers on a GPU by a kernel that streams W once. Rows of `out` may lie
    apart.

    Bytes: 2 N K for the weights; x and y stay in L2.
    """
    result = _small_linear(x, weight, bias, out, gated=False)
    return linear_ref(x, weight, bias, out) if result is None else result


def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`gated_linear_ref`, for few rows in one launch that rounds once, at the end."""
    result = _small_linear(x, weight, bias, None, gated=True)
    return silu_and_mul(linear_ref(x, weight, bias)) if result is None else result


def _small_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None, gated: bool
) -> torch.Tensor | None:
    """By a kernel, or None where cuBLAS does as well."""
    if not x.is_cuda or x.element_size() != 2 or not x.is_contiguous() or twin("linear") is None:
        return None
    overlaps = overlaps_launches(x.device)
    kind = small_kernel(len(x), *weight.shape, overlaps)
    if kind is None:
        return None
    return twin("linear").small_linear(x, weight, bias, out, gated, kind == "vector", overlaps)
