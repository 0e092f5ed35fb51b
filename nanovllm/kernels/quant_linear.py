"""Linear layers whose weights are int8 with one scale per output channel: W8A16 (`int8`) and W8A8 (`w8a8`).

Which kernel with which tiles serves a shape stands in quant_linear_configs.json: chip ("90" for compute capability
9.0), method, the largest M it is for, "NxK", then the kernel's name and its numbers in the order of FIELDS. A shape
that is not listed takes the nearest. scripts/tune_quant_linear.py measures them.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import torch

from nanovllm.distributed import ALONE, Group
from nanovllm.kernels.choice import overlaps_launches, twin
from nanovllm.kernels.quantize import QuantizedActivation, quantize_tokens

CONFIGS = Path(__file__).with_name("quant_linear_configs.json")
FIELDS = {
    "vector": ("BLOCK_N", "BLOCK_K", "num_warps"),
    "tile": ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SLICES", "SPLIT_K", "num_warps", "num_stages"),
    "dequantize": ("ROWS",),
}
BUCKETS = (1, 16, 32, 64, 128, 256, 512, 1024, 4096)


def int8_linear_ref(
    x: torch.Tensor, qweight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x (qweight * scales)^T + bias, accumulated and scaled in float32; x holds floats, the rest is as in
    `int8_linear`."""
    y = (x.float() @ qweight.float().T) * scales
    return (y if bias is None else y + bias.float()).to(x.dtype)


def w8a8_linear_ref(
    x: QuantizedActivation,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    group: Group = ALONE,
) -> torch.Tensor:
    """The integer product exactly, over all ranks, then the scales in float32; arguments as of `w8a8_linear`."""
    if qweight.is_cuda or qweight.shape[1] == 1:
        # torch's integer product takes few shapes on a GPU and is wrong for K = 1 on a CPU (seen with 2.13); float64
        # holds each sum exactly.
        product = x.values.double() @ qweight.double().T
    else:
        product = torch._int_mm(x.values, qweight.T)
    y = group.all_reduce(product).float() * scales * x.scales[:, None]
    return (y if bias is None else y + bias.float()).to(x.dtype)


def int8_linear_digits(num_rows: int, dtype: torch.dtype, qweight: torch.Tensor) -> int:
    """To how many int8 digits `int8_linear` quantizes x [num_rows, K] of `dtype`; 0 where it multiplies floats."""
    if not qweight.is_cuda or dtype.itemsize != 2 or twin("quant_linear") is None:
        return 0
    kernel = config_for("int8", num_rows, *qweight.shape, _capability(qweight.device))["kernel"]
    return 0 if kernel == "dequantize" else 2


