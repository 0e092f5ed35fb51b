"""Memory of cross-Mamba layers: states that all layers' own weights drive with one common input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from nanovllm import distributed
from nanovllm.distributed import Cut, Place, as_cut
from nanovllm.kernels.mamba_step import Drive, gated_norm, mamba_conv, mamba_read
from nanovllm.kernels.ssd import Piece, causal_conv, ssd
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear


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
    """What the layers read at one token of each of R rows: x [R, L, H, P], d [L, H]. Where the states do not stand at
    these tokens yet, b [R, L, G, N], dt [R, L, H] and a_log [L, H] are there too, and reading moves the layer's on."""

    x: torch.Tensor
    d: torch.Tensor
    rows: torch.Tensor
    ssm: torch.Tensor
    drive: Drive | None = None

    def read(self, layer: int, c: torch.Tensor) -> torch.Tensor:
        """y [R, H, P] of one layer for its c [R, G, N]."""
        drive = self.drive
        if drive is not None:
            drive = Drive(drive.b[:, layer], drive.dt[:, layer], drive.a_log[layer])
        return mamba_read(self.x[:, layer], drive, self.ssm[:, layer], self.rows, c, self.d[layer])


@dataclass(slots=True)
class Scan:
    """What the layers read at every token of a piece; reading moves the layer's states on. x [T, L, H, P],
    dt [T, L, H], b [T, L, G, N], params as `MemorySide` holds them, ssm of all rows."""

    x: torch.Tensor
    dt: torch.Tensor
    b: torch.Tensor
    params: Stacked
    ssm: torch.Tensor
    piece: Piece

    def read(self, layer: int, c: torch.Tensor) -> torch.Tensor:
        """y [T, H, P] of one layer for its c [T, G, N]."""
        return self._move(slice(layer, layer + 1), c[:, None])[:, 0]

    def advance(self) -> None:
        """Move the states of all layers on without reading."""
        self._move(slice(None), None)

    def _move(self, at: slice, c: torch.Tensor | None) -> torch.Tensor | None:
        params = (param[at] for param in (self.params.A_log, self.params.dt_bias, self.params.D))
        return ssd(self.x[:, at], self.dt[:, at], self.b[:, at], c, *params, self.ssm[:, at], self.piece)


class MemorySide:
    """One projection of the memory for all layers, their convolutions and their states.

    Args:
        proj: [L * (C + H), d] rows: x, B, dt of each layer.
        conv: weight [L, C, 1, W_c] and perhaps bias [L, C].
        ssm: A_log, D, dt_bias [L, H] float32.
        num_groups: G, of those on this rank.
    """

    def __init__(self, proj: Linear, conv: Stacked, ssm: Stacked, num_groups: int) -> None:
        self.proj, self.conv, self.ssm = proj, conv, ssm
        self.num_groups = num_groups

    def step(self, memory: torch.Tensor, rows: torch.Tensor, state: MambaState) -> StateRows:
        """Convolve one token of each of `rows` [R], memory [R, d]; reading moves the states on."""
        weight, bias, ssm = self.conv.weight[:, :, 0], getattr(self.conv, "bias", None), self.ssm
        heads, dim, size = state.ssm.shape[2:]
        projected = self.proj(memory).unflatten(-1, (len(weight), -1))
        xb, dt = mamba_conv(projected, rows, state.conv, weight, bias, ssm.dt_bias)
        x, b = xb.split((heads * dim, self.num_groups * size), dim=-1)
        drive = Drive(b.unflatten(-1, (-1, size)), dt, ssm.A_log)
        return StateRows(x.unflatten(-1, (heads, dim)), ssm.D, rows, state.ssm, drive)

    def scan(self, memory: torch.Tensor, piece: Piece, state: MambaState) -> Scan:
        """Convolve a piece of the tokens [T, d] of a prefill; its states wait to be moved on."""
        weight, bias = self.conv.weight[:, :, 0], getattr(self.conv, "bias", None)
        layers, channels = weight.shape[:2]
        heads, dim, size = state.ssm.shape[2:]
        projected = self.proj(memory[piece.start : piece.end]).unflatten(-1, (layers, channels + heads))
        xb, dt = projected.split((channels, heads), dim=-1)
        xb = causal_conv(xb, weight, bias, state.conv, piece)
        x, b = xb.split((heads * dim, self.num_groups * size), dim=-1)
        x, b = x.unflatten(-1, (heads, dim)), b.unflatten(-1, (self.num_groups, size))
        return Scan(x, dt, b, self.ssm, state.ssm, piece)

    def absorb(
        self, memory: torch.Tensor, pieces: list[Piece], state: MambaState, last: torch.Tensor, rows: torch.Tensor
    ) -> StateRows:
        """Move the states over all tokens [T, d] without reading them; what is to be read is left at the tokens
        `last` [R], the last ones of `rows` [R]."""
        found = memory.new_empty(len(last), *state.ssm.shape[1:4])
        for piece in pieces:
            scan = self.scan(memory, piece, state)
            scan.advance()
            if len(last):
                inside = ((last >= piece.start) & (last < piece.end))[:, None, None, None]
                at = (last - piece.start).clamp(0, piece.end - piece.start - 1)
                found = torch.where(inside, scan.x[at], found)
        return StateRows(found, self.ssm.D, rows, state.ssm)


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
        return self.out_proj(gated_norm(y.flatten(1), z, norm.weight, norm.eps, self.num_groups, self.group))
