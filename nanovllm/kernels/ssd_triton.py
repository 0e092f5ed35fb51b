"""Convolution and state scan of a prefill; see ssd.py for the contracts.

Where the states alone are wanted a program keeps one head's in registers and walks over all its tokens: the heads of
all layers fill a GPU, so nothing between chunks has to be stored, and x, B and states are read once (B by all heads of
a group, which run side by side). With outputs there are the heads of one layer only, so chunks run side by side: their
own states first, then the pass over chunks, then outputs (arXiv 2405.21060, section 6).

States stay exact to float32. A product of a float32 matrix with a bfloat16 one is therefore made of three: the first is
cut into three bfloat16 parts, which hold its 24 bits. The weights dt and decay always go to the same side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Tokens of a tile, and at most so many numbers of a program's state; channels and tokens of a tile of a convolution.
_TOKENS = 64
_STATE = 8192
_CHANNELS = 128
_CONV_TOKENS = 32


@triton.jit
def _dot(wide, narrow, acc):
    """acc + wide @ narrow as exactly as in float32, `wide` being float32."""
    if narrow.dtype == tl.bfloat16:
        high = wide.to(tl.bfloat16)
        rest = wide - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(low, narrow, acc)
        acc = tl.dot(middle, narrow, acc)
        acc = tl.dot(high, narrow, acc)
    else:
        acc = tl.dot(wide, narrow.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def _step_sizes(dt_ptr, dt_stride, bias, tokens, live):
    """softplus(dt + bias) of tokens, 0 where not live: there nothing decays and nothing is added."""
    v = tl.load(dt_ptr + tokens * dt_stride, mask=live, other=0.0).to(tl.float32) + bias
    # log(1 + u) = 2 atanh(s), whose series is exact to float32 as s <= 1/3; log itself loses small u.
    u = tl.exp(-tl.abs(v))
    s = u / (2.0 + u)
    q = s * s
    series = 1.0 / 9 + q * (1.0 / 11 + q * (1.0 / 13 + q * (1.0 / 15)))
    series = 1.0 + q * (1.0 / 3 + q * (1.0 / 5 + q * (1.0 / 7 + q * series)))
    return tl.where(live, tl.maximum(v, 0.0) + 2.0 * s * series, 0.0)


@triton.jit
def _tile_steps(dt_ptr, dt_stride, bias, a, start, end, TOKENS: tl.constexpr):
    """Of a tile's tokens: step sizes, and logs of the decay from after each token to the tile's end.

    The latter is a sum of its own: as a difference of two sums it would lose, with steps that forget at once, just the
    tokens that count.
    """
    row = tl.arange(0, TOKENS)
    tokens = (start + row).to(tl.int64)
    step = _step_sizes(dt_ptr, dt_stride, bias, tokens, tokens < end)
    later = _step_sizes(dt_ptr, dt_stride, bias, tokens + 1, (tokens + 1 < end) & (row + 1 < TOKENS))
    return step, tl.cumsum(later * a, 0, reverse=True)


@triton.jit
def _absorb(
    state, decay, x_ptr, b_ptr, dt_ptr, x_stride, b_stride, dt_stride, bias, a, first, end, p, n,
    P: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Move state [BLOCK_P, BLOCK_N] and the sum of its log decays on over tokens first .. end - 1."""
    for start in range(first, end, TOKENS):
        tokens = (start + tl.arange(0, TOKENS)).to(tl.int64)
        live = tokens < end
        step, left = _tile_steps(dt_ptr, dt_stride, bias, a, start, end, TOKENS)
        total = tl.sum(step * a, 0)
        x = tl.load(x_ptr + tokens[:, None] * x_stride + p[None, :], mask=live[:, None] & (p < P)[None, :], other=0.0)
        b = tl.load(b_ptr + tokens[:, None] * b_stride + n[None, :], mask=live[:, None] & (n < N)[None, :], other=0.0)
        weighted = x.to(tl.float32) * (step * tl.exp(left))[:, None]
        state = _dot(tl.trans(weighted), b, state * tl.exp(total))
        decay += total
    return state, decay


