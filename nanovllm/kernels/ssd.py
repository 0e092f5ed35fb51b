"""The memory side of a prefill: convolution over time and the state scan of Mamba-2 in chunks (arXiv 2405.21060).

Letters: T tokens of all sequences, L layers, H heads, P numbers per head, G groups, N numbers of state per channel, C
channels of the convolution, W_c its width. All layers share their input, so one call may serve all of them.

A chunk of Q tokens costs L * H * Q * (2 P N) FLOP for its state, and where outputs are wanted L * (G * Q^2 * N + H *
Q^2 * P) more: the quadratic form inside a chunk, the recurrence between chunks only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels.choice import twin


class Segment(NamedTuple):
    """Tokens first .. end - 1 go on from row `source` of the states, and leave what follows in row `target`.

    Segments are in order and side by side. One whose source is the target of the one before goes on from what that one
    left; else it shares no row with those before. One without tokens copies.
    """

    first: int
    end: int
    source: int
    target: int


@dataclass(slots=True)
class Piece:
    """Neighbouring tokens start .. end - 1 of a prefill, which pass convolution and scan at once.

    segments: counted from `start`.
    chunk_size: tokens of a chunk; results do not depend on it.
    table: [spans, 6] int32 on the device, `span_table` of these segments.
    """

    start: int
    end: int
    segments: list[Segment]
    chunk_size: int
    table: torch.Tensor


def span_table(segments: list[Segment], chunk_size: int) -> list[tuple[int, ...]]:
    """Segments cut into spans of at most chunk_size tokens, as kernels take them: (first, end, source, target, begin,
    row). A source of -1 goes on from the span before, a target of -1 keeps nothing; `begin` is the first token of the
    spans that go on from one another, `row` what they all began from.
    """
    spans, left, begin, row = [], None, 0, 0
    for first, end, source, target in segments:
        begins = source != left
        if begins:
            begin, row = first, source
        for start in range(first, end, chunk_size) or (first,):
            stop = min(start + chunk_size, end)
            comes_from = source if begins and start == first else -1
            spans.append((start, stop, comes_from, target if stop == end else -1, begin, row))
        left = target
    return spans


def causal_conv_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor, segments: list[Segment]
) -> torch.Tensor:
    """silu of a depthwise convolution over each token and the W_c - 1 before it; computed in float32.

    Args:
        x: [T, L, C], any float dtype; tokens and layers may lie apart.
        weight, bias: [L, C, W_c], the last column meets the token itself; [L, C] or None.
        states: [rows, L, C, W_c - 1], the last inputs of each row, oldest first; changed in place.
        segments: which tokens go on from which row.

    Returns:
        [T, L, C] in x's dtype, contiguous.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    history, width = states.shape[-1], weight.shape[-1]
    for first, end, source, target in segments:
        past = torch.cat((states[source].movedim(-1, 0).to(x.dtype), x[first:end]))  # [W_c - 1 + n, L, C]
        states[target] = past[len(past) - history :].movedim(0, -1)
        wide, n = past.float(), end - first
        total = sum(wide[k : k + n] * weight[..., k].float() for k in range(width))
        out[first:end] = F.silu(total if bias is None else total + bias.float())
    return out


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor, piece: Piece
) -> torch.Tensor:
    """`causal_conv_ref` of a piece, by a kernel where there is one."""
    kernel = twin("ssd") if x.is_cuda else None
    if kernel is None:
        return causal_conv_ref(x, weight, bias, states, piece.segments)
    return kernel.causal_conv(x, weight, bias, states, piece.table, piece.chunk_size)


def ssd_ref(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    segments: list[Segment],
    chunk_size: int,
) -> torch.Tensor | None:
    """S = exp(s a) S + s x (outer) b for every token in turn, where s = softplus(dt + dt_bias) and a = -exp(a_log), and
    y = S c + d x; computed in float32.

    Args:
        x: [T, L, H, P], any float dtype; tokens and layers may lie apart here and below.
        dt: [T, L, H], any float dtype.
        b, c: [T, L, G, N] in x's dtype; head h uses group h // (H / G). c is None where no outputs are wanted.
        a_log, dt_bias, d: [L, H] float32.
        states: [rows, L, H, P, N] float32, changed in place; rows may lie apart.
        segments: which tokens go on from which row.
        chunk_size: tokens at once; results do not depend on it.

    Returns:
        [T, L, H, P] float32, or None without c.
    """
    y = None if c is None else torch.empty(x.shape, dtype=torch.float32, device=x.device)
    dt, a = F.softplus(dt.float() + dt_bias), -a_log.exp()
    for first, end, source, target in segments:
        state = states[source].clone()
        for start in range(first, end, chunk_size):
            piece = slice(start, min(start + chunk_size, end))
            out, state = _chunk(x[piece], dt[piece], a, b[piece], None if c is None else c[piece], state)
            if y is not None:
                y[piece] = out
        states[target] = state
    return None if y is None else y + d[..., None] * x


def ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    piece: Piece,
) -> torch.Tensor | None:
    """`ssd_ref` of a piece, by kernels where there are; states are as exact there, in whatever dtype x is."""
    kernel, tensors = twin("ssd") if x.is_cuda else None, (x, dt, b, c, a_log, dt_bias, d, states)
    if kernel is None:
        return ssd_ref(*tensors, piece.segments, piece.chunk_size)
    return kernel.ssd(*tensors, piece.table, piece.chunk_size)


def _chunk(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, state: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Outputs [Q, L, H, P] and the next state of one chunk, which goes on from `state` [L, H, P, N]."""
    repeats = x.shape[2] // b.shape[2]
    b = b.float().repeat_interleave(repeats, 2)  # [Q, L, H, N]
    x = x.float() * dt[..., None]
    log_decay = (dt * a).cumsum(0)  # [Q, L, H], from before the chunk up to and with each token
    left = torch.exp(log_decay[-1] - log_decay)[..., None]  # of each token's share at the end
    after = torch.exp(log_decay[-1])[..., None, None] * state + torch.einsum("qlhp,qlhn->lhpn", x * left, b)
    if c is None:
        return None, after
    c = c.float().repeat_interleave(repeats, 2)
    between = log_decay[:, None] - log_decay[None]  # [Q, Q, L, H]
    later = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
    weights = torch.einsum("ilhn,jlhn->ijlh", c, b) * between.masked_fill(later[..., None, None], -torch.inf).exp()
    y = torch.einsum("ijlh,jlhp->ilhp", weights, x)
    return y + torch.einsum("ilhn,lhpn->ilhp", c * log_decay.exp()[..., None], state), after
