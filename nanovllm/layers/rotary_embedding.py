"""Tables of rotary angles, with the scalings that long-context checkpoints ask for."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Rotary(NamedTuple):
    """Tables [P, D] of cos and sin (the first half of the sines negated), and which of their rows a step's T tokens
    take: positions [T] int64."""

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor


class RotaryEmbedding(nn.Module):
    """cos and sin for positions 0 .. max_positions - 1.

    Args:
        head_dim: D, size of a head.
        max_positions: rows of the table.
        rope: rope parameters as transformers 5 keeps them: "rope_type", "rope_theta" and those of the scaling.
        dtype: of the activations to be rotated; angles are computed in float32.
    """

    def __init__(self, head_dim: int, max_positions: int, rope: dict, dtype: torch.dtype) -> None:
        super().__init__()
        inv_freq, magnitude = _inverse_frequencies(head_dim, rope)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32, device="cpu"), inv_freq)
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        self.register_buffer("cos", torch.cat((cos, cos), -1).to(dtype), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), -1).to(dtype), persistent=False)

    def at(self, positions: torch.Tensor) -> Rotary:
        """The tables together with the [T] int64 positions of a step's tokens."""
        return Rotary(self.cos, self.sin, positions)


def _inverse_frequencies(head_dim: int, rope: dict) -> tuple[torch.Tensor, float]:
    """Angle per position of each of the D/2 pairs, and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq = 1.0 / rope["rope_theta"] ** exponents
    if rope["rope_type"] == "linear":
        return inv_freq / rope["factor"], 1.0
    if rope["rope_type"] == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if rope["rope_type"] == "yarn":
        return _yarn(inv_freq, head_dim, rope)
    return inv_freq, 1.0


def _llama3(inv_freq: torch.Tensor, rope: dict) -> torch.Tensor:
    """Llama 3.1's scaling: slow pairs are divided by the factor, fast ones kept, those between blended."""
    turns = rope["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * keep + inv_freq / rope["factor"] * (1 - keep)


def _yarn(inv_freq: torch.Tensor, head_dim: int, rope: dict) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): "NTK by parts" interpolation, and its attention temperature on cos and sin."""
    factor = rope["factor"]

    def pair_with(turns: float) -> float:
        """Index of the pair that makes this many turns within the original context."""
        positions = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return head_dim * math.log(positions) / (2 * math.log(rope["rope_theta"]))

    low, high = pair_with(rope.get("beta_fast") or 32), pair_with(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    interpolate = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    scaled = inv_freq / factor * interpolate + inv_freq * (1 - interpolate)
    return scaled, _yarn_magnitude(rope)


def _yarn_magnitude(rope: dict) -> float:
    """Factor on cos and sin: stated, or from the factor, or the ratio of two such for models with `mscale`."""
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return magnitude(1.0)
