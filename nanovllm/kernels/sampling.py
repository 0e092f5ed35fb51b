"""Drawing the next token. The noise depends on (seed, position, token id) alone, so a request's tokens do not
depend on who else is in the batch, on the batch's order, or on whether it was preempted."""

from __future__ import annotations

from types import ModuleType

import torch

from nanovllm.kernels.choice import twin

_GREEDY = 1e-5


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """Avalanche of 32-bit words held in int64 (the finalizer of MurmurHash3): every input bit flips about half
    of the output bits."""
    mask = 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & mask
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & mask
    return x ^ (x >> 16)


def exponential_noise_ref(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Counter-based Exp(1) noise.

    Args:
        seed: [R] int64, 0 <= seed < 2**63.
        position: [R] int64, index of the token to be drawn.
        vocab_size: V.

    Returns:
        [R, V] float32, positive and finite.
    """
    low = _mix32((seed & 0xFFFFFFFF) ^ _mix32(position & 0xFFFFFFFF))
    high = _mix32(((seed >> 32) + 0x9E3779B9 * (position + 1)) & 0xFFFFFFFF)
    ids = torch.arange(vocab_size, device=seed.device)
    words = _mix32(_mix32(ids[None] ^ low[:, None]) ^ high[:, None])
    # The draw is decided by the smallest values, so the uniform is kept near 0, where float32 is dense.
    uniform = ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24)
    return -torch.log1p(-uniform)


def filter_logits_ref(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
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
    logits: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
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


def sample_ref(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Draw one token per row from softmax(logits / temperature): argmax of the exponential race logits - log(e),
    which is exact (the Gumbel-max trick); temperature 0 is the argmax itself.

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
    noise = exponential_noise_ref(seed, position, logits.shape[-1])
    drawn = (scaled - noise.log()).argmax(-1)
    best, best_id = logits.max(-1)
    return torch.where(best.isfinite(), torch.where(greedy, best_id, drawn), -1)


def greedy_ref(logits: torch.Tensor) -> torch.Tensor:
    """Largest logit per row of [R, V], as [R] int64; -1 for a row whose logits are not finite."""
    best, best_id = logits.max(-1)
    return torch.where(best.isfinite(), best_id, -1)


def token_logprobs_ref(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities without keeping a normalised copy of the logits.

    Args:
        logits: [R, V] float32.
        token_ids: [R] int64; -1 is read as 0.
        num_top: k.

    Returns:
        logprob of token_ids [R], ids of the k most likely tokens [R, k], their logprobs [R, k].
    """
    normaliser = logits.logsumexp(-1, keepdim=True)
    # Where the largest logit is not finite nothing can be said: NaN, and not 0 or -inf for some of the row.
    normaliser = normaliser.masked_fill(~normaliser.isfinite(), torch.nan)
    chosen = logits.gather(-1, token_ids.clamp_min(0)[:, None]) - normaliser
    top, top_ids = logits.topk(num_top, dim=-1)
    return chosen[:, 0], top_ids, top - normaliser


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
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
    twins = _twins() if logits.is_cuda and len(rows) else None
    if twins is None:
        rows = rows.clamp_min(0)
        own = None if filters is None else (filters[0][rows], filters[1][rows], filters[2][rows])
        return sample_ref(logits.float(), temperature[rows], seed[rows], position[rows], own)
    race, thresholds, _ = twins
    if filters is None:
        stats, bounds = race.block_stats(logits, None, None, False), None
    else:
        stats = race.block_stats(logits, rows, temperature, True)
        bounds = thresholds.thresholds(logits, stats, rows, temperature, *filters)
    return race.draw(logits, stats, bounds, rows, temperature, seed, position)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """`greedy_ref` of [R, V] logits of any float dtype, by kernels where there are some; the first of equals."""
    twins = _twins() if logits.is_cuda and len(logits) else None
    return greedy_ref(logits) if twins is None else twins[0].greedy(logits)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`token_logprobs_ref` of logits of any float dtype, by kernels where there are some; NaN for a row whose logits
    are not finite."""
    twins = _twins() if logits.is_cuda and len(logits) else None
    if twins is None:
        return token_logprobs_ref(logits.float(), token_ids, num_top)
    return twins[2].token_logprobs(logits, twins[0].block_stats(logits, None, None, True), token_ids, num_top)


def _twins() -> tuple[ModuleType, ModuleType, ModuleType] | None:
    if twin("sampling") is None:
        return None
    return twin("sampling"), twin("sampling_filter"), twin("logprobs")
