"""The memory side of one token, in one launch for all layers' convolutions and two a layer. See mamba_step.py.

Bytes moved for R rows, the states being nearly all: 8 R H P N a layer, half of that where they are only read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Columns of a program of the convolution, and numbers of state of one that reads: 16 KB on their way for each, of which
# a multiprocessor holds eight. One row of 24 heads of 64 x 128 is 48 programs.
_COLUMNS, _STATE = 256, 4096


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log(1 + e^x), exact for small e^x too: 1 + e^-|x| is rounded, and the quotient makes good for that."""
    small = tl.exp(-tl.abs(x))
    total = 1.0 + small
    rounded = total - 1.0
    log = tl.where(rounded == 0.0, small, tl.log(total) * (small / tl.where(rounded == 0.0, 1.0, rounded)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def _conv_kernel(
    projected_ptr, rows_ptr, state_ptr, weight_ptr, bias_ptr, dt_bias_ptr, xb_ptr, dt_ptr, C, H, W: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one layer and row; grid ((C + H) / BLOCK, L, R). A channel is touched by one program alone."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    layer, i = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = i * tl.num_programs(1) + layer
    is_channel = column < C
    is_head = (column >= C) & (column < C + H)
    row = tl.load(rows_ptr + i)
    tap = tl.arange(0, TAPS)[None, :]
    state_ptr += ((row * tl.num_programs(1) + layer) * C + column)[:, None] * (W - 1)
    # Only the new token comes from the kernel before: what is older is on its way while that one ends.
    past = tl.load(state_ptr + tap, mask=is_channel[:, None] & (tap < W - 1), other=0.0)
    weight_ptr += (layer * C + column)[:, None] * W
    weight = tl.load(weight_ptr + tap, mask=is_channel[:, None] & (tap < W), other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + layer * H + column - C, mask=is_head, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + layer * C + column, mask=is_channel, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    projected = tl.load(projected_ptr + token * (C + H) + column, mask=column < C + H, other=0.0)
    window = tl.where(tap == W - 1, projected.to(tl.float32)[:, None], past.to(tl.float32))
    total = tl.sum(window * weight, 1)
    if HAS_BIAS:
        total += bias
    # Every input moves to its elder's place, perhaps by another thread than the one that read that.
    tl.debug_barrier()
    moves = is_channel[:, None] & (tap >= 1) & (tap < W)
    tl.store(state_ptr + tap - 1, window.to(state_ptr.dtype.element_ty), mask=moves)
    tl.store(xb_ptr + token * C + column, _silu(total).to(xb_ptr.dtype.element_ty), mask=is_channel)
    tl.store(dt_ptr + token * H + column - C, _softplus(projected.to(tl.float32) + dt_bias), mask=is_head)


@triton.jit
def _read_kernel(
    x_ptr, b_ptr, dt_ptr, a_log_ptr, state_ptr, rows_ptr, c_ptr, d_ptr, y_ptr, x_stride, b_stride, dt_stride,
    state_stride, c_stride, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, UPDATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_P of the P rows of one head's state; grid (H * tiles of a head, R)."""
    TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    head = tl.program_id(0) // TILES
    i = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) % TILES * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    group = head // (H // G) * N + n
    in_head, in_state = p < P, n < N
    state_ptr += tl.load(rows_ptr + i) * state_stride + (head * P + p)[:, None] * N + n[None, :]
    mask = in_head[:, None] & in_state[None, :]
    # Nothing of this is of the kernel before, which makes c: the states move on while that one ends.
    state = tl.load(state_ptr, mask=mask, other=0.0)
    x = tl.load(x_ptr + i * x_stride + head * P + p, mask=in_head, other=0.0).to(tl.float32)
    d = tl.load(d_ptr + head)
    if UPDATE:
        b = tl.load(b_ptr + i * b_stride + group, mask=in_state, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + i * dt_stride + head)
        decay = tl.exp(-dt * tl.exp(tl.load(a_log_ptr + head)))
        state = decay * state + (dt * x)[:, None] * b[None, :]
        tl.store(state_ptr, state, mask=mask)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    c = tl.load(c_ptr + i * c_stride + group, mask=in_state, other=0.0).to(tl.float32)
    y = tl.sum(state * c[None, :], 1) + d * x
    tl.store(y_ptr + i * (H * P) + head * P + p, y, mask=in_head)


@triton.jit
def _gated_norm_kernel(
    y_ptr, z_ptr, weight_ptr, out_ptr, z_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One group of SIZE channels of one row; grid (R, G)."""
    i = tl.program_id(0).to(tl.int64)
    in_group = tl.arange(0, BLOCK) < SIZE
    channel = tl.program_id(1) * SIZE + tl.arange(0, BLOCK)
    # z is older than y, as c was.
    z = tl.load(z_ptr + i * z_stride + channel, mask=in_group, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + channel, mask=in_group, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = i * (tl.num_programs(1) * SIZE) + channel
    gated = tl.load(y_ptr + at, mask=in_group, other=0.0) * _silu(z)
    normed = gated * tl.rsqrt(tl.sum(gated * gated, 0) / SIZE + eps)
    # Rounded before the weight is applied, as the reference does.
    out = normed.to(out_ptr.dtype.element_ty).to(tl.float32) * weight
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=in_group)


def mamba_conv(
    projected: torch.Tensor,
    rows: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    overlap: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels/mamba_step.py`."""
    layers, channels, width = weight.shape
    heads = dt_bias.shape[1]
    xb = torch.empty(len(rows), layers, channels, dtype=projected.dtype, device=projected.device)
    dt = torch.empty(len(rows), layers, heads, dtype=torch.float32, device=projected.device)
    if len(rows):
        _conv_kernel[(triton.cdiv(channels + heads, _COLUMNS), layers, len(rows))](
            projected, rows, conv_states, weight, weight if bias is None else bias, dt_bias, xb, dt, channels, heads,
            W=width, TAPS=triton.next_power_of_2(width), BLOCK=_COLUMNS, HAS_BIAS=bias is not None, OVERLAP=overlap,
            num_warps=4, **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return xb, dt


def mamba_read(
    x: torch.Tensor,
    drive: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    states: torch.Tensor,
    rows: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    overlap: bool = False,
) -> torch.Tensor:
    """See `kernels/mamba_step.py`."""
    num_rows, heads, dim = x.shape
    groups, size = c.shape[1:]
    b, dt, a_log = (c, d, d) if drive is None else drive
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if num_rows:
        block_n = triton.next_power_of_2(size)
        block_p = min(triton.next_power_of_2(dim), max(1, _STATE // block_n))
        _read_kernel[(heads * triton.cdiv(dim, block_p), num_rows)](
            x, b, dt, a_log, states, rows, c, d, y, x.stride(0), b.stride(0), dt.stride(0), states.stride(0),
            c.stride(0), H=heads, G=groups, P=dim, N=size, BLOCK_P=block_p, BLOCK_N=block_n, UPDATE=drive is not None,
            OVERLAP=overlap, num_warps=4, **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return y


def gated_norm(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, num_groups: int, overlap: bool = False
) -> torch.Tensor:
    """See `kernels/mamba_step.py`."""
    out = torch.empty(y.shape, dtype=z.dtype, device=z.device)
    size = y.shape[1] // num_groups
    if len(y):
        block = triton.next_power_of_2(size)
        _gated_norm_kernel[(len(y), num_groups)](
            y, z, weight, out, z.stride(0), eps, SIZE=size, BLOCK=block, OVERLAP=overlap,
            num_warps=min(16, max(1, block // 256)), **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return out