@triton.jit(do_not_specialize=["num_spans"])
def _states_kernel(
    x_ptr, b_ptr, dt_ptr, a_log_ptr, bias_ptr, states_ptr, local_ptr, decay_ptr, table_ptr, num_spans,
    x_stride, x_layer, b_stride, b_layer, dt_stride, dt_layer, row_stride, layer_stride,
    H: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """BLOCK_P x N of one head's state; grid (L * H, spans, blocks of P).

    With LOCAL: what one span adds to a state, and the log of its decay, [spans, L * H, P, N] and [spans, L * H]. Else
    the program of a span with a source walks over it and all that go on from it.
    """
    head, span = tl.program_id(0), tl.program_id(1)
    source = tl.load(table_ptr + span * 6 + 2)
    if source < 0 and not LOCAL:
        return
    layer, own = head // H, head % H
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    mask = (p < P)[:, None] & (n < N)[None, :]
    x_ptr += layer * x_layer + own * P
    b_ptr += layer * b_layer + own // GROUP * N
    dt_ptr += layer * dt_layer + own
    a = -tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(bias_ptr + head)
    place = p[:, None] * N + n[None, :]
    decay = 0.0
    if LOCAL:
        state, decay = _absorb(
            tl.zeros([BLOCK_P, BLOCK_N], tl.float32), decay, x_ptr, b_ptr, dt_ptr, x_stride, b_stride, dt_stride, bias,
            a, tl.load(table_ptr + span * 6), tl.load(table_ptr + span * 6 + 1), p, n, P, N, TOKENS,
        )  # fmt: skip
        index = (span * tl.num_programs(0) + head).to(tl.int64)
        tl.store(local_ptr + index * (P * N) + place, state, mask=mask)
        tl.store(decay_ptr + index, decay)
    else:
        states_ptr += layer * layer_stride + own * (P * N) + place
        state = tl.load(states_ptr + source.to(tl.int64) * row_stride, mask=mask, other=0.0)
        # Source and target may be one row: all of it is read before any of it is written.
        tl.debug_barrier()
        while span < num_spans:
            state, decay = _absorb(
                state, decay, x_ptr, b_ptr, dt_ptr, x_stride, b_stride, dt_stride, bias, a,
                tl.load(table_ptr + span * 6), tl.load(table_ptr + span * 6 + 1), p, n, P, N, TOKENS,
            )  # fmt: skip
            target = tl.load(table_ptr + span * 6 + 3).to(tl.int64)
            if target >= 0:
                tl.store(states_ptr + target * row_stride, state, mask=mask)
            span += 1
            goes_on = tl.load(table_ptr + span * 6 + 2, mask=span < num_spans, other=0) < 0
            span = tl.where(goes_on, span, num_spans)


@triton.jit(do_not_specialize=["num_spans"])
def _pass_kernel(
    local_ptr, decay_ptr, states_ptr, table_ptr, num_spans, row_stride, layer_stride,
    H: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK numbers of one head's state over all spans that go on from one another: each span's own share gives way to
    the state that it begins with. Grid (L * H, spans, blocks of SIZE = P * N)."""
    head, span = tl.program_id(0), tl.program_id(1)
    source = tl.load(table_ptr + span * 6 + 2)
    if source < 0:
        return
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = place < SIZE
    states_ptr += head // H * layer_stride + head % H * SIZE + place
    state = tl.load(states_ptr + source.to(tl.int64) * row_stride, mask=mask, other=0.0)
    while span < num_spans:
        index = (span * tl.num_programs(0) + head).to(tl.int64)
        own = tl.load(local_ptr + index * SIZE + place, mask=mask, other=0.0)
        tl.store(local_ptr + index * SIZE + place, state, mask=mask)
        state = state * tl.exp(tl.load(decay_ptr + index)) + own
        target = tl.load(table_ptr + span * 6 + 3).to(tl.int64)
        if target >= 0:
            tl.store(states_ptr + target * row_stride, state, mask=mask)
        span += 1
        goes_on = tl.load(table_ptr + span * 6 + 2, mask=span < num_spans, other=0) < 0
        span = tl.where(goes_on, span, num_spans)


@triton.jit
def _outputs_kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, a_log_ptr, bias_ptr, d_ptr, before_ptr, y_ptr, table_ptr, tiles,
    x_stride, x_layer, b_stride, b_layer, c_stride, c_layer, dt_stride, dt_layer,
    H: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """y [T, L * H, P] of one tile of a span, one head, BLOCK_P of P; grid (L * H, spans * tiles, blocks of P).

    y holds what the tile's queries find in the state up to the end of the tile before: it decays from tile to tile, so
    no exponent is ever positive.
    """
    head, span = tl.program_id(0), tl.program_id(1) // tiles
    first, end = tl.load(table_ptr + span * 6), tl.load(table_ptr + span * 6 + 1)
    last = first + tl.program_id(1) % tiles * TOKENS
    if last >= end:
        return
    layer, own = head // H, head % H
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    x_ptr += layer * x_layer + own * P + p[None, :]
    b_ptr += layer * b_layer + own // GROUP * N + n[None, :]
    c_ptr += layer * c_layer + own // GROUP * N + n[None, :]
    dt_ptr += layer * dt_layer + own
    a = -tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(bias_ptr + head)
    row = tl.arange(0, TOKENS)
    queries = (last + row).to(tl.int64)
    live = queries < end
    c = tl.load(c_ptr + queries[:, None] * c_stride, mask=live[:, None] & (n < N)[None, :], other=0.0)
    index = (span * tl.num_programs(0) + head).to(tl.int64)
    place = p[:, None] * N + n[None, :]
    before = tl.load(before_ptr + index * (P * N) + place, mask=(p < P)[:, None] & (n < N)[None, :], other=0.0)
    y = tl.trans(_dot(before, tl.trans(c), tl.zeros([BLOCK_P, TOKENS], tl.float32)))
    for start in range(first, last + 1, TOKENS):
        tokens = (start + row).to(tl.int64)
        there = tokens < end
        step, left = _tile_steps(dt_ptr, dt_stride, bias, a, start, end, TOKENS)
        log_decay = tl.cumsum(step * a, 0)
        x = tl.load(x_ptr + tokens[:, None] * x_stride, mask=there[:, None] & (p < P)[None, :], other=0.0)
        b = tl.load(b_ptr + tokens[:, None] * b_stride, mask=there[:, None] & (n < N)[None, :], other=0.0)
        # Products of bfloat16 are exact in float32; float32 itself must not become TF32.
        scores = tl.dot(c, tl.trans(b), input_precision="ieee")
        # Up to the tile's end, or in the queries' own tile up to each query.
        if start < last:
            weights = scores * (tl.exp(left) * step)[None, :]
            y = y * tl.exp(tl.sum(step * a, 0))
        else:
            between = log_decay[:, None] - log_decay[None, :]
            seen = row[None, :] <= row[:, None]
            weights = scores * tl.exp(tl.where(seen, between, float("-inf"))) * step[None, :]
            y = y * tl.exp(log_decay)[:, None]
        y = _dot(weights, x, y)
    x = tl.load(x_ptr + queries[:, None] * x_stride, mask=live[:, None] & (p < P)[None, :], other=0.0)
    y += tl.load(d_ptr + head) * x.to(tl.float32)
    y_ptr += (queries[:, None] * tl.num_programs(0) + head) * P + p[None, :]
    tl.store(y_ptr, y, mask=live[:, None] & (p < P)[None, :])


def ssd(
    x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, a_log: torch.Tensor,
    dt_bias: torch.Tensor, d: torch.Tensor, states: torch.Tensor, table: torch.Tensor, chunk_size: int,
) -> torch.Tensor | None:  # fmt: skip
    """See `ssd_ref`; `table` is [spans, 6] int32, the `span_table` of its segments for chunk_size."""
    layers, heads, dim = x.shape[1:]
    groups, size = b.shape[2:]
    block_n = max(16, triton.next_power_of_2(size))
    block_p = min(max(16, triton.next_power_of_2(dim)), max(16, _STATE // block_n))
    spans, count, blocks = len(table), layers * heads, triton.cdiv(dim, block_p)
    stages = 3 if x.element_size() == 2 else 2  # as many as 99 KiB of shared memory hold
    local = decay = states
    if c is not None:
        local = torch.empty((spans, count, dim, size), dtype=torch.float32, device=x.device)
        decay = torch.empty((spans, count), dtype=torch.float32, device=x.device)
    strides = (*x.stride()[:2], *b.stride()[:2])
    sizes = {
        "H": heads, "GROUP": heads // groups, "P": dim, "N": size, "BLOCK_P": block_p, "BLOCK_N": block_n,
        "TOKENS": _TOKENS, "num_warps": 4,
    }  # fmt: skip
    _states_kernel[(count, spans, blocks)](
        x, b, dt, a_log, dt_bias, states, local, decay, table, spans, *strides, *dt.stride()[:2],
        *states.stride()[:2], LOCAL=c is not None, num_stages=stages, **sizes,
    )  # fmt: skip
    if c is None:
        return None
    _pass_kernel[(count, spans, triton.cdiv(dim * size, 1024))](
        local, decay, states, table, spans, *states.stride()[:2], H=heads, SIZE=dim * size, BLOCK=1024, num_warps=4
    )
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(chunk_size, _TOKENS)
    _outputs_kernel[(count, spans * tiles, blocks)](
        x, b, c, dt, a_log, dt_bias, d, local, y, table, tiles, *strides, *c.stride()[:2], *dt.stride()[:2],
        num_stages=1, **sizes,  # triton 3.6 fails to compile it for sm_90 with more
    )  # fmt: skip
    return y


@triton.jit
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, states_ptr, out_ptr, table_ptr, tiles, x_stride, row_stride, LAYER: tl.constexpr,
    C: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of a span and CHANNELS channels of a layer; grid (spans * tiles, blocks of C, L). Tokens of a
    layer lie LAYER apart from those of the next: how far is compiled in, as it says how wide loads may be."""
    span, layer = tl.program_id(0) // tiles, tl.program_id(2)
    start = tl.load(table_ptr + span * 6) + tl.program_id(0) % tiles * TOKENS
    num_tokens = tl.load(table_ptr + span * 6 + 1) - start
    if num_tokens <= 0:
        return
    # Counted from the tile's first token, which keeps offsets short.
    begin = tl.load(table_ptr + span * 6 + 4) - start
    row = tl.load(table_ptr + span * 6 + 5).to(tl.int64)
    token = tl.arange(0, TOKENS)[:, None]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    there = channel < C
    live = (token < num_tokens) & there
    x_ptr += start.to(tl.int64) * x_stride + layer * LAYER
    out_ptr += (start.to(tl.int64) * tl.num_programs(2) + layer) * C
    weight_ptr += layer * (C * WIDTH) + channel * WIDTH
    past_ptr = states_ptr + row * row_stride + (layer * C + channel) * (WIDTH - 1) + (WIDTH - 1 - begin)
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for k in tl.static_range(WIDTH):
        at = token + (k + 1 - WIDTH)
        value = tl.load(x_ptr + at * x_stride + channel, mask=live & (at >= begin), other=0.0)
        if begin > k + 1 - WIDTH:  # some token of this tile reaches back into the row
            value += tl.load(past_ptr + at, mask=live & (at < begin), other=0.0).to(value.dtype)
        weight = tl.load(weight_ptr + k, mask=there, other=0.0)
        total += value.to(tl.float32) * weight.to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + layer * C + channel, mask=there, other=0.0).to(tl.float32)
    out = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr + token * (tl.num_programs(2) * C) + channel, out.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["num_spans"])
