"""Log probabilities of chosen and most likely tokens, without a copy of the logits.

Works on the block maxima and sums of `sampling_triton.py`; beyond these it reads one block for each token it lists.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_INF = tl.constexpr(float("inf"))
_NO_ID = tl.constexpr(2147483647)


@triton.jit
def _logprob_kernel(
    logits_ptr, token_ptr, max_ptr, arg_ptr, sum_ptr, chosen_ptr, top_id_ptr, top_ptr,
    V, num_blocks, num_top, logits_stride, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Log probabilities of one row's token and of its most likely ones: the largest block maximum is the next of
    them, and its block's maximum becomes what follows it there."""
    r = tl.program_id(0).to(tl.int64)
    logits_ptr += r * logits_stride
    index = tl.arange(0, BLOCKS)
    real = index < num_blocks
    maxes = tl.load(max_ptr + r * num_blocks + index, mask=real, other=-_INF)
    args = tl.load(arg_ptr + r * num_blocks + index, mask=real, other=_NO_ID)
    sums = tl.load(sum_ptr + r * num_blocks + index, mask=real, other=0.0)
    best = tl.max(maxes, 0)
    normaliser = best + tl.log(tl.sum(sums * tl.exp(maxes - best), 0))
    # inf - inf: a NaN for a row whose largest logit is not finite.
    normaliser = tl.where((best > -_INF) & (best < _INF), normaliser, best - best)
    chosen = tl.load(logits_ptr + tl.maximum(tl.load(token_ptr + r), 0)).to(tl.float32)
    tl.store(chosen_ptr + r, chosen - normaliser)
    for i in range(num_top):
        best = tl.max(maxes, 0)
        token = tl.min(tl.where(maxes == best, args, _NO_ID), 0)
        tl.store(top_id_ptr + r * num_top + i, token.to(tl.int64))
        tl.store(top_ptr + r * num_top + i, best - normaliser)
        block = token // BLOCK
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + ids, mask=ids < V, other=-_INF).to(tl.float32)
        x = tl.where(x != x, _INF, x)
        left = (ids < V) & ((x < best) | ((x == best) & (ids > token)))
        x = tl.where(left, x, -_INF)
        top = tl.max(x, 0)
        maxes = tl.where(index == block, top, maxes)
        args = tl.where(index == block, tl.min(tl.where(left & (x == top), ids, _NO_ID), 0), args)


def token_logprobs(
    logits: Tensor, block: int, stats: tuple[Tensor, Tensor, Tensor], token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels/sampling.py`; stats: of `block_stats` in `sampling_triton.py`, with sums at temperature 1."""
    num_rows, vocab_size = logits.shape
    maxes, args, sums = stats
    num_blocks = maxes.shape[1]
    chosen = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    top_ids = torch.empty((num_rows, num_top), dtype=torch.int64, device=logits.device)
    top = torch.empty((num_rows, num_top), dtype=torch.float32, device=logits.device)
    _logprob_kernel[(num_rows,)](
        logits, token_ids, maxes, args, sums, chosen, top_ids, top, vocab_size, num_blocks, num_top, logits.stride(0),
        BLOCK=block, BLOCKS=triton.next_power_of_2(num_blocks), num_warps=4,
    )  # fmt: skip
    return chosen, top_ids, top
