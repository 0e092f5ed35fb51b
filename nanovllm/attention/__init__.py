"""Attention backends behind one interface, and the choice between them."""

from __future__ import annotations

import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.torch import TorchAttention
from nanovllm.platform import has_flash_attn


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> tuple[AttentionBackend, str]:
    """The backend called `name` and why it was taken; "auto" takes flash where it can run, else torch.

    Raises:
        ValueError: `name` is "flash" and it cannot run here.
    """
    usable, reason = has_flash_attn()
    if device.type != "cuda":
        usable, reason = False, f"device is {device.type}"
    elif usable and dtype == torch.float32:
        usable, reason = False, "flash-attn takes no float32"
    if name == "flash" and not usable:
        raise ValueError(f"attention_backend='flash' cannot be used: {reason}; use attention_backend='torch'")
    if name == "torch":
        return TorchAttention(), "asked for"
    if not usable:
        return TorchAttention(), reason
    from nanovllm.attention.flash import FlashAttention

    return FlashAttention(), reason
