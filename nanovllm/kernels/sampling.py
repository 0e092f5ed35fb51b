"""Drawing the next token. The noise depends on (seed, position, token id or block) alone, so a request's tokens do not
depend on who else is in the batch, on the batch's order, or on whether it was preempted.

A draw has two steps, which together are exact: one of at most 256 blocks of neighbouring token ids is drawn by the
blocks' probabilities, then a token of that block. So noise is needed for a thousand numbers of a row and not for all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.choice import twin

Filters = tuple[Tensor, Tensor, Tensor]  # top_k, top_p, min_p

_GREEDY = 1e-5
_MAX_BLOCKS = 256
_MIN_BLOCK = 256


def block_size(vocab_size: int) -> int:
    """Token ids per block: a power of two, the same for every batch of a model."""
    return max(_MIN_BLOCK, 1 << (-(-vocab_size // _MAX_BLOCKS) - 1).bit_length())


def _mix32(x: Tensor) -> Tensor:
    """Avalanche of 32-bit words held in int64 (the finalizer of MurmurHash3): every input bit flips about half
    of the output bits."""
    mask = 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & mask
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & mask
    return x ^ (x >> 16)


def exponential_noise_ref(seed: Tensor, position: Tensor, counters: Tensor) -> Tensor:
    """Counter-based Exp(1) noise.

    Args:
        seed: [R] int64, 0 <= seed < 2**63.
        position: [R] int64, index of the token to be drawn.
        counters: [M] or [R, M] int64: token ids, or 2**32 - 1 - b for block b.

    Returns:
        [R, M] float32, positive and finite.
    """
    low = _mix32((seed & 0xFFFFFFFF) ^ _mix32(position & 0xFFFFFFFF))
    high = _mix32(((seed >> 32) + 0x9E3779B9 * (position + 1)) & 0xFFFFFFFF)
    words = _mix32(_mix32(counters ^ low[:, None]) ^ high[:, None])
    # The draw is decided by the smallest values, so the uniform is kept near 0, where float32 is dense.
    uniform = ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24)
    return -torch.log1p(-uniform)


def filter_logits_ref(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set the logits of dropped tokens to -inf: min-p first, then top-k, then top-p of what is left.

    Of equal logits, where only some can stay, those with the smaller ids do; so top_k = 1 is greedy.

    Args:
        logits: [R, V] float32, already divided by the temperature.
        top_k: [R] int, <= 0 keeps all.
        top_p, min_p: [R] float32.

    Returns:
        [R, V]; the most likely token of a row is always kept.
    """
    vocab_size = logits.shape[-1]
    floor = logits.amax(-1, keepdim=True) + torch.log(min_p)[:, None]
    ordered, order = logits.masked_fill(logits < floor, -torch.inf).sort(dim=-1, descending=True, stable=True)
    keep_k = torch.where(top_k <= 0, vocab_size, top_k)[:, None]
    rank = torch.arange(vocab_size, device=logits.device)[None]
    ordered = ordered.masked_fill(rank >= keep_k, -torch.inf)
    probs = ordered.softmax(-1)
    # A token stays when the ones before it have not reached top_p yet; 1.0 must keep all despite rounding.
    before = probs.cumsum(-1) - probs
    drop = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    drop[:, 0] = False
    return torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(drop, -torch.inf))


