"""From an operation to its Triton twin."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch


@functools.cache
def twin(name: str) -> ModuleType | None:
    """Module `<name>_triton` of this folder, or None where triton is not installed; looked up once."""
    try:
        return importlib.import_module(f"nanovllm.kernels.{name}_triton")
    except ImportError:
        return None


@functools.cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel there may be launched while the one before it still runs, and wait inside for its results
    (programmatic dependent launch, Hopper and later): start-up and constant data are then loaded in its shadow."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
