"""SwiGLU's activation. Bytes moved for T tokens of 2F elements of s bytes: 3 T F s,
or 2 T F s + T F digits where it quantizes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


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
def _silu_and_mul_kernel(
    x_ptr, out_ptr, scale_ptr, x_stride, F, BLOCK: tl.constexpr, DIGITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK outputs of one row, all of it with DIGITS; x is [N, 2F], out is [N, F]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = column < F
    source = x_ptr + row * x_stride + column
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    out = out.to(x_ptr.dtype.element_ty)
    if DIGITS == 0:
        tl.store(out_ptr + row * F + column, out, mask=mask)
    else:
        high, low, scales = _quantize_rows(out.to(tl.float32))
        tl.store(scale_ptr + row + tl.arange(0, 1), scales)
        tl.store(out_ptr + row * DIGITS * F + column, high, mask=mask)
        if DIGITS == 2:
            tl.store(out_ptr + row * DIGITS * F + F + column, low, mask=mask)


def silu_and_mul(x: torch.Tensor, overlap: bool = False, digits: int = 0):
    """See `kernels/activation.py`; with `digits` values and scales in place of the result."""
    size = x.shape[-1] // 2
    rows = x.reshape(-1, 2 * size)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    shape = (*x.shape[:-1], digits, size) if digits > 1 else (*x.shape[:-1], size)
    out = torch.empty(shape, dtype=torch.int8 if digits else x.dtype, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if digits else None
    if out.numel():
        block = triton.next_power_of_2(size) if digits else min(_BLOCK, triton.next_power_of_2(size))
        grid = (rows.shape[0], triton.cdiv(size, block))
        _silu_and_mul_kernel[grid](
            rows, out, scales if digits else out, rows.stride(0), size, BLOCK=block, DIGITS=digits,
            OVERLAP=overlap, num_warps=min(16, max(1, block // (512 if digits else 256))),
            **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return (out, scales) if digits else out
