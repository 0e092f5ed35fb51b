"""Drawing tokens from [R, V] logits of any float dtype, computed in float32, in two launches.

1. `block_stats`, spread over the device also for R = 1: each block's maximum, where it is, its sum of exponentials.
2. `_sample_kernel`, one program a row: what top-k, top-p and min-p keep, without a sort; then a race among the blocks
   by their masses, and one among the tokens of the block that won.

Bytes moved for logits of s bytes: R V s in 1. In 2 one block; for a row that filters also the blocks that a first bound
from the maxima cannot exclude, once where at most 2,048 logits pass the bound (as with any usual top-k or top-p) and a
few times more where the probabilities are nearly flat, and the blocks it keeps something of.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# From so many programs on, each takes several blocks: starting one costs about what a block does.
_STATS_PROGRAMS = 8192
# Logits that are searched in registers, and logits read at a time, by a row that filters.
_WINDOW = 2048
_TILE = 2048

_INF = tl.constexpr(float("inf"))
_GREEDY = tl.constexpr(1e-5)
_NO_ID = tl.constexpr(2147483647)
# The key of -inf, see _key.
_OPEN = tl.constexpr(-2139095041)


@triton.jit
def _mix32(x):
    """Avalanche of uint32 words, as in `kernels/sampling.py`."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _uniform(counters, low, high):
    """The uniform number in (0, 1) of each counter; low and high are made of the row's seed and position."""
    word = _mix32(_mix32(counters.to(tl.uint32) ^ low) ^ high)
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
def _read(logits_ptr, rank, first, V, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Of the blocks of rank first .. first + GROUP - 1: which they are [GROUP, BLOCKS], and their token ids and keys
    [GROUP, BLOCK]; the key of -inf past the last one."""
    hit = rank[None, :] == (first + tl.arange(0, GROUP))[:, None]
    block = tl.sum(tl.where(hit, tl.arange(0, BLOCKS)[None, :] + 1, 0), 1)[:, None] - 1
    ids = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits_ptr + ids, mask=(block >= 0) & (ids < V), other=-_INF)
    return hit, ids, _key(x.to(tl.float32))


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
    logits_ptr, window_ptr, max_keys, low, high, middle, best, rate, by_mass, V,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Read a row's logits with low < key < high. Stores the keys of the first WINDOW of them; returns how many there
    are (or some number above WINDOW), their weight, and the weight of those with key >= middle."""
    rank, needed = _rank(max_keys > low)
    count = 0
    inside = tl.zeros((GROUP, BLOCK), tl.float32)
    upper = tl.zeros((GROUP, BLOCK), tl.float32)
    for first in range(0, needed, GROUP):
        _, _, key = _read(logits_ptr, rank, first, V, GROUP, BLOCK, BLOCKS)
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
def _bar(
    logits_ptr, window_ptr, maxes, masses, real, temperature, top_k, top_p, min_p, V,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """What one row keeps: tokens whose key is above the bar, and the first `ties` tokens at the bar.

    Top-k and top-p each ask for the largest bar such that what is at or above it reaches a number or a mass. A first
    bound comes from the blocks' maxima. The window (low, high) that must hold the bar is narrowed by passes over the
    row until its tokens fit into WINDOW; then it is searched in registers.
    """
    max_keys = _key(maxes)
    best = tl.max(maxes, 0)
    lowest = tl.min(tl.where(real, maxes, best), 0)
    rate = 1.0 / temperature
    bar = tl.where(min_p > 0, _key(best + temperature * tl.log(min_p)) - 1, _OPEN)
    ties = 0
    for phase in range(0, 2):
        by_mass = phase == 1
        if tl.where(by_mass, top_p < 1.0, (top_k > 0) & (top_k < V)):
            start = bar
            start_mass = ties * tl.exp((_value(start) - best) * rate)
            low = bar
            high = _key(best) + 1
            target = top_k.to(tl.float32)
            if by_mass:
                # All that is left out by a bound 1 - top_p of whose mass V tokens cannot reach.
                if start == _OPEN:
                    start_mass = tl.sum(masses, 0)
                    low = tl.maximum(low, _key(best + temperature * (tl.log((1.0 - top_p) / V) - 0.01)))
                target = top_p * start_mass
            elif top_k <= tl.sum(real.to(tl.int32), 0):
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
    return bar, ties


@triton.jit
def _keep(logits_ptr, maxes, bar, ties, rate, V, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Of what `_bar` says a row keeps: the last token id at the bar (-1 if none), and each block's mass."""
    best = tl.max(maxes, 0)
    rank, needed = _rank(_key(maxes) >= bar)
    seen = 0
    last_tie = -1
    masses = tl.zeros((BLOCKS,), tl.float32)
    for first in range(0, needed, GROUP):
        hit, ids, key = _read(logits_ptr, rank, first, V, GROUP, BLOCK, BLOCKS)
        kept = key > bar
        if seen < ties:
            place, found = _places(key == bar)
            tied = (key == bar) & (place + seen <= ties)
            last_tie = tl.maximum(last_tie, tl.max(tl.max(tl.where(tied, ids, -1), 1), 0))
            kept = kept | tied
            seen += found
        mass = tl.sum(tl.where(kept, _weight(key, best, rate, True), 0.0), 1)
        masses += tl.sum(tl.where(hit, mass[:, None], 0.0), 0)
    return last_tie, masses


@triton.jit(do_not_specialize=["per_program"])
def _stats_kernel(
    logits_ptr, row_ptr, temperature_ptr, max_ptr, arg_ptr, sum_ptr,
    V, num_blocks, per_program, logits_stride, temperature_stride,
    SUM: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
def _sample_kernel(
    logits_ptr, row_ptr, temperature_ptr, seed_ptr, position_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    max_ptr, arg_ptr, sum_ptr, window_ptr, out_ptr, V, num_blocks,
    logits_stride, temperature_stride, top_k_stride, top_p_stride, min_p_stride,
    DRAW: tl.constexpr, FILTER: tl.constexpr,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The token of one row: -1 where the largest logit is not finite, the first largest where it is greedy."""
    r = tl.program_id(0).to(tl.int64)
    logits_ptr += r * logits_stride
    index = tl.arange(0, BLOCKS)
    real = index < num_blocks
    stat = r * num_blocks + index
    maxes = tl.load(max_ptr + stat, mask=real, other=-_INF)
    best = tl.max(maxes, 0)
    finite = (best > -_INF) & (best < _INF)
    token = tl.min(tl.where(maxes == best, tl.load(arg_ptr + stat, mask=real, other=_NO_ID), _NO_ID), 0)
    if DRAW:
        row = tl.maximum(tl.load(row_ptr + r), 0)
        temperature = tl.load(temperature_ptr + row * temperature_stride)
        if finite & (temperature >= _GREEDY):
            rate = 1.0 / temperature
            masses = tl.load(sum_ptr + stat, mask=real, other=0.0) * tl.exp((maxes - best) * rate)
            bar = _OPEN
            last_tie = -1
            if FILTER:
                bar, ties = _bar(
                    logits_ptr, window_ptr + r * WINDOW, maxes, masses, real, temperature,
                    tl.load(top_k_ptr + row * top_k_stride), tl.load(top_p_ptr + row * top_p_stride),
                    tl.load(min_p_ptr + row * min_p_stride), V, WINDOW, GROUP, BLOCK, BLOCKS,
                )  # fmt: skip
                # Else the masses are the very same as in a batch in which no row filters.
                if bar > _OPEN:
                    last_tie, masses = _keep(logits_ptr, maxes, bar, ties, rate, V, GROUP, BLOCK, BLOCKS)
            seed = tl.load(seed_ptr + row)
            position = tl.load(position_ptr + row)
            low = _mix32(seed.to(tl.uint32) ^ _mix32(position.to(tl.uint32)))
            high = _mix32((seed >> 32).to(tl.uint32) + (position + 1).to(tl.uint32) * 0x9E3779B9)
            block = tl.argmax(tl.log(masses) - _log_noise(_uniform(~index, low, high)), 0)
            ids = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + ids, mask=ids < V, other=-_INF).to(tl.float32)
            if FILTER:
                key = _key(x)
                x = tl.where((key > bar) | ((key == bar) & (ids <= last_tie)), x, -_INF)
            score = (x - best) * rate - _log_noise(_uniform(ids, low, high))
            token = block * BLOCK + tl.argmax(score, 0)
    tl.store(out_ptr + r, tl.where(finite, token, -1).to(tl.int64))


def block_stats(
    logits: Tensor, block: int, rows: Tensor | None, temperature: Tensor | None, with_sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, its first id, and sum of exp((x - maximum) / temperature) of each row's blocks of `block` tokens.

    Args:
        logits: [R, V].
        rows, temperature: as in `sample` of `kernels/sampling.py`; None for a temperature of 1.
        with_sums: else the sums are something else.

    Returns:
        [R, num_blocks] float32, int32, float32.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, block)
    maxes = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    args = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    sums = torch.empty_like(maxes) if with_sums else maxes
    per_program = max(1, min(8, num_rows * num_blocks // _STATS_PROGRAMS))
    scaled = temperature is not None
    _stats_kernel[(num_rows, triton.cdiv(num_blocks, per_program))](
        logits, rows if scaled else args, temperature if scaled else maxes, maxes, args, sums,
        vocab_size, num_blocks, per_program, logits.stride(0), temperature.stride(0) if scaled else 0,
        SUM=with_sums, SCALED=scaled, BLOCK=block, num_warps=max(1, block // 1024),
    )  # fmt: skip
    return maxes, args, sums


def sample(
    logits: Tensor, block: int, own: tuple[Tensor, ...] | None, filters: tuple[Tensor, Tensor, Tensor] | None
) -> Tensor:
    """See `kernels/sampling.py`; own: rows, temperature, seed, position, or None where all rows are greedy."""
    num_rows, vocab_size = logits.shape
    maxes, args, sums = block_stats(logits, block, *(own or (None, None))[:2], with_sums=own is not None)
    rows, temperature, seed, position = own or (args, maxes, args, args)  # what is not read may be anything
    top_k, top_p, min_p = filters or (args, maxes, maxes)
    window = torch.empty((num_rows, _WINDOW), dtype=torch.int32, device=logits.device) if filters else args
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _sample_kernel[(num_rows,)](
        logits, rows, temperature, seed, position, top_k, top_p, min_p, maxes, args, sums, window, out,
        vocab_size, maxes.shape[1],
        logits.stride(0), temperature.stride(0), top_k.stride(0), top_p.stride(0), min_p.stride(0),
        DRAW=own is not None, FILTER=filters is not None, WINDOW=_WINDOW, GROUP=max(1, _TILE // block), BLOCK=block,
        BLOCKS=triton.next_power_of_2(maxes.shape[1]), num_warps=8 if filters else 4,
        maxnreg=128,  # two filtering programs on a multiprocessor; a few spilled bytes are the price
    )  # fmt: skip
    return out
