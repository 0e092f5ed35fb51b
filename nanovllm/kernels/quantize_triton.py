"""Activations to int8, token by token. Bytes moved for N rows of K elements of s bytes: N K (s + digits)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _quantize_rows(y):
    """Two int8 digits and the float32 scales of the rows of y, which is 0 beyond their ends: the steps of the
    reference."""
    largest = tl.max(tl.abs(y), 1)
    scales = tl.where(largest > 0, tl.maximum(tl.div_rn(largest, 127.0), 1.1754943508222875e-38), 1.0)
    scales += tl.sum(y * 0.0, 1)  # a NaN if one of y's is not finite
    steps = tl.minimum(tl.maximum(y * tl.div_rn(1.0, scales)[:, None], -127.0), 127.0)
    # Adding 1.5 * 2^23 rounds half to even and leaves the integer in the low bits.
    high = steps + 12582912.0
    low = (steps - (high - 12582912.0)) * 254.0 + 12582912.0
    return high.to(tl.int32, bitcast=True).to(tl.int8), low.to(tl.int32, bitcast=True).to(tl.int8), scales


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr, x_stride, K: tl.constexpr, BLOCK: tl.constexpr, DIGITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row of [N, K]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + column, mask=column < K, other=0.0)
    high, low, scales = _quantize_rows(x.to(tl.float32))
    tl.store(out_ptr + row * K * DIGITS + column, high, mask=column < K)
    if DIGITS == 2:
        tl.store(out_ptr + row * K * DIGITS + K + column, low, mask=column < K)
    tl.store(scale_ptr + row + tl.arange(0, 1), scales)


def quantize_tokens(x: torch.Tensor, digits: int = 1, overlap: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels/quantize.py`; returns values and scales. overlap: start while the kernel before still runs."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    shape = (*x.shape[:-1], digits, size) if digits > 1 else (*x.shape[:-1], size)
    out = torch.empty(shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(size)
        _quantize_kernel[(rows.shape[0],)](
            rows, out, scales, rows.stride(0), K=size, BLOCK=block, DIGITS=digits, OVERLAP=overlap,
            num_warps=min(16, max(1, block // 512)), **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return out, scales
