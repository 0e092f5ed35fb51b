"""Memory of cross-Mamba layers: states that all layers' own weights drive with one common input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm import distributed
from nanovllm.distributed import Cut, Place, as_cut
from nanovllm.kernels.mamba_step import gated_norm_ref, mamba_read_ref, mamba_step_ref
from nanovllm.kernels.ssd import Segment, causal_conv_ref, ssd_ref
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear

# Tokens of a prefill whose projections exist at once where nobody wants all outputs: 27,008 numbers a token in the
# 500m shape.
_TOKENS = 1024


class Stacked(nn.Module):
    """Equal parameters of several layers, each kind in one tensor [layers, ...].

    Args:
        parts: where a checkpoint keeps each layer's, relative to this module's parent.
        rows: first dimension of one layer's.
        shapes: the other dimensions by name.
        dtype: of all of them; None follows the model's.
    """

    def __init__(
        self, parts: list[str], rows: Cut, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.parts, self.rows = parts, rows
        self.fixed_dtypes = {} if dtype is None else dict.fromkeys(shapes, dtype)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(len(parts), rows.size, *shape), requires_grad=False))

    def part(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """The layer of `param` that belongs to `name`, as a view."""
        return param[self.parts.index(name)]

    def place(self, param: torch.Tensor) -> Place:
        """Where the tensors of all layers together go."""
        return Place(param, (as_cut(len(self.parts)), self.rows))


class MambaCuts(NamedTuple):
    """What a rank holds: whole heads, and the groups that they read. heads: of H; channels: of E, those of x or z;
    conv: of x and B together, or of z and C."""

    heads: Cut
    channels: Cut
    conv: Cut


class MambaState(NamedTuple):
    """Of all rows and layers: conv [rows, L, C, W_c - 1], ssm [rows, L, H, P, N] float32."""

    conv: torch.Tensor
    ssm: torch.Tensor


@dataclass(slots=True)
class StateRows:
    """What the layers of R rows read whose states stand at the rows' tokens: x [R, L, H, P], d [L, H]."""

    x: torch.Tensor
    d: torch.Tensor
    rows: torch.Tensor
    ssm: torch.Tensor

    def read(self, layer: int, c: torch.Tensor) -> torch.Tensor:
        """y [R, H, P] of one layer for its c [R, G, N]."""
        return mamba_read_ref(self.x[:, layer], self.ssm[:, layer], self.rows, c, self.d[layer])


@dataclass(slots=True)
class Scan:
    """What the layers read at every token of a prefill; reading moves the layer's states on. x [T, L, H, P],
    b [T, L, G, N], dt [T, L, H], a and d [L, H]."""

    x: torch.Tensor
    b: torch.Tensor
    dt: torch.Tensor
    a: torch.Tensor
    d: torch.Tensor
    ssm: torch.Tensor
    segments: list[Segment]
    chunk_size: int

    def read(self, layer: int, c: torch.Tensor) -> torch.Tensor:
        """y [T, H, P] of one layer for its c [T, G, N]."""
        x, b, dt = self.x[:, layer], self.b[:, layer], self.dt[:, layer]
        y = ssd_ref(x, dt, self.a[layer], b, c, self.ssm[:, layer], self.segments, self.chunk_size)
        return y + self.d[layer][:, None] * x

    def advance(self) -> None:
        """Move the states of all layers on without reading."""
        x, b, dt = (tensor.flatten(1, 2) for tensor in (self.x, self.b, self.dt))
        ssd_ref(x, dt, self.a.flatten(), b, None, self.ssm.flatten(1, 2), self.segments, self.chunk_size)


