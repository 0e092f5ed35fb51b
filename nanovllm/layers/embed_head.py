"""Token embedding and the head that turns hidden states into logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels.linear import linear


class Embedding(nn.Module):
    """Rows of a [vocab_size, dim] matrix; `logits` uses the same matrix where head and embedding are tied."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 to [T, dim]."""
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[R, dim] to [R, vocab_size], in `out` if given."""
        return linear(hidden, self.weight, None, out)
