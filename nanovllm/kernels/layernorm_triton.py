"""RMSNorm, alone or after a residual add, in one pass: a program keeps whole rows in registers.

Bytes moved for N rows of D elements of s bytes: 2 N D s for the norm, 4 N D s with the add; the weight stays in cache.
Quantizing in the same pass writes one byte in place of s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Elements per program when rows abound; with fewer rows than this a program takes one row, to spread the work.
_TILE = 4096
_MANY_ROWS = 2048


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


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, scale_ptr, num_rows, x_stride, residual_stride, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, DIGITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROWS rows of [num_rows, D]; with ADD the sum x + residual is normalised, and stored too; with DIGITS the
    result is int8 with a scale a row, one digit behind the other."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < D)
    row = row.to(tl.int64)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * D + column, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
    # Rounded before the weight is applied, as the reference does.
    normed = (wide * scale[:, None]).to(x_ptr.dtype.element_ty).to(tl.float32)
    y = (normed * weight).to(x_ptr.dtype.element_ty)
    if DIGITS == 0:
        tl.store(out_ptr + row * D + column, y, mask=mask)
    else:
        high, low, scales = _quantize_rows(y.to(tl.float32))
        tl.store(scale_ptr + row, scales[:, None], mask=row < num_rows)
        tl.store(out_ptr + row * DIGITS * D + column, high, mask=mask)
        if DIGITS == 2:
            tl.store(out_ptr + row * DIGITS * D + D + column, low, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, overlap: bool = False, digits: int = 0):
    """See `kernels/layernorm.py`; with `digits` values and scales in place of the norm."""
    return _launch(x, None, weight, eps, overlap, digits)[0]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    overlap: bool = False,
    digits: int = 0,
):
    """See `kernels/layernorm.py`; likewise."""
    return _launch(x, residual, weight, eps, overlap, digits)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, overlap: bool, digits: int
) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The norm, or its values and scales, and the sum; without a residual there is none and `out` stands for it."""
    dim = x.shape[-1]
    rows, add = _as_rows(x), residual is not None
    other = _as_rows(residual) if add else rows
    shape = (*x.shape[:-1], digits, dim) if digits > 1 else (*x.shape[:-1], dim)
    out = torch.empty(shape, dtype=torch.int8 if digits else x.dtype, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if digits else None
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if add else out
    normed = (out, scales) if digits else out
    num_rows = rows.shape[0]
    if num_rows == 0:
        return normed, total
    block = triton.next_power_of_2(dim)
    per_program = max(1, _TILE // block) if num_rows >= _MANY_ROWS else 1
    _rms_norm_kernel[(triton.cdiv(num_rows, per_program),)](
        rows, other, weight, out, total, scales if digits else out, num_rows, rows.stride(0), other.stride(0), eps,
        D=dim, BLOCK=block, ROWS=per_program, ADD=add, DIGITS=digits, OVERLAP=overlap,
        num_warps=min(16, max(1, block * per_program // 512)), **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return normed, total


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., D] as [N, D] with neighbouring elements side by side; a view wherever one can be had."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
