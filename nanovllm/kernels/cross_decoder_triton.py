"""Cross-Mamba layers between two attention layers in one launch, with all of these but attention itself. See
persistent_decode.py for the contract, and persistent_triton.py for how programs exchange what they compute."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanovllm.kernels.persistent_triton import (
    _IN,
    _NORM,
    _begin,
    _end,
    _linear,
    _mix_out_and_mlp,
    _receive,
    _send,
    common_sizes,
    launch_options,
)

_STATE = 2048  # numbers of a tile of states: with 24 heads of 64 x 128, 96 tiles a row


@triton.jit
def _task(task, H: tl.constexpr, TILES: tl.constexpr, BLOCK_P: tl.constexpr):
    """Row, head and rows of its state."""
    return task // (H * TILES), task // TILES % H, task % TILES * BLOCK_P + tl.arange(0, BLOCK_P)


@triton.jit(do_not_specialize=["num_rows", "first_layer", "first_state", "num_layers"])
def _cross_decoder_kernel(
    x_ptr, attended_ptr, out_ptr, q_ptr, table_ptr, rows_ptr, words_ptr, conv_ptr, b_ptr, dt_ptr, a_log_ptr, d_ptr,
    state_ptr, num_rows, first_layer, first_state, num_layers, eps, conv_stride, dt_stride, state_stride,
    C: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr, Q: tl.constexpr, H: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, INNER: tl.constexpr, IN_COLUMNS: tl.constexpr, IN_M: tl.constexpr,
    Q_COLUMNS: tl.constexpr, Q_M: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, INNER_COLUMNS: tl.constexpr,
    INNER_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, ATTENDED: tl.constexpr,
    ATTENDS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """ATTENDED: the rest of the layer before first_layer, from what its attention has given. Then num_layers
    cross-Mamba layers, with states from first_state on. ATTENDS: the queries of the layer after them.

    Of the memory x and b [num_rows, L, C], dt [num_rows, L, H], a_log and d [L, H] are there; a program moves the same
    tiles of state on in every layer, and does so before it needs C."""
    E: tl.constexpr = H * P
    TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    TASKS: tl.constexpr = (ROWS * H * TILES + PROGRAMS - 1) // PROGRAMS
    pid = tl.program_id(0)
    hidden_ptr = words_ptr + 4
    middle_ptr = hidden_ptr + ROWS * HIDDEN
    inner_ptr = middle_ptr + ROWS * HIDDEN
    q_words_ptr = inner_ptr + ROWS * INNER
    zc_ptr = q_words_ptr + ROWS * Q
    mixed_ptr = zc_ptr + ROWS * (E + N)
    n = tl.arange(0, BLOCK_N)
    tag = tl.load(words_ptr) & 65535
    _begin(x_ptr, hidden_ptr, tag, num_rows, pid, PROGRAMS, HIDDEN, COLUMNS, M, ROWS)
    if ATTENDED:
        tag = (tag + 1) & 65535
        _begin(attended_ptr, q_words_ptr, tag, num_rows, pid, PROGRAMS, Q, Q_COLUMNS, Q_M, ROWS)
        _mix_out_and_mlp(
            q_words_ptr, q_words_ptr, hidden_ptr, middle_ptr, inner_ptr, table_ptr, first_layer - 1, first_layer, tag,
            eps, pid, PROGRAMS, HIDDEN, Q, 0, INNER, COLUMNS, M, INNER_COLUMNS, INNER_M, ROWS, False,
        )  # fmt: skip
    end = first_layer + num_layers
    for layer in range(first_layer, end):
        before, tag, ahead = tag, (tag + 1) & 65535, tl.minimum(layer + 1, end - 1)
        index = layer - first_layer + first_state
        states = ()
        for t in tl.static_range(TASKS):  # all loads first: they are under way together
            i, head, p = _task(pid + t * PROGRAMS, H, TILES, BLOCK_P)
            row = tl.load(rows_ptr + tl.minimum(i, num_rows - 1))
            at = row * state_stride + ((index * H + head) * P + p)[:, None].to(tl.int64) * N + n[None, :]
            mask = (p < tl.where(i < num_rows, P, 0))[:, None] & (n < N)[None, :]
            states += ((state_ptr + at, mask, tl.load(state_ptr + at, mask=mask, other=0.0)),)
        moved = ()
        for t in tl.static_range(TASKS):
            i, head, p = _task(pid + t * PROGRAMS, H, TILES, BLOCK_P)
            own = tl.minimum(i, num_rows - 1)
            at = own * conv_stride + index * C
            x = tl.load(conv_ptr + at + head * P + p, mask=p < P, other=0.0).to(tl.float32)
            b = tl.load(b_ptr + at + n, mask=n < N, other=0.0).to(tl.float32)
            dt = tl.load(dt_ptr + own * dt_stride + index * H + head)
            decay = tl.exp(-dt * tl.exp(tl.load(a_log_ptr + index * H + head)))
            state = decay * states[t][2] + (dt * x)[:, None] * b[None, :]
            tl.store(states[t][0], state, mask=states[t][1])
            moved += ((state, tl.load(d_ptr + index * H + head) * x),)
        _linear(
            hidden_ptr, before, hidden_ptr, table_ptr, layer, ahead, eps, hidden_ptr, zc_ptr, tag, pid, PROGRAMS, E + N,
            HIDDEN, 0, IN_COLUMNS, IN_M, ROWS, _NORM, _IN, False, False, AHEAD,
        )  # fmt: skip
        for t in tl.static_range(TASKS):
            i, head, p = _task(pid + t * PROGRAMS, H, TILES, BLOCK_P)
            if i < ROWS:  # as for columns
                c = _receive(zc_ptr + i * (E + N) + E + n, n < N, tag)
                y = tl.sum(moved[t][0] * c[None, :], 1) + moved[t][1]
                _send(mixed_ptr + i * E + head * P + p, y, tag, p < P)
        _mix_out_and_mlp(
            mixed_ptr, zc_ptr, hidden_ptr, middle_ptr, inner_ptr, table_ptr, layer, ahead, tag, eps, pid, PROGRAMS,
            HIDDEN, E, E + N, INNER, COLUMNS, M, INNER_COLUMNS, INNER_M, ROWS, AHEAD,
        )  # fmt: skip
    if ATTENDS:
        _linear(
            hidden_ptr, tag, hidden_ptr, table_ptr, end, end, eps, hidden_ptr, q_words_ptr, (tag + 1) & 65535, pid,
            PROGRAMS, Q, HIDDEN, 0, Q_COLUMNS, Q_M, ROWS, _NORM, _IN, False, False, False,
        )  # fmt: skip
        _end(q_words_ptr, q_ptr, num_rows, pid, PROGRAMS, Q, Q_COLUMNS, Q_M)
    _end(hidden_ptr, out_ptr, num_rows, pid, PROGRAMS, HIDDEN, COLUMNS, M)
    if pid == 0:
        tl.store(words_ptr, tag + 2)  # the next launch goes on from there


def cross_decoder(
    x: torch.Tensor,
    attended: torch.Tensor | None,
    table: torch.Tensor,
    layers: tuple[int, int, int],
    q_size: int,
    memory: tuple[torch.Tensor, ...],
    states: torch.Tensor,
    rows: torch.Tensor,
    words: torch.Tensor,
    inner: int,
    eps: float,
    programs: int,
    attends: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `kernels/persistent_decode.py`."""
    conv, b, dt, a_log, d = memory
    _, _, heads, dim, size = states.shape
    out, q = torch.empty_like(x), x.new_empty(len(x), q_size) if attends else None
    block_n = triton.next_power_of_2(size)
    block_p = min(triton.next_power_of_2(dim), max(1, _STATE // block_n))
    _cross_decoder_kernel[(programs,)](
        x, attended if attended is not None else x, out, q if attends else x, table, rows, words, conv, b, dt, a_log, d,
        states, len(x), *layers, eps, conv.stride(0), dt.stride(0), states.stride(0), C=conv.stride(1), Q=q_size,
        H=heads, P=dim, N=size, BLOCK_P=block_p, BLOCK_N=block_n, ATTENDED=attended is not None, ATTENDS=attends,
        **common_sizes(x, inner, programs, IN_=(heads * dim + size, programs), Q_=(q_size, programs)),
        **launch_options(x),
    )  # fmt: skip
    return out, q