def penalize_ref(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """Logits after repetition (arXiv 1909.05858), frequency and presence penalties.

    Args:
        logits: [R, V] float32.
        prompt_mask: [R, V] bool, token occurs in the prompt.
        output_counts: [R, V] int, times the token was generated.
        presence, frequency, repetition: [R] float32.
    """
    generated = output_counts > 0
    factor = torch.where(generated | prompt_mask, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * output_counts - presence[:, None] * generated


def sample_ref(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, filters: Filters | None) -> Tensor:
    """Draw one token per row from softmax(logits / temperature); temperature 0 is the argmax. Both steps of a draw are
    the argmax of an exponential race, log(weight) - log(noise), which is exact (the Gumbel-max trick).

    Args:
        logits: [R, V] float32.
        temperature: [R] float32.
        seed, position: [R] int64.
        filters: (top_k, top_p, min_p), each [R], or None where no row filters.

    Returns:
        [R] int64; -1 for a row whose logits are not finite.
    """
    greedy = temperature < _GREEDY
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    if filters is not None:
        scaled = filter_logits_ref(scaled, *filters)
    size = block_size(logits.shape[1])
    blocks = F.pad(scaled, (0, -logits.shape[1] % size), value=-torch.inf).unflatten(1, (-1, size))
    counters = 0xFFFFFFFF - torch.arange(blocks.shape[1], device=logits.device)
    block = (blocks.logsumexp(-1) - exponential_noise_ref(seed, position, counters).log()).argmax(-1, keepdim=True)
    inside = blocks.take_along_dim(block[:, :, None], 1)[:, 0]  # [R, size]
    ids = block * size + torch.arange(size, device=logits.device)
    drawn = (inside - exponential_noise_ref(seed, position, ids).log()).argmax(-1) + ids[:, 0]
    best, best_id = logits.max(-1)
    return torch.where(best.isfinite(), torch.where(greedy, best_id, drawn), -1)


def greedy_ref(logits: Tensor) -> Tensor:
    """Largest logit per row of [R, V], as [R] int64; -1 for a row whose logits are not finite."""
    best, best_id = logits.max(-1)
    return torch.where(best.isfinite(), best_id, -1)


def token_logprobs_ref(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities without keeping a normalised copy of the logits.

    Args:
        logits: [R, V] float32.
        token_ids: [R] int64; -1 is read as 0.
        num_top: k.

    Returns:
        logprob of token_ids [R], ids of the k most likely tokens [R, k], their logprobs [R, k]; the logprobs are NaN
        for a row whose logits are not finite.
    """
    normaliser = logits.logsumexp(-1, keepdim=True)
    normaliser = normaliser.masked_fill(~normaliser.isfinite(), torch.nan)
    chosen = logits.gather(-1, token_ids.clamp_min(0)[:, None]) - normaliser
    top, top_ids = logits.topk(num_top, dim=-1)
    return chosen[:, 0], top_ids, top - normaliser


def sample(
    logits: Tensor, rows: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, filters: Filters | None
) -> Tensor:
    """`sample_ref` with each row's parameters looked up on the device, by kernels where there are some.

    Nothing is read back and no shape depends on a value, so a CUDA graph can hold it.

    Args:
        logits: [R, V], any float dtype; rows may lie apart. Read as they are: no float32 copy is made.
        rows: [R] int64, where in the [N] vectors below a row's parameters are; negative for padding, whose token
            means nothing.
        temperature: [N] float32.
        seed, position: [N] int64, contiguous.
        filters: (top_k [N] int32, top_p [N] float32, min_p [N] float32), or None where no row filters.

    Returns:
        [R] int64; -1 for a row whose logits are not finite.
    """
    kernels = twin("sampling") if logits.is_cuda and len(rows) else None
    if kernels is not None:
        return kernels.sample(logits, block_size(logits.shape[1]), (rows, temperature, seed, position), filters)
    rows = rows.clamp_min(0)
    own = None if filters is None else tuple(values[rows] for values in filters)
    return sample_ref(logits.float(), temperature[rows], seed[rows], position[rows], own)


def greedy(logits: Tensor) -> Tensor:
    """`greedy_ref` of [R, V] logits of any float dtype, by kernels where there are some; the first of equals."""
    kernels = twin("sampling") if logits.is_cuda and len(logits) else None
    return greedy_ref(logits) if kernels is None else kernels.sample(logits, block_size(logits.shape[1]), None, None)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """`token_logprobs_ref` of logits of any float dtype, by kernels where there are some."""
    kernels = twin("sampling") if logits.is_cuda and len(logits) else None
    if kernels is None:
        return token_logprobs_ref(logits.float(), token_ids, num_top)
    block = block_size(logits.shape[1])
    stats = kernels.block_stats(logits, block, None, None, True)
    return twin("logprobs").token_logprobs(logits, block, stats, token_ids, num_top)