def _history_kernel(
    x_ptr, states_ptr, table_ptr, num_spans, x_stride, row_stride, LAYER: tl.constexpr, C: tl.constexpr,
    HISTORY: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The last inputs of CHANNELS channels of a layer, moved on from span to span; grid (spans, blocks of C, L)."""
    span, layer = tl.program_id(0), tl.program_id(2)
    source = tl.load(table_ptr + span * 6 + 2)
    if source < 0:
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    place = tl.arange(0, BLOCK)
    mask = (place < HISTORY)[:, None] & (channel < C)
    states_ptr += (layer * C + channel) * HISTORY + place[:, None]
    past = tl.load(states_ptr + source.to(tl.int64) * row_stride, mask=mask, other=0.0)
    tl.debug_barrier()  # as in _states_kernel
    while span < num_spans:
        first, end = tl.load(table_ptr + span * 6), tl.load(table_ptr + span * 6 + 1)
        at = (end - HISTORY + place)[:, None]
        new = tl.load(
            x_ptr + at.to(tl.int64) * x_stride + layer * LAYER + channel, mask=mask & (at >= first), other=0.0
        )
        moves = (place[:, None] + end - first) == place[None, :]
        kept = tl.sum(tl.where(moves[:, :, None], past.to(tl.float32)[None, :, :], 0.0), 1)
        past = tl.where(at >= first, new, kept.to(new.dtype)).to(past.dtype)
        target = tl.load(table_ptr + span * 6 + 3).to(tl.int64)
        if target >= 0:
            tl.store(states_ptr + target * row_stride, past, mask=mask)
        span += 1
        goes_on = tl.load(table_ptr + span * 6 + 2, mask=span < num_spans, other=0) < 0
        span = tl.where(goes_on, span, num_spans)


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor, table: torch.Tensor,
    chunk_size: int,
) -> torch.Tensor:  # fmt: skip
    """See `causal_conv_ref`; `table` as in `ssd`. Histories are written by a second launch: in the first one, programs
    that start late still read the old ones."""
    layers, channels = x.shape[1:]
    width, spans = weight.shape[2], len(table)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(chunk_size, _CONV_TOKENS)
    grid = (triton.cdiv(channels, _CHANNELS), layers)
    sizes = {"LAYER": x.stride(1), "C": channels, "CHANNELS": _CHANNELS, "num_warps": 4}
    _conv_kernel[(spans * tiles, *grid)](
        x, weight, x if bias is None else bias, states, out, table, tiles, x.stride(0), states.stride(0),
        WIDTH=width, HAS_BIAS=bias is not None, TOKENS=_CONV_TOKENS, **sizes,
    )  # fmt: skip
    if width > 1:
        _history_kernel[(spans, *grid)](
            x, states, table, spans, x.stride(0), states.stride(0), HISTORY=width - 1,
            BLOCK=triton.next_power_of_2(width - 1), **sizes,
        )  # fmt: skip
    return out
