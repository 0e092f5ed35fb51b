"""From an operation to its Triton twin."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType


@functools.cache
def twin(name: str) -> ModuleType | None:
    """Module `<name>_triton` of this folder, or None where triton is not installed; looked up once."""
    try:
        return importlib.import_module(f"nanovllm.kernels.{name}_triton")
    except ImportError:
        return None
