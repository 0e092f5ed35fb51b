"""Drawing tokens from [R, V] logits of any float dtype, computed in float32, spread over the device also for R = 1.

A row is cut into at most 256 blocks; later steps read only those that can matter:

1. `block_stats`: each block's maximum, where it is, and (for top-p and log probabilities) its sum of exponentials.
2. `thresholds` of `sampling_filter_triton.py`, where rows filter: the smallest logit a row keeps.
3. `draw`: the exponential race among the blocks that can hold the winner, then one token per row.

Bytes moved for logits of s bytes: R V s in 1. In 3 at most that again; next to nothing where the largest logit / T
leads the others by 23, which is what the noise can make up for. The rest is 12 bytes a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MAX_BLOCKS = 256
_MIN_BLOCK = 256
# From so many programs on, each takes several blocks: starting one costs about what a block does.
_STATS_PROGRAMS = 8192
# Logits at a time, and programs in all, of the race.
_RACE_TILE = 1024
_RACE_PROGRAMS = 2048

_INF = tl.constexpr(float("inf"))
_GREEDY = tl.constexpr(1e-5)
# More than -log of the smallest noise, which is 2**-33.
_MAX_GAIN = tl.constexpr(22.9)
_NO_ID = tl.constexpr(2147483647)


@triton.jit
def _mix32(x):
    """Avalanche of uint32 words, as in `kernels/sampling.py`."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _uniform(ids, low, high):
    """The uniform number in (0, 1) of each token id; low and high are made of the row's seed and position."""
    word = _mix32(_mix32(ids.to(tl.uint32) ^ low) ^ high)
    # The largest words would round to 1, whose noise is infinite.
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)


@triton.jit
def _log_noise(uniform):
    """Logarithm of Exp(1) noise, log(-log(1 - uniform)).

    -log(1 - u) = 2 artanh(u / (2 - u)) loses nothing for small u, which decide the draw; its series is cut where the
    rest is below float32's precision for u < 1/2, and from there on 1 - u is exact.
    """
    s = uniform / (2.0 - uniform)
    q = s * s
    series = 1 / 11 + q * (1 / 13)
    series = 1 / 7 + q * (1 / 9 + q * series)
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * series))
    return tl.log(tl.where(uniform < 0.5, 2.0 * s * series, -tl.log(1.0 - uniform)))


# The next three as in `sampling_filter_triton.py`: a kernel file imports no other.


@triton.jit
def _key(x):
    """float32 as int32 in the same order, -0.0 as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _rank(flags):
    """For [N] flags: the number of flags before each flagged place (-1 elsewhere), and the number of flags."""
    count = flags.to(tl.int32)
    return tl.where(flags, tl.cumsum(count, 0) - 1, -1), tl.sum(count, 0)


@triton.jit
def _ids(rank, first, V, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Token ids [GROUP, BLOCK] of the blocks of rank first .. first + GROUP - 1, and which of them exist."""
    wanted = (first + tl.arange(0, GROUP))[:, None]
    hit = rank[None, :] == wanted
    block = tl.sum(tl.where(hit, tl.arange(0, BLOCKS)[None, :] + 1, 0), 1)[:, None] - 1
    ids = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    return ids, (block >= 0) & (ids < V)