def int8_linear(
    x: torch.Tensor | QuantizedActivation, qweight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x times int8 weights with a scale per output channel.

    Args:
        x: [M, K], 16- or 32-bit floats; or `int8_linear_digits` digits of them, where that is not 0.
        qweight: int8 [N, K].
        scales: float32 [N].
        bias: [N] or None.

    Returns:
        [M, N] in x's dtype.

    Raises:
        ValueError: for shapes or types that do not fit together.
    """
    _check(x, qweight, scales, bias)
    digits = int8_linear_digits(x.shape[0], x.dtype, qweight)
    if digits:
        x = x if isinstance(x, QuantizedActivation) else quantize_tokens(x, digits)
        return _launch("int8", x.values, x.scales, qweight, scales, bias, x.dtype)
    if not qweight.is_cuda or x.dtype.itemsize != 2 or twin("quant_linear") is None:
        return int8_linear_ref(x, qweight, scales, bias)
    return _launch("int8", x.contiguous(), None, qweight, scales, bias, x.dtype)


def w8a8_linear(
    x: QuantizedActivation,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    group: Group = ALONE,
) -> torch.Tensor:
    """Quantized activations of one digit times int8 weights, summed in int32; arguments and errors as in
    `int8_linear`, the result in x.dtype. `group`: ranks that each have some of the K columns, and get the sum of all.
    """
    if x.values.dtype != torch.int8 or x.scales.shape != x.values.shape[:-1]:
        raise ValueError(
            f"w8a8_linear needs int8 values [M, K] with scales [M], got {x.values.dtype} {list(x.values.shape)} "
            f"with {list(x.scales.shape)}"
        )
    _check(x, qweight, scales, bias)
    if not qweight.is_cuda or twin("quant_linear") is None:
        return w8a8_linear_ref(x, qweight, scales, bias, group)
    bias = bias if group.rank == 0 else None
    return group.all_reduce(_launch("w8a8", x.values.contiguous(), x.scales, qweight, scales, bias, x.dtype))


def _launch(
    method: str,
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    config = config_for(method, x.shape[0], *qweight.shape, _capability(x.device))
    overlap = overlaps_launches(x.device)
    return twin("quant_linear").linear(x, x_scales, qweight, scales, bias, dtype, config, overlap)


def kernel_path(method: str, device: torch.device) -> str:
    """One line for the log: which kernels serve a layer of `method` ("int8", "w8a8") on that device."""
    if device.type != "cuda" or twin("quant_linear") is None:
        return "torch reference" if device.type != "cuda" else "torch reference: triton is not installed"
    table = chip_table(_capability(device))[method]
    slices = [m for m in BUCKETS if any(config[0] == "dequantize" for config in table[str(m)].values())]
    name = {"int8": "Triton W8A16, activations as two int8 digits", "w8a8": "Triton W8A8, int8 matrix units"}[method]
    if not slices:
        return name
    below = max((m for m in BUCKETS if m < slices[0]), default=0)
    some = any(config[0] != "dequantize" for m in BUCKETS if m > below for config in table[str(m)].values())
    return f"{name} up to M={below}; above, {'for some shapes ' if some else ''}dequantized in slices for cuBLAS"


@functools.cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def chip_table(capability: int) -> dict:
    """The chip's part of the file: choices by method, largest M and shape. A chip that is not there takes the part of
    the nearest older one with no more shared memory."""
    chips = json.loads(CONFIGS.read_text())
    known = [int(chip) for chip in chips if int(chip) <= capability and not (chip == "90" and capability >= 120)]
    return chips[str(max(known, default=80))]


def config_for(method: str, m: int, n: int, k: int, capability: int) -> dict:
    """What `linear` of the Triton file takes for a shape; the vector kernel reads W in words of four numbers."""
    m = 2 if m == 1 and k % 4 else m
    return _config(method, next((bucket for bucket in BUCKETS if m <= bucket), BUCKETS[-1]), n, k, capability)


@functools.cache
def _config(method: str, bucket: int, n: int, k: int, capability: int) -> dict:
    shapes = chip_table(capability)[method][str(bucket)]

    def distance(name: str) -> float:
        their_n, their_k = map(int, name.split("x"))
        return abs(math.log(n / their_n)) + abs(math.log(k / their_k))

    kernel, *numbers = shapes[min(shapes, key=distance)]
    return {"kernel": kernel, **dict(zip(FIELDS[kernel], numbers, strict=True))}


def _check(
    x: torch.Tensor | QuantizedActivation, qweight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """ValueError unless the shapes fit: scales of [1, N] or [N, 1] would broadcast to something else."""
    if qweight.dtype != torch.int8 or qweight.dim() != 2 or not qweight.is_contiguous():
        raise ValueError(f"qweight must be int8 [N, K] and contiguous, got {qweight.dtype} {list(qweight.shape)}")
    n, k = qweight.shape
    if len(x.shape) != 2 or x.shape[1] != k:
        raise ValueError(f"x must be [M, {k}] for qweight {[n, k]}, got {list(x.shape)}")
    if scales.shape != (n,) or scales.dtype != torch.float32:
        raise ValueError(f"scales must be float32 [{n}], got {scales.dtype} {list(scales.shape)}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias must be [{n}], got {list(bias.shape)}")
