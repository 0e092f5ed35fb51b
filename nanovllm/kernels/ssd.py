"""The memory side of a prefill: convolution over time and the state scan of Mamba-2 in chunks (arXiv 2405.21060).

Letters: T tokens of all sequences, H heads, P numbers per head, G groups, N numbers of state per channel, C channels of
the convolution, W_c its width. Several layers that share their input count as one with more heads, groups and channels.

A chunk of Q tokens costs H * Q * (2 P N) FLOP for its state, and where outputs are wanted G * Q^2 * N + H * Q^2 * P
more: the quadratic form inside a chunk, the recurrence between chunks only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Segment(NamedTuple):
    """Tokens first .. end - 1 go on from row `source` of the states, and leave what follows in row `target`.

    Segments are in order, so one may go on from what the one before left; one without tokens copies.
    """

    first: int
    end: int
    source: int
    target: int


def causal_conv_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    segments: list[Segment],
) -> torch.Tensor:
    """silu of a depthwise convolution over each token and the W_c - 1 before it; computed in float32.

    Args:
        x: [T, C], any float dtype.
        weight, bias: [C, W_c], the last column meets the token itself; [C] or None.
        states: [rows, C, W_c - 1], the last inputs of each row, oldest first; changed in place.
        segments: which tokens go on from which row.

    Returns:
        [T, C] in x's dtype.
    """
    out = torch.empty_like(x)
    history, width = states.shape[2], weight.shape[1]
    for first, end, source, target in segments:
        past = torch.cat((states[source].T.to(x.dtype), x[first:end]))  # [W_c - 1 + n, C]
        states[target] = past[len(past) - history :].T
        wide, n = past.float(), end - first
        total = sum(wide[k : k + n] * weight[:, k].float() for k in range(width))
        out[first:end] = F.silu(total if bias is None else total + bias.float())
    return out


def ssd_ref(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    states: torch.Tensor,
    segments: list[Segment],
    chunk_size: int,
) -> torch.Tensor | None:
    """S = exp(dt a) S + dt x (outer) b for every token in turn, and y = S c; computed in float32.

    Args:
        x: [T, H, P], any float dtype.
        dt: [T, H] float32, positive.
        a: [H] float32, negative.
        b, c: [T, G, N], any float dtype; head h uses group h // (H / G). c is None where no outputs are wanted.
        states: [rows, H, P, N] float32, changed in place.
        segments: which tokens go on from which row.
        chunk_size: tokens at once; results do not depend on it.

    Returns:
        [T, H, P] float32, or None without c.
    """
    y = None if c is None else torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for first, end, source, target in segments:
        state = states[source].clone()
        for start in range(first, end, chunk_size):
            piece = slice(start, min(start + chunk_size, end))
            out, state = _chunk(x[piece], dt[piece], a, b[piece], None if c is None else c[piece], state)
            if y is not None:
                y[piece] = out
        states[target] = state
    return y


def _chunk(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, state: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Outputs [Q, H, P] and the next state of one chunk, which goes on from `state` [H, P, N]."""
    repeats = x.shape[1] // b.shape[1]
    b = b.float().repeat_interleave(repeats, 1)  # [Q, H, N]
    x = x.float() * dt[:, :, None]
    log_decay = (dt * a).cumsum(0)  # [Q, H], from before the chunk up to and with each token
    left = torch.exp(log_decay[-1] - log_decay)[:, :, None]  # of each token's share at the end
    after = torch.exp(log_decay[-1])[:, None, None] * state + torch.einsum("qhp,qhn->hpn", x * left, b)
    if c is None:
        return None, after
    c = c.float().repeat_interleave(repeats, 1)
    between = log_decay[:, None] - log_decay[None]  # [Q, Q, H]
    later = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
    weights = torch.einsum("ihn,jhn->ijh", c, b) * between.masked_fill(later[:, :, None], -torch.inf).exp()
    y = torch.einsum("ijh,jhp->ihp", weights, x)
    return y + torch.einsum("ihn,hpn->ihp", c * log_decay.exp()[:, :, None], state), after
