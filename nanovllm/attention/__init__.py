"""Attention backends behind one interface, and the choice between them."""

from __future__ import annotations

# By name: `torch` itself is in this package the backend of that name, once that is imported.
from torch import device as Device
from torch import dtype as DType
from torch import float32

from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.torch import TorchAttention
from nanovllm.attention.triton import TritonAttention
from nanovllm.platform import has_package

# In the order in which "auto" tries them (docs/performance.md has the measurements), with the package each needs.
_PACKAGES = {"triton": "triton", "flash": "flash_attn"}


def choose_backend(name: str, device: Device, dtype: DType) -> tuple[AttentionBackend, str]:
    """The backend called `name` and why it was taken; "auto" takes the first that can run here.

    Raises:
        ValueError: `name` cannot run here; says why.
    """
    reasons = []
    for candidate, package in _PACKAGES.items():
        if name in ("auto", candidate):
            usable, reason = _usable(package, device, dtype)
            if usable:
                return _make(candidate), reason
            reasons.append(f"{candidate}: {reason}")
    if name not in ("auto", "torch"):
        raise ValueError(f"attention_backend={name!r} cannot be used ({reasons[0]}); use attention_backend='torch'")
    return TorchAttention(), "; ".join(reasons) or "asked for"


def _usable(package: str, device: Device, dtype: DType) -> tuple[bool, str]:
    if device.type != "cuda":
        return False, f"device is {device.type}"
    if dtype == float32:
        return False, "takes no float32"
    return has_package(package)


def _make(name: str) -> AttentionBackend:
    if name == "triton":
        return TritonAttention()
    # Its module imports the package, which is optional.
    from nanovllm.attention.flash import FlashAttention

    return FlashAttention()
