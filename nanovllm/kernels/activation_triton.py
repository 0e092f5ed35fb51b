"""SwiGLU's activation. Bytes moved for T tokens of 2F elements of s bytes: 3 T F s."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, x_stride, F, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """BLOCK outputs of one row; x is [N, 2F], out is [N, F]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < F
    source = x_ptr + row * x_stride + column
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * F + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(x: torch.Tensor, overlap: bool = False) -> torch.Tensor:
    """See `kernels/activation.py`."""
    size = x.shape[-1] // 2
    rows = x.reshape(-1, 2 * size)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(size))
        grid = (rows.shape[0], triton.cdiv(size, block))
        _silu_and_mul_kernel[grid](
            rows,
            out,
            rows.stride(0),
            size,
            BLOCK=block,
            OVERLAP=overlap,
            num_warps=max(1, block // 256),
            **({"launch_pdl": True} if overlap else {}),
        )
    return out
