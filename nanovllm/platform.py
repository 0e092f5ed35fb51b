"""What this machine offers: device, dtype, memory, optional packages, each answer with its reason."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext

import torch


def resolve_device(name: str, rank: int = 0) -> torch.device:
    """Device for `name` ("auto", "cpu", "cuda", "cuda:N"), of a machine's first rank; each next one has the next GPU.

    Raises:
        ValueError: CUDA was asked for and is not there, or has fewer devices.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device={name!r} is not available: torch sees no CUDA device; use device='cpu'")
    first = 0 if name in ("auto", "cuda") else torch.device(name).index
    device = torch.device("cuda", first + rank)
    if rank and device.index >= torch.cuda.device_count():
        raise ValueError(
            f"rank {rank} of this machine needs GPU {device.index}, and torch sees {torch.cuda.device_count()} CUDA "
            f"device(s): lower tensor_parallel_size"
        )
    if device.index >= torch.cuda.device_count():
        raise ValueError(f"device={name!r} is not available: torch sees {torch.cuda.device_count()} CUDA device(s)")
    return device


def cpu_has_bf16_units() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16 or AMX), so that bf16 halves the time of a
    matrix-vector product instead of doubling it."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def resolve_dtype(name: str, checkpoint_dtype: str | None, device: torch.device) -> torch.dtype:
    """Dtype of weights and activations.

    "auto" is the checkpoint's own dtype on a GPU (bfloat16 where it states none), and on a CPU float32, except
    that a bfloat16 checkpoint stays bfloat16 on a CPU with bf16 units.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return getattr(torch, checkpoint_dtype or "bfloat16")
    return torch.bfloat16 if checkpoint_dtype == "bfloat16" and cpu_has_bf16_units() else torch.float32


def has_package(package: str) -> tuple[bool, str]:
    """Whether an optional package is installed, and that as a reason."""
    found = importlib.util.find_spec(package) is not None
    return found, f"package {package} is {'' if found else 'not '}installed"


def cpu_memory() -> int:
    """Bytes of RAM of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def held_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that this process has in use on the device, and that torch keeps for it; nothing is counted on a CPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


def as_current(device: torch.device) -> AbstractContextManager:
    """Make `device` the current one, on which kernels are launched and graphs captured; nothing to do for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Give memory that torch holds but nobody uses back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
