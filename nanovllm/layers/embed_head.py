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
        """[R, dim] to [R, vocab_size], in `out` if given; see `empty_logits`."""
        out = empty_logits(len(hidden), len(self.weight), hidden.dtype, hidden.device) if out is None else out
        return linear(hidden, self.weight, None, out)


def empty_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[num_rows, vocab_size], uninitialised. Rows begin at multiples of 16 bytes: of a vocabulary of an odd size the
    library's matrix products would otherwise be several times slower."""
    return torch.empty(num_rows, -(-vocab_size // 8) * 8, dtype=dtype, device=device)[:, :vocab_size]
