"""The smallest logit that top-k, top-p and min-p leave of each row, without a sort.

Works on the block maxima and sums of `sampling_triton.py`, with which it shares how floats are ordered and blocks
are picked. Reads the blocks that a first bound from the maxima cannot exclude, once where at most 2,048 logits pass
the bound (as with any usual top-k or top-p), a few times more where the probabilities are nearly flat.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Logits that are searched in registers.
_WINDOW = 2048
# Logits read at a time.
_TILE = 2048
_MAX_BLOCKS = 256
_MIN_BLOCK = 256

_INF = tl.constexpr(float("inf"))
_GREEDY = tl.constexpr(1e-5)
# The key of -inf, see _key.
_OPEN = tl.constexpr(-2139095041)


@triton.jit
def _key(x):
    """float32 as int32 in the same order, -0.0 as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    """The float32 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """Half of the sum, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


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


@triton.jit
def _places(flags):
    """For [GROUP, BLOCK] flags: the number of flags up to each place, itself included, and of all."""
    count = flags.to(tl.int32)
    in_block = tl.sum(count, 1)
    before = tl.cumsum(in_block, 0) - in_block
    return before[:, None] + tl.cumsum(count, 1), tl.sum(in_block, 0)


@triton.jit
def _bisect(keys, weights, low, high, above, target):
    """Largest key in [low, high) for which `above` + the weight of keys no smaller reaches target; else low."""
    while low + 1 < high:
        middle = _middle(low, high)
        enough = above + tl.sum(tl.where(keys >= middle, weights, 0.0), 0) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _weight(key, best, rate, by_mass):
    """1, or probability up to a factor."""
    return tl.where(by_mass, tl.exp((_value(key) - best) * rate), 1.0)


