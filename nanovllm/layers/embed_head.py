"""Token embedding and the head that turns hidden states into logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm import distributed
from nanovllm.distributed import Place
from nanovllm.kernels.linear import linear


class Embedding(nn.Module):
    """Rows of a [vocab_size, dim] matrix; `logits` uses the same matrix where head and embedding are tied.

    Each rank of a group has equally many rows, a multiple of eight: cuBLAS is several times slower at an odd number.
    Behind the last token's there may be some that mean nothing.
    """

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.group = distributed.current()
        self.rows, room = self.group.padded_cut(vocab_size)
        self.weight = nn.Parameter(torch.empty(room, dim), requires_grad=False)

    def place(self, param: torch.Tensor) -> Place:
        """Where the tensor of a checkpoint goes."""
        return Place(param[: self.rows.size], (self.rows,))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 to [T, dim]."""
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        own = token_ids - self.rows.slices[0][0]
        others = (own < 0) | (own >= self.rows.size)
        found = F.embedding(own.masked_fill(others, 0), self.weight)
        return self.group.all_reduce(found.masked_fill(others[:, None], 0))

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[R, dim] to [R, vocab_size], a view of `out` if given (see `empty_logits`); every rank gets all of them, to
        the bit."""
        if self.group.size == 1:
            return linear(hidden, self.weight, None, out)[:, : self.rows.total]
        logits = self.group.all_gather(linear(hidden, self.weight, None))[:, : self.rows.total]
        return logits if out is None else out[:, : self.rows.total].copy_(logits)


def empty_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[num_rows, vocab_size or up to seven more], uninitialised: as wide as what one rank's head computes."""
    return torch.empty(num_rows, -(-vocab_size // 8) * 8, dtype=dtype, device=device)