@triton.jit(do_not_specialize=["per_program"])
def _stats_kernel(
    logits_ptr,
    row_ptr,
    temperature_ptr,
    max_ptr,
    arg_ptr,
    sum_ptr,
    V,
    num_blocks,
    per_program,
    logits_stride,
    temperature_stride,
    SUM: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some blocks of one row: maximum (a NaN counts as +inf), its first id, sum of exp((x - maximum) / temperature)."""
    r = tl.program_id(0).to(tl.int64)
    rate = 1.0
    if SCALED:
        row = tl.maximum(tl.load(row_ptr + r), 0)
        temperature = tl.load(temperature_ptr + row * temperature_stride)
        rate = 1.0 / tl.where(temperature < _GREEDY, 1.0, temperature)
    first = tl.program_id(1) * per_program
    for block in range(first, tl.minimum(first + per_program, num_blocks)):
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + r * logits_stride + ids, mask=ids < V, other=-_INF).to(tl.float32)
        x = tl.where(x != x, _INF, x)
        top = tl.max(x, 0)
        target = r * num_blocks + block
        tl.store(max_ptr + target, top)
        tl.store(arg_ptr + target, tl.min(tl.where(x == top, ids, _NO_ID), 0))
        if SUM:
            base = tl.where(top == -_INF, 0.0, top)
            tl.store(sum_ptr + target, tl.sum(tl.exp((x - base) * rate), 0))


@triton.jit
def _race_kernel(
    logits_ptr,
    row_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    max_ptr,
    arg_ptr,
    bar_ptr,
    tie_ptr,
    score_ptr,
    winner_ptr,
    V,
    num_blocks,
    logits_stride,
    temperature_stride,
    FILTER: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One share of a row: the best of logits / temperature - log(noise) and its id. A block is read only if its
    maximum with the luckiest noise could beat what the row's maximum has already scored."""
    r = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    num_shares = tl.num_programs(1)
    row = tl.maximum(tl.load(row_ptr + r), 0)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    index = tl.arange(0, BLOCKS)
    real = index < num_blocks
    maxes = tl.load(max_ptr + r * num_blocks + index, mask=real, other=-_INF)
    best = tl.max(maxes, 0)
    if (temperature >= _GREEDY) & (best > -_INF) & (best < _INF):
        seed = tl.load(seed_ptr + row)
        position = tl.load(position_ptr + row)
        low = _mix32(seed.to(tl.uint32) ^ _mix32(position.to(tl.uint32)))
        high = _mix32((seed >> 32).to(tl.uint32) + (position + 1).to(tl.uint32) * 0x9E3779B9)
        args = tl.load(arg_ptr + r * num_blocks + index, mask=real, other=_NO_ID)
        first_best = tl.min(tl.where(maxes == best, args, _NO_ID), 0)
        rate = 1.0 / temperature
        reached = best * rate - _log_noise(_uniform(first_best, low, high))
        able = maxes * rate + _MAX_GAIN >= reached
        if FILTER:
            bar = tl.load(bar_ptr + r)
            last_tie = tl.load(tie_ptr + r)
            able = able & (_key(maxes) >= bar)
        rank, needed = _rank(able & real)
        scores = tl.full((GROUP, BLOCK), -_INF, tl.float32)
        winners = tl.full((GROUP, BLOCK), _NO_ID, tl.int32)
        for first in range(share * GROUP, needed, num_shares * GROUP):
            ids, mask = _ids(rank, first, V, GROUP, BLOCK, BLOCKS)
            x = tl.load(logits_ptr + r * logits_stride + ids, mask=mask, other=-_INF).to(tl.float32)
            if FILTER:
                key = _key(x)
                x = tl.where((key > bar) | ((key == bar) & (ids <= last_tie)), x, -_INF)
            uniform = _uniform(ids, low, high)
            # The noise is no smaller than the uniform number, which spares most tiles its logarithms.
            promising = uniform < tl.exp(x * rate - reached + 1e-3)
            if tl.max(tl.max(promising.to(tl.int32), 1), 0) > 0:
                score = x * rate - _log_noise(uniform)
                better = score > scores
                scores = tl.where(better, score, scores)
                winners = tl.where(better, ids, winners)
                reached = tl.maximum(reached, tl.max(tl.max(score, 1), 0))
        top = tl.max(tl.max(scores, 1), 0)
        winner = tl.min(tl.min(tl.where(scores == top, winners, _NO_ID), 1), 0)
        tl.store(score_ptr + r * num_shares + share, top)
        tl.store(winner_ptr + r * num_shares + share, winner)


@triton.jit(do_not_specialize=["num_shares"])
def _finish_kernel(
    row_ptr,
    temperature_ptr,
    max_ptr,
    arg_ptr,
    score_ptr,
    winner_ptr,
    out_ptr,
    num_blocks,
    num_shares,
    temperature_stride,
    DRAW: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The token of one row: -1 where the largest logit is not finite, the first largest where it is greedy."""
    r = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    maxes = tl.load(max_ptr + r * num_blocks + index, mask=index < num_blocks, other=-_INF)
    args = tl.load(arg_ptr + r * num_blocks + index, mask=index < num_blocks, other=_NO_ID)
    best = tl.max(maxes, 0)
    token = tl.min(tl.where(maxes == best, args, _NO_ID), 0)
    if DRAW:
        temperature = tl.load(temperature_ptr + tl.maximum(tl.load(row_ptr + r), 0) * temperature_stride)
        mask = index < num_shares
        scores = tl.load(score_ptr + r * num_shares + index, mask=mask, other=-_INF)
        winners = tl.load(winner_ptr + r * num_shares + index, mask=mask, other=_NO_ID)
        drawn = tl.min(tl.where(scores == tl.max(scores, 0), winners, _NO_ID), 0)
        # Without a winner (infinite noise, or logits / temperature overflow) the largest logit takes it.
        token = tl.where((temperature < _GREEDY) | (drawn == _NO_ID), token, drawn)
    token = tl.where((best > -_INF) & (best < _INF), token, -1)
    tl.store(out_ptr + r, token.to(tl.int64))


def _block_size(vocab_size: int) -> int:
    """Token ids per block; the other files that read block statistics derive it alike."""
    return max(_MIN_BLOCK, triton.next_power_of_2(triton.cdiv(vocab_size, _MAX_BLOCKS)))


def block_stats(
    logits: torch.Tensor, rows: torch.Tensor | None, temperature: torch.Tensor | None, with_sums: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maximum, its first id, and sum of exp((x - maximum) / temperature) of each row's blocks.

    Args:
        logits: [R, V].
        rows, temperature: as in `draw`; None for a temperature of 1.
        with_sums: else the sums are left as they are.

    Returns:
        [R, num_blocks] float32, int32, float32.
    """
    num_rows, vocab_size = logits.shape
    block = _block_size(vocab_size)
    num_blocks = triton.cdiv(vocab_size, block)
    maxes = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    args = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    sums = torch.empty_like(maxes) if with_sums else maxes
    per_program = max(1, min(8, num_rows * num_blocks // _STATS_PROGRAMS))
    _stats_kernel[(num_rows, triton.cdiv(num_blocks, per_program))](
        logits,
        rows if rows is not None else args,
        temperature if temperature is not None else maxes,
        maxes,
        args,
        sums,
        vocab_size,
        num_blocks,
        per_program,
        logits.stride(0),
        temperature.stride(0) if temperature is not None else 0,
        SUM=with_sums,
        SCALED=temperature is not None,
        BLOCK=block,
        num_warps=max(1, block // 1024),
    )
    return maxes, args, sums


def draw(
    logits: torch.Tensor,
    stats: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bounds: tuple[torch.Tensor, torch.Tensor] | None,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """One token per row, see `sample` in `kernels/sampling.py`.

    Args:
        logits: [R, V].
        stats: of `block_stats`.
        bounds: of `thresholds` in `sampling_filter_triton.py`, or None where no row filters.
        rows: [R] int64, a row's place in the vectors below; a negative one reads place 0.
        temperature: float32, need not be contiguous.
        seed, position: int64, contiguous.

    Returns:
        [R] int64.
    """
    num_rows, vocab_size = logits.shape
    maxes, args, _ = stats
    num_blocks = maxes.shape[1]
    block = _block_size(vocab_size)
    group = max(1, _RACE_TILE // block)
    shares = max(1, min(triton.cdiv(num_blocks, group), _RACE_PROGRAMS // num_rows))
    scores = torch.empty((num_rows, shares), dtype=torch.float32, device=logits.device)
    winners = torch.empty((num_rows, shares), dtype=torch.int32, device=logits.device)
    _race_kernel[(num_rows, shares)](
        logits,
        rows,
        temperature,
        seed,
        position,
        maxes,
        args,
        bounds[0] if bounds is not None else args,
        bounds[1] if bounds is not None else args,
        scores,
        winners,
        vocab_size,
        num_blocks,
        logits.stride(0),
        temperature.stride(0),
        FILTER=bounds is not None,
        GROUP=group,
        BLOCK=block,
        BLOCKS=_MAX_BLOCKS,
        num_warps=4,
    )
    return _finish(maxes, args, rows, temperature, scores, winners)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """See `kernels/sampling.py`."""
    maxes, args, _ = block_stats(logits, None, None, False)
    return _finish(maxes, args, None, None, maxes, args)


def _finish(
    maxes: torch.Tensor,
    args: torch.Tensor,
    rows: torch.Tensor | None,
    temperature: torch.Tensor | None,
    scores: torch.Tensor,
    winners: torch.Tensor,
) -> torch.Tensor:
    """[R] int64 tokens; greedy all of them where there is no temperature."""
    out = torch.empty(maxes.shape[0], dtype=torch.int64, device=maxes.device)
    _finish_kernel[(maxes.shape[0],)](
        rows if rows is not None else args,
        temperature if temperature is not None else maxes,
        maxes,
        args,
        scores,
        winners,
        out,
        maxes.shape[1],
        scores.shape[1],
        temperature.stride(0) if temperature is not None else 0,
        DRAW=temperature is not None,
        BLOCKS=_MAX_BLOCKS,
        num_warps=1,
    )
    return out
