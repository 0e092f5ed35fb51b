"""A matrix of weights times a few rows, at memory bandwidth."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def _small_linear_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    num_rows,
    N,
    K,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program computes BLOCK_N columns of y for all rows.

    Products are kept per (row, column, k lane) and summed over k once at the end: a reduction per tile would wait
    on shared memory more often than on the weights.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK_K)
    acc = tl.zeros((ROWS, BLOCK_N, BLOCK_K), dtype=tl.float32)
    w_rows = w_ptr + n.to(tl.int64)[:, None] * K
    # The weights do not depend on the kernel before: their first tile is on its way while that one ends.
    mask = (n[:, None] < N) & (lanes[None, :] < K)
    w = tl.load(w_rows + lanes[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(0, K, BLOCK_K):
        k = start + lanes
        if start > 0:
            mask = (n[:, None] < N) & (k[None, :] < K)
            w = tl.load(w_rows + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        live = (rows[:, None] < num_rows) & (k[None, :] < K)
        x = tl.load(x_ptr + rows[:, None] * K + k[None, :], mask=live, other=0.0)
        acc += w.to(tl.float32)[None, :, :] * x.to(tl.float32)[:, None, :]
    y = tl.sum(acc, axis=2)
    if HAS_BIAS:
        y += tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out = y_ptr + rows[:, None] * N + n[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=(rows[:, None] < num_rows) & (n[None, :] < N))


def small_linear_config(num_rows: int, n: int, k: int) -> dict[str, int]:
    """Tile and warps, as measured on an H200. A small W needs few columns per program, so that every multiprocessor
    gets one, and long rows in flight; a large W has programs enough and gains from sharing x between columns."""
    block_n, block_k, num_warps = (2, 1024, 4) if n <= 2048 else (4, 512, 2)
    block_k = min(triton.next_power_of_2(k), block_k)
    return {"ROWS": triton.next_power_of_2(num_rows), "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": num_warps}


def small_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None, overlap: bool
) -> torch.Tensor:
    """x [M, K], weight [N, K], out [M, N] or None, all contiguous, bias [N] or None; returns [M, N].

    overlap: start while the kernel before still runs (sm_90 and newer).
    """
    num_rows, k = x.shape
    n = weight.shape[0]
    y = torch.empty(num_rows, n, dtype=x.dtype, device=x.device) if out is None else out
    config = small_linear_config(num_rows, n, k)
    options = {"launch_pdl": True} if overlap else {}
    _small_linear_kernel[(triton.cdiv(n, config["BLOCK_N"]),)](
        x, weight, bias, y, num_rows, n, k, HAS_BIAS=bias is not None, OVERLAP=overlap, **config, **options
    )
    return y
