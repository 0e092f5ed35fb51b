"""Scales of int8 weights, and the factors that move an activation's outliers into the weights behind it."""

from __future__ import annotations

import math

import torch

from nanovllm.kernels.quantize import quantize_tokens

# The integers that a row's largest weight is tried as.
_LARGEST = range(127, 111, -1)
_ALPHAS = (0.25, 0.5, 0.75)
_ELEMENTS = 1 << 24  # of float32 temporaries at once
_MAX_EXPONENT = 3  # of a smoothing factor: a channel that the calibration text leaves silent is not lost


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 weights with the scale per output channel that minimises the squared error.

    A row's largest weight is tried as 127, 126, ..., 112 steps, so that it is hit exactly: it is often the one that
    meets an outlier of the activations, and clipping it shrinks all outputs alike (docs/quantization.md). For each the
    integers q follow, and the best scale for them, <w, q> / <q, q>. Sums are float64, so that a CPU and a GPU agree.

    Args:
        weight: [N, K], any float dtype.

    Returns:
        int8 [N, K] in [-127, 127] and float32 [N], positive; a row of zeros gets the scale 1.

    Raises:
        ValueError: a weight is not finite.
    """
    pieces = [_quantize_rows(rows.float()) for rows in weight.split(max(1, _ELEMENTS // max(1, weight.shape[1])))]
    qweight, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    if not scales.isfinite().all():
        raise ValueError("a weight to be quantized is not finite")
    return qweight, scales


def dequantize(qweight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[N, K] int8 and [N] scales to float32 [N, K]."""
    return qweight.float() * scales[:, None]


def _quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = weight.abs().amax(1) if weight.shape[1] else weight.new_zeros(len(weight))
    best = torch.full_like(largest, -1.0, dtype=torch.float64)
    starts = torch.ones_like(largest)
    for steps in _LARGEST:
        start = torch.where(largest / steps == 0, 1.0, largest / steps)
        gain = _fit(weight, start)[2]
        starts = torch.where(gain > best, start, starts)
        best = torch.maximum(gain, best)
    q, scales, _ = _fit(weight, torch.where(largest.isfinite(), starts, largest))
    return q.to(torch.int8), scales


def _fit(weight: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers for a scale, the best scale for those integers, and by how much the two lower the squared error."""
    q = (weight / start[:, None]).round_().clamp_(-127, 127)
    products = (weight * q).sum(1, dtype=torch.float64)
    squares = q.square().sum(1, dtype=torch.float64)
    some = squares > 0
    return q, torch.where(some, products / squares, start).float(), torch.where(some, products**2 / squares, 0)


def choose_smoothing(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The smoothing factors, if any, with which int8 activations and weights give the smallest error of x W^T.

    Args:
        x: [T, K], a sample of a layer's inputs.
        weight: [N, K].

    Returns:
        [K] float32 as of `smoothing_factors` with the best of a few alphas, or ones.
    """
    x, weight = x.float(), weight.float()
    exact = x @ weight.T
    size = exact.square().sum(1)
    size = torch.maximum(size, 1e-6 * size.mean()) + torch.finfo(torch.float32).tiny
    best, chosen = math.inf, torch.ones_like(x[0])
    rms = x.square().mean(0).sqrt(), weight.square().mean(0).sqrt()
    for factors in [chosen, *(smoothing_factors(*rms, alpha) for alpha in _ALPHAS)]:
        inputs = quantize_tokens(x / factors)
        product = (inputs.values.float() * inputs.scales[:, None]) @ dequantize(*quantize_weight(weight * factors)).T
        error = ((product - exact).square().sum(1) / size).mean().item()  # each token counts, not the loudest alone
        if error < best:
            best, chosen = error, factors
    return chosen


def smoothing_factors(inputs: torch.Tensor, weights: torch.Tensor, alpha: float) -> torch.Tensor:
    """Factors s of SmoothQuant (arXiv 2211.10438): x / s is easier to quantize than x, and W s takes it back.

    They are powers of two, so that dividing and multiplying round nothing, in any dtype; and they are taken relative to
    their median, because a common factor changes nothing.

    Args:
        inputs: [K] float32, the size of each channel of x.
        weights: [K] float32, the size of each input channel of W.
        alpha: how much of the outliers goes to the weights, 0 to 1.

    Returns:
        [K] float32; 1 where a channel of x or W is all zeros.
    """
    known = (inputs > 0) & (weights > 0)
    if not known.any():
        return torch.ones_like(inputs)
    exponents = alpha * inputs.log2() - (1 - alpha) * weights.log2()
    exponents = (exponents - exponents[known].median()).round().clamp(-_MAX_EXPONENT, _MAX_EXPONENT)
    powers = inputs.new_tensor([2.0**e for e in range(-_MAX_EXPONENT, _MAX_EXPONENT + 1)])
    return powers[torch.where(known, exponents + _MAX_EXPONENT, _MAX_EXPONENT).long()]