@triton.jit
def _scan(
    logits_ptr,
    window_ptr,
    max_keys,
    low,
    high,
    middle,
    best,
    rate,
    by_mass,
    V,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Read a row's logits with low < key < high. Stores the keys of the first WINDOW of them; returns how many there
    are (or some number above WINDOW), their weight, and the weight of those with key >= middle."""
    rank, needed = _rank(max_keys > low)
    count = 0
    inside = tl.zeros((GROUP, BLOCK), tl.float32)
    upper = tl.zeros((GROUP, BLOCK), tl.float32)
    for first in range(0, needed, GROUP):
        ids, mask = _ids(rank, first, V, GROUP, BLOCK, BLOCKS)
        key = _key(tl.load(logits_ptr + ids, mask=mask, other=-_INF).to(tl.float32))
        within = (key > low) & (key < high)
        weight = tl.where(within, _weight(key, best, rate, by_mass), 0.0)
        inside += weight
        upper += tl.where(key >= middle, weight, 0.0)
        if count <= WINDOW:
            place, found = _places(within)
            place += count - 1
            tl.store(window_ptr + place, key, mask=within & (place < WINDOW))
            count += found
    return count, tl.sum(tl.sum(inside, 1), 0), tl.sum(tl.sum(upper, 1), 0)


@triton.jit
def _tie_id(logits_ptr, max_keys, bar, ties, V, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Id of the ties-th token whose key is bar; V if there are fewer."""
    rank, needed = _rank(max_keys >= bar)
    seen = 0
    result = V
    for first in range(0, needed, GROUP):
        if seen < ties:
            ids, mask = _ids(rank, first, V, GROUP, BLOCK, BLOCKS)
            key = _key(tl.load(logits_ptr + ids, mask=mask, other=-_INF).to(tl.float32))
            same = mask & (key == bar)
            place, found = _places(same)
            last = tl.where(same & (place + seen == ties), ids, V)
            result = tl.minimum(result, tl.min(tl.min(last, 1), 0))
            seen += found
    return result


@triton.jit
def _threshold_kernel(
    logits_ptr,
    row_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    max_ptr,
    sum_ptr,
    window_ptr,
    bar_ptr,
    tie_ptr,
    V,
    num_blocks,
    logits_stride,
    temperature_stride,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """What one row keeps: tokens whose key is above the bar, and tokens at the bar whose id is at most the tie id.

    Top-k and top-p each ask for the largest bar such that what is at or above it reaches a number or a mass. A first
    bound comes from the blocks' maxima. The window (low, high) that must hold the bar is narrowed by passes over the
    row until its tokens fit into WINDOW; then it is searched in registers.
    """
    r = tl.program_id(0).to(tl.int64)
    row = tl.maximum(tl.load(row_ptr + r), 0)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    top_k = tl.load(top_k_ptr + row * top_k_stride)
    top_p = tl.load(top_p_ptr + row * top_p_stride)
    min_p = tl.load(min_p_ptr + row * min_p_stride)
    logits_ptr += r * logits_stride
    window_ptr += r * WINDOW
    index = tl.arange(0, BLOCKS)
    real = index < num_blocks
    maxes = tl.load(max_ptr + r * num_blocks + index, mask=real, other=-_INF)
    max_keys = _key(maxes)
    best = tl.max(maxes, 0)
    lowest = tl.min(tl.where(real, maxes, best), 0)
    usable = (temperature >= _GREEDY) & (best > -_INF) & (best < _INF)
    temperature = tl.where(usable, temperature, 1.0)
    rate = 1.0 / temperature
    bar = tl.where(usable & (min_p > 0), _key(best + temperature * tl.log(min_p)) - 1, _OPEN)
    ties = 0
    for phase in range(0, 2):
        by_mass = phase == 1
        if usable & tl.where(by_mass, top_p < 1.0, (top_k > 0) & (top_k < V)):
            start = bar
            start_mass = ties * tl.exp((_value(start) - best) * rate)
            low = bar
            high = _key(best) + 1
            target = top_k.to(tl.float32)
            if by_mass:
                # All that is left out by a bound 1 - top_p of whose mass V tokens cannot reach.
                if start == _OPEN:
                    sums = tl.load(sum_ptr + r * num_blocks + index, mask=real, other=0.0)
                    start_mass = tl.sum(sums * tl.exp((maxes - best) * rate), 0)
                    low = tl.maximum(low, _key(best + temperature * (tl.log((1.0 - top_p) / V) - 0.01)))
                target = top_p * start_mass
            elif top_k <= num_blocks:
                # The k largest maxima are k tokens.
                low = tl.maximum(low, _bisect(max_keys, real.to(tl.float32), _key(lowest), high, 0.0, target))
            above = 0.0
            count = WINDOW + 1
            step = 0
            while (count > WINDOW) & (low + 1 < high):
                # Halve the values; where there is no lower bound, go down in growing steps; where neither helps
                # (many ties, huge numbers), halve the keys.
                up = _value(high)
                guess = tl.where(low == _OPEN, up - (best - up) - (best - lowest), 0.5 * _value(low) + 0.5 * up)
                middle = tl.where(step < 8, _key(guess), _middle(low, high))
                middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
                count, inside, upper = _scan(
                    logits_ptr, window_ptr, max_keys, low, high, middle, best, rate, by_mass, V,
                    WINDOW, GROUP, BLOCK, BLOCKS,
                )  # fmt: skip
                if by_mass & (step == 0) & (start != _OPEN):
                    target = top_p * (start_mass + inside)
                if count > WINDOW:
                    enough = above + upper >= target
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle)
                    above += tl.where(enough, 0.0, upper)
                step += 1
            # Stored by one thread, read by another.
            tl.debug_barrier()
            slot = tl.arange(0, WINDOW)
            held = slot < tl.where(low + 1 < high, count, 0)
            keys = tl.load(window_ptr + slot, mask=held, other=_OPEN)
            weights = tl.where(held, _weight(keys, best, rate, by_mass), 0.0)
            bar = _bisect(keys, weights, low, high, above, target)
            missing = target - above - tl.sum(tl.where(keys > bar, weights, 0.0), 0)
            need = tl.ceil(missing / tl.maximum(_weight(bar, best, rate, by_mass), 1e-30))
            need = tl.minimum(tl.maximum(need, 1.0), V * 1.0).to(tl.int32)
            ties = tl.where(bar == start, tl.minimum(ties, need), need)
    tl.store(bar_ptr + r, bar)
    last = -1
    if ties > 0:
        last = _tie_id(logits_ptr, max_keys, bar, ties, V, GROUP, BLOCK, BLOCKS)
    tl.store(tie_ptr + r, last)


def thresholds(
    logits: torch.Tensor,
    stats: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `draw` of `sampling_triton.py` may keep of each row.

    Args:
        logits: [R, V].
        stats: of `block_stats`, with sums.
        rows: [R] int64, a row's place in the vectors below, which need not be contiguous.
        temperature, top_p, min_p: float32.
        top_k: int32.

    Returns:
        [R] int32 keys, above which every token is kept, and [R] int32: up to which id those at the key are kept too.
    """
    num_rows, vocab_size = logits.shape
    maxes, _, sums = stats
    num_blocks = maxes.shape[1]
    block = max(_MIN_BLOCK, triton.next_power_of_2(triton.cdiv(vocab_size, _MAX_BLOCKS)))
    window = torch.empty((num_rows, _WINDOW), dtype=torch.int32, device=logits.device)
    bars = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    last_ties = torch.empty_like(bars)
    _threshold_kernel[(num_rows,)](
        logits,
        rows,
        temperature,
        top_k,
        top_p,
        min_p,
        maxes,
        sums,
        window,
        bars,
        last_ties,
        vocab_size,
        num_blocks,
        logits.stride(0),
        temperature.stride(0),
        top_k.stride(0),
        top_p.stride(0),
        min_p.stride(0),
        WINDOW=_WINDOW,
        GROUP=max(1, _TILE // block),
        BLOCK=block,
        BLOCKS=_MAX_BLOCKS,
        num_warps=8,
    )
    return bars, last_ties
