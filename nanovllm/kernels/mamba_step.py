"""One token of each row through the memory side of all layers, and what a layer reads from its states.

Letters as in ssd.py, with L layers and R rows. A step reads and writes 8 * L * H * P * N bytes of state a row for
6 * L * H * P * N FLOP, and reading reads half of those bytes again: memory sets the time of both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.distributed import ALONE, Group


def mamba_step_ref(
    projected: torch.Tensor,
    rows: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
) -> torch.Tensor:
    """Convolution, silu, step size and state update of all layers; nothing waits for the device.

    Args:
        projected: [R, L, C + H], x (H * P), B (G * N) and dt (H) of each layer.
        rows: [R] int64; a row that belongs to nobody may be there any number of times.
        conv_states: [rows, L, C, W_c - 1], any float dtype; changed in place.
        states: [rows, L, H, P, N] float32; changed in place.
        conv_weight, conv_bias: [L, C, W_c]; [L, C] or None.
        a_log, dt_bias: [L, H] float32.

    Returns:
        x after the convolution, [R, L, H, P] in projected's dtype.
    """
    heads, dim, size = states.shape[2:]
    inputs, dt = projected.split((conv_weight.shape[1], heads), dim=-1)
    window = torch.cat((conv_states[rows].to(inputs.dtype), inputs[..., None]), -1)  # [R, L, C, W_c]
    conv_states[rows] = window[..., 1:].to(conv_states.dtype)
    total = (window.float() * conv_weight.float()).sum(-1)
    xb = F.silu(total if conv_bias is None else total + conv_bias.float()).to(projected.dtype)
    x = xb[..., : heads * dim].unflatten(-1, (heads, dim))
    b = xb[..., heads * dim :].unflatten(-1, (-1, size))
    b = b.repeat_interleave(heads // b.shape[2], 2).float()  # [R, L, H, N]
    dt = F.softplus(dt.float() + dt_bias)
    decay = torch.exp(-dt * torch.exp(a_log))[..., None, None]
    states[rows] = decay * states[rows] + (dt[..., None] * x)[..., None] * b[..., None, :]
    return x


def mamba_read_ref(
    x: torch.Tensor, states: torch.Tensor, rows: torch.Tensor, c: torch.Tensor, d: torch.Tensor
) -> torch.Tensor:
    """y = S c + d x of one layer.

    Args:
        x: [R, H, P], any float dtype.
        states: [rows, H, P, N] float32, rows may lie apart.
        rows: [R] int64.
        c: [R, G, N], any float dtype.
        d: [H] float32.

    Returns:
        [R, H, P] float32.
    """
    c = c.float().repeat_interleave(x.shape[1] // c.shape[1], 1)
    return torch.einsum("rhpn,rhn->rhp", states[rows], c) + d[:, None] * x


def gated_norm_ref(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, num_groups: int, ranks: Group = ALONE
) -> torch.Tensor:
    """weight * rms(y * silu(z)), the mean square over each group's channels; computed in float32.

    Args:
        y: [R, E] float32.
        z: [R, E], any float dtype.
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
