"""y = x W^T + b. For a few rows the weights' bytes are all that counts, and cuBLAS leaves most of the bandwidth."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.choice import overlaps_launches, twin


def takes_small_kernel(num_rows: int, n: int) -> bool:
    """Where the kernel measured faster than cuBLAS (docs/performance.md): it has no matrix units, so its arithmetic
    shows from the second row on, except where cuBLAS leaves most multiprocessors without work."""
    return num_rows == 1 or (num_rows <= 4 and n <= 2048)


def linear_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[M, K] times [N, K] transposed, plus [N]; returns [M, N], in `out` if given (only without a bias). Accumulates
    in float32 or wider."""
    return F.linear(x, weight, bias) if out is None else torch.mm(x, weight.T, out=out)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear_ref`, for very few rows of 16-bit numbers on a GPU by a kernel that streams W once.

    Bytes: 2 N K for the weights; x and y stay in L2.
    """
    if x.is_cuda and takes_small_kernel(x.shape[0], weight.shape[0]) and x.element_size() == 2 and x.is_contiguous():
        kernel = twin("linear")
        if kernel is not None:
            return kernel.small_linear(x, weight, bias, out, overlaps_launches(x.device))
    return linear_ref(x, weight, bias, out)
