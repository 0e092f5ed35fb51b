"""A matrix of weights times a few rows, at memory bandwidth; for an MLP with the gate in the same launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Of the matrix kernel: numbers of a row at once, and bytes under way.
_BLOCK_K, _STAGE_BYTES = 128, 96 << 10


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_rows"])
def _vector_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, num_rows, N, K, y_stride,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_N columns of y [num_rows, N] for all rows; GATED: W is [2 N, K], and column n is
    silu of row n's product times row N + n's.

    Products are kept per (row, column, k lane) and summed over k once at the end: a reduction per tile would wait
    on shared memory more often than on the weights.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK_K)
    acc = tl.zeros((ROWS, BLOCK_N, BLOCK_K), dtype=tl.float32)
    up_acc = tl.zeros((ROWS, BLOCK_N, BLOCK_K), dtype=tl.float32)
    w_rows = w_ptr + n.to(tl.int64)[:, None] * K
    up_rows = w_ptr + (n + N).to(tl.int64)[:, None] * K
    # The weights do not depend on the kernel before: their first tile is on its way while that one ends.
    mask = (n[:, None] < N) & (lanes[None, :] < K)
    w = tl.load(w_rows + lanes[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        up = tl.load(up_rows + lanes[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(0, K, BLOCK_K):
        k = start + lanes
        if start > 0:
            mask = (n[:, None] < N) & (k[None, :] < K)
            w = tl.load(w_rows + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            if GATED:
                up = tl.load(up_rows + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        live = (rows[:, None] < num_rows) & (k[None, :] < K)
        x = tl.load(x_ptr + rows[:, None] * K + k[None, :], mask=live, other=0.0).to(tl.float32)
        acc += w.to(tl.float32)[None, :, :] * x[:, None, :]
        if GATED:
            up_acc += up.to(tl.float32)[None, :, :] * x[:, None, :]
    y = tl.sum(acc, axis=2)
    if HAS_BIAS:
        y += tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up = tl.sum(up_acc, axis=2)
        if HAS_BIAS:
            up += tl.load(b_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        y = _silu(y) * up
    out = y_ptr + rows[:, None] * y_stride + n[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=(rows[:, None] < num_rows) & (n[None, :] < N))


@triton.jit(do_not_specialize=["num_rows"])
def _matrix_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, num_rows, N, K, y_stride,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As `_vector_kernel`, by matrix units: ROWS rows, which want to be 16 or more, and BLOCK_N columns."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK_K)
    acc = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    up_acc = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    w_rows = w_ptr + n.to(tl.int64)[:, None] * K
    up_rows = w_ptr + (n + N).to(tl.int64)[:, None] * K
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(0, K, BLOCK_K):
        k = (start + lanes)[None, :]
        mask = (n[:, None] < N) & (k < K)
        x = tl.load(x_ptr + rows[:, None] * K + k, mask=(rows[:, None] < num_rows) & (k < K), other=0.0)
        w = tl.load(w_rows + k, mask=mask, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(x, tl.trans(w), acc)
        if GATED:
            up = tl.load(up_rows + k, mask=mask, other=0.0, eviction_policy="evict_first")
            up_acc = tl.dot(x, tl.trans(up), up_acc)
    if HAS_BIAS:
        acc += tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_acc += tl.load(b_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = _silu(acc) * up_acc
    out = y_ptr + rows[:, None].to(tl.int64) * y_stride + n[None, :]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=(rows[:, None] < num_rows) & (n[None, :] < N))


def vector_config(num_rows: int, n: int, k: int) -> dict[str, int]:
    """Tile and warps, as measured on an H200. A small W needs few columns per program, so that every multiprocessor
    gets one, and long rows in flight; a large W has programs enough and gains from sharing x between columns."""
    block_n, block_k, num_warps = (2, 1024, 4) if n <= 2048 else (4, 512, 2)
    block_k = min(triton.next_power_of_2(k), block_k)
    return {"ROWS": triton.next_power_of_2(num_rows), "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": num_warps}


def matrix_config(num_rows: int, n: int, gated: bool) -> dict[str, int]:
    """Tile, warps and stages, as measured on an H200: about as many programs as multiprocessors, and of stages five, or
    what fits into the 99 KiB of the smallest chips on which launches overlap (elsewhere cuBLAS serves); of n stages
    n - 1 are under way."""
    block_n = 16 if n <= 2048 else 32 if n <= 4096 or gated else 64
    rows = min(64, max(16, triton.next_power_of_2(num_rows)))
    stages = _STAGE_BYTES // ((rows + (1 + gated) * block_n) * _BLOCK_K * 2)
    return {"ROWS": rows, "BLOCK_N": block_n, "BLOCK_K": _BLOCK_K, "num_warps": 4, "num_stages": min(5, stages + 1)}


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    gated: bool,
    vector: bool,
    overlap: bool,
) -> torch.Tensor:
    """x [M, K], weight [N, K], contiguous, bias [N] or None, out [M, N] or None; returns [M, N], or with `gated`
    silu of the first N / 2 columns times the others.

    vector: without matrix units. overlap: start while the kernel before still runs (sm_90 and newer).
    """
    num_rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    y = torch.empty(num_rows, n, dtype=x.dtype, device=x.device) if out is None else out
    config = vector_config(num_rows, n, k) if vector else matrix_config(num_rows, n, gated)
    kernel = _vector_kernel if vector else _matrix_kernel
    kernel[(triton.cdiv(n, config["BLOCK_N"]), triton.cdiv(num_rows, config["ROWS"]))](
        x, weight, bias, y, num_rows, n, k, y.stride(0), GATED=gated, HAS_BIAS=bias is not None, OVERLAP=overlap,
        **config, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return y
