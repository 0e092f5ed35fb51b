"""One token of each row through the memory side: all layers' convolutions at once, then layer by layer the states.

Letters as in ssd.py, with L layers, R rows, C = H * P + G * N channels of a convolution. A layer's step reads and
writes 8 * H * P * N bytes of state a row for 8 * H * P * N FLOP: memory sets its time, so states are moved on where
they are read, in one pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.distributed import ALONE, Group
from nanovllm.kernels.choice import overlaps_launches, twin


class Drive(NamedTuple):
    """What moves states on, beside x; of one layer b [R, G, N], any float dtype, dt [R, H] and a_log [H] float32."""

    b: torch.Tensor
    dt: torch.Tensor
    a_log: torch.Tensor


def mamba_conv_ref(
    projected: torch.Tensor,
    rows: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolution and silu of x and B, and the step sizes, of all layers; nothing waits for the device.

    Args:
        projected: [R, L, C + H] contiguous, x (H * P), B (G * N) and dt (H) of each layer.
        rows: [R] int64; a row that belongs to nobody may be there any number of times.
        conv_states: [rows, L, C, W_c - 1] contiguous, any float dtype; changed in place.
        weight, bias: [L, C, W_c] contiguous; [L, C] or None.
        dt_bias: [L, H] float32.

    Returns:
        x and B after the convolution, [R, L, C] in projected's dtype; softplus(dt + dt_bias), [R, L, H] float32.
    """
    inputs, dt = projected.split((weight.shape[1], dt_bias.shape[1]), dim=-1)
    window = torch.cat((conv_states[rows].to(inputs.dtype), inputs[..., None]), -1)  # [R, L, C, W_c]
    conv_states[rows] = window[..., 1:].to(conv_states.dtype)
    total = (window.float() * weight.float()).sum(-1)
    xb = F.silu(total if bias is None else total + bias.float()).to(projected.dtype)
    return xb, F.softplus(dt.float() + dt_bias)


def mamba_read_ref(
    x: torch.Tensor,
    drive: Drive | None,
    states: torch.Tensor,
    rows: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
) -> torch.Tensor:
    """S = exp(-dt exp(a_log)) S + dt x (outer) b where states are to be moved on, and y = S c + d x; of one layer.

    Args:
        x: [R, H, P], any float dtype, rows may lie apart.
        drive: None leaves the states as they are; its tensors' rows may lie apart.
        states: [rows, H, P, N] float32, rows may lie apart; changed in place.
        rows: [R] int64; a row that belongs to nobody may be there any number of times.
        c: [R, G, N], any float dtype, rows may lie apart; head h uses group h // (H / G).
        d: [H] float32.

    Returns:
        [R, H, P] float32.
    """
    repeats = x.shape[1] // c.shape[1]
    own = states[rows]
    if drive is not None:
        b = drive.b.float().repeat_interleave(repeats, 1)
        decay = torch.exp(-drive.dt * torch.exp(drive.a_log))[..., None, None]
        own.mul_(decay).addcmul_((drive.dt[..., None] * x)[..., None], b[..., None, :])
        states[rows] = own
    return torch.einsum("rhpn,rhn->rhp", own, c.float().repeat_interleave(repeats, 1)) + d[:, None] * x


def gated_norm_ref(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, num_groups: int, ranks: Group = ALONE
) -> torch.Tensor:
    """weight * rms(y * silu(z)), the mean square over each group's channels; computed in float32.

    Args:
        y: [R, E] float32.
        z: [R, E], any float dtype, rows may lie apart.
        weight: [E].
        num_groups: of all ranks together.
        ranks: each has E channels, in order; where there are fewer groups than ranks, some share one.

    Returns:
        [R, E] in z's dtype.
    """
    gated = (y * F.silu(z.float())).unflatten(-1, (max(1, num_groups // ranks.size), -1))
    mean = gated.square().mean(-1, keepdim=True)
    if num_groups < ranks.size:
        of_groups = ranks.all_gather(mean.flatten(1)).unflatten(1, (num_groups, -1)).mean(-1)
        mean = of_groups[:, ranks.rank * num_groups // ranks.size, None, None]
    normed = gated * torch.rsqrt(mean + eps)
    return weight * normed.flatten(1).to(z.dtype)


def mamba_conv(
    projected: torch.Tensor,
    rows: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mamba_conv_ref`, by one kernel where there is one."""
    kernel = twin("mamba_step") if projected.is_cuda else None
    if kernel is None:
        return mamba_conv_ref(projected, rows, conv_states, weight, bias, dt_bias)
    overlap = overlaps_launches(projected.device)
    return kernel.mamba_conv(projected, rows, conv_states, weight, bias, dt_bias, overlap)


def mamba_read(
    x: torch.Tensor,
    drive: Drive | None,
    states: torch.Tensor,
    rows: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
) -> torch.Tensor:
    """`mamba_read_ref`, by one kernel where there is one. That begins before the launch ahead of it has ended and then
    waits for c alone: everything else has to be older than what that launch writes."""
    kernel = twin("mamba_step") if x.is_cuda else None
    if kernel is None:
        return mamba_read_ref(x, drive, states, rows, c, d)
    return kernel.mamba_read(x, drive, states, rows, c, d, overlaps_launches(x.device))


def gated_norm(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, num_groups: int, ranks: Group = ALONE
) -> torch.Tensor:
    """`gated_norm_ref`, by one kernel where there is one and no group is spread over ranks; that waits for y alone, as
    `mamba_read` does for c."""
    kernel = twin("mamba_step") if y.is_cuda and num_groups >= ranks.size else None
    if kernel is None:
        return gated_norm_ref(y, z, weight, eps, num_groups, ranks)
    return kernel.gated_norm(y, z, weight, eps, num_groups // ranks.size, overlaps_launches(y.device))