class MemorySide:
    """One projection of the memory for all layers, their convolutions and their states.

    Args:
        proj: [L * (C + H), d] rows: x, B, dt of each layer.
        conv: weight [L, C, 1, W_c] and perhaps bias [L, C].
        ssm: A_log, D, dt_bias [L, H] float32.
        num_groups: G, of those on this rank.
        chunk_size: tokens that a scan takes at once.
    """

    def __init__(self, proj: Linear, conv: Stacked, ssm: Stacked, num_groups: int, chunk_size: int) -> None:
        self.proj, self.conv, self.ssm = proj, conv, ssm
        self.num_groups = num_groups
        self.chunk_size = chunk_size

    def step(self, memory: torch.Tensor, rows: torch.Tensor, state: MambaState) -> StateRows:
        """Move `rows` [R] on by one token each, memory [R, d]."""
        weight, bias, ssm = self.conv.weight[:, :, 0], getattr(self.conv, "bias", None), self.ssm
        projected = self.proj(memory).unflatten(-1, (len(weight), -1))
        x = mamba_step_ref(projected, rows, *state, weight, bias, ssm.A_log, ssm.dt_bias)
        return StateRows(x, ssm.D, rows, state.ssm)

    def scan(self, memory: torch.Tensor, segments: list[Segment], state: MambaState) -> Scan:
        """Convolve tokens [T, d] of a prefill; the states wait to be moved on."""
        weight, bias = self.conv.weight[:, :, 0], getattr(self.conv, "bias", None)
        layers, channels = weight.shape[:2]
        heads, dim, size = state.ssm.shape[2:]
        projected = self.proj(memory).unflatten(-1, (layers, channels + heads))
        xb, dt = projected.split((channels, heads), dim=-1)
        bias = None if bias is None else bias.flatten()
        xb = causal_conv_ref(xb.flatten(1), weight.flatten(0, 1), bias, state.conv.flatten(1, 2), segments)
        x, b = xb.unflatten(-1, (layers, channels)).split((heads * dim, self.num_groups * size), dim=-1)
        dt = F.softplus(dt.float() + self.ssm.dt_bias)
        x, b = x.unflatten(-1, (heads, dim)), b.unflatten(-1, (self.num_groups, size))
        return Scan(x, b, dt, -self.ssm.A_log.exp(), self.ssm.D, state.ssm, segments, self.chunk_size)

    def absorb(
        self, memory: torch.Tensor, segments: list[Segment], state: MambaState, last: list[int], rows: torch.Tensor
    ) -> StateRows:
        """Move the states over all tokens [T, d] without reading them; what is to be read is left at the tokens
        `last`, ascending, the last ones of `rows` [len(last)]."""
        found = [memory.new_empty(0, *state.ssm.shape[1:4])]
        for start in range(0, len(memory), _TOKENS):
            end = min(start + _TOKENS, len(memory))
            scan = self.scan(memory[start:end], _cut(segments, start, end), state)
            scan.advance()
            found += [scan.x[token - start, None] for token in last if start <= token < end]
        return StateRows(torch.cat(found), self.ssm.D, rows, state.ssm)


class CrossMamba(nn.Module):
    """Reads the states of one layer with C, gates with z."""

    def __init__(self, hidden_size: int, cuts: MambaCuts, num_groups: int, eps: float) -> None:
        super().__init__()
        channels = cuts.channels
        self.num_groups, self.group = num_groups, distributed.current()
        self.in_proj = Linear(hidden_size, {"in_proj": cuts.conv})
        self.norm = RMSNorm(channels, eps)
        self.out_proj = Linear(channels, {"out_proj": hidden_size})

    def forward(self, u: torch.Tensor, memory: StateRows | Scan, layer: int) -> torch.Tensor:
        z, c = self.in_proj(u).tensor_split(self.norm.weight.shape, dim=-1)
        y = memory.read(layer, c.unflatten(-1, (max(1, self.num_groups // self.group.size), -1)))
        norm = self.norm
        return self.out_proj(gated_norm_ref(y.flatten(1), z, norm.weight, norm.eps, self.num_groups, self.group))


def _cut(segments: list[Segment], start: int, end: int) -> list[Segment]:
    """The parts of segments within tokens start .. end - 1, counted from start; what was begun before goes on in its
    target row. A segment without tokens belongs to where the one before it ended."""
    parts = []
    for first, last, source, target in segments:
        if max(first, start) < min(last, end) or start < first == last <= end:
            begun = target if first < start else source
            parts.append(Segment(max(first, start) - start, min(last, end) - start, begun, target))
    return parts
