"""What the kernels have in common that take a few rows through many layers in one launch: see persistent_decode.py.

A program stays on its multiprocessor and computes the same columns of every layer. Between two products all programs
need what all have made, so the exchange decides: about the time of one store and one load through L2, where a launch
would take two to three times that. There is no barrier. A number travels as a word, bfloat16 above and a tag below, and
who needs it reads until the tag is the one expected (as in the LL protocol of NCCL: github.com/NVIDIA/nccl). Tags count
blocks, on from launch to launch. A region of words may be written again a block later: whoever does so has by then read
what in the end depends on all reads of the older words.

Weights do not wait for that: a program loads its part of them before it reads words. Rows are columns of the matrix
units' tiles, of which there are eight, and K is split over warps, so that a narrow tile keeps all of them busy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Rows of a tile, warps of a program, and of each step along K what a warp takes.
_ROWS, _WARPS, _KB = tl.constexpr(8), tl.constexpr(8), tl.constexpr(128)
_PROBE_ROWS = tl.constexpr(4)
# Where a layer's parameters stand in the table.
_NORM, _IN, _MIXER_NORM, _KEY_NORM, _OUT, _MLP_NORM, _GATE_UP, _DOWN, _PARTS = map(tl.constexpr, range(9))


@triton.jit
def _address(table_ptr, layer, PART: tl.constexpr):
    return tl.multiple_of(tl.load(table_ptr + layer * _PARTS + PART).to(tl.pointer_type(tl.bfloat16)), 16)


@triton.jit
def _value(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _any_late(words, tag):
    """Not 0 while some of these words are older than wanted."""
    late = words[0] ^ tag
    for i in tl.static_range(1, len(words)):
        late |= words[i] ^ tag
    return tl.max(late & 65535, axis=None)


@triton.jit
def _receive(ptr, mask, tag):
    """The numbers there, 0 outside of the mask."""
    word = tl.load(ptr, mask=mask, other=tag, volatile=True)
    while _any_late((word,), tag) != 0:
        word = tl.load(ptr, mask=mask, other=tag, volatile=True)
    return _value(word)


@triton.jit
def _await(ptr, mask, tag):
    """Until all words there are new."""
    late = _any_late((tl.load(ptr, mask=mask, other=tag, volatile=True),), tag)
    while late != 0:
        late = _any_late((tl.load(ptr, mask=mask, other=tag, volatile=True),), tag)


@triton.jit
def _send(ptr, value, tag, mask):
    bits = value.to(tl.bfloat16).to(tl.float32).to(tl.int32, bitcast=True)
    tl.store(ptr, bits | tag, mask=mask)


@triton.jit
def _columns(
    w_ptr, first, chunk: tl.constexpr, N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """One step along K of the weights [N, K] of a program's columns, [_WARPS, M, _KB]; with GATED half of M are gate's,
    half are up's, which lie N rows behind."""
    HALF: tl.constexpr = M // 2 if GATED else M
    m = tl.arange(0, M)
    column = first + m % HALF
    k = (tl.arange(0, _WARPS) + chunk * _WARPS)[:, None, None] * _KB + tl.arange(0, _KB)[None, None, :]
    mask = ((m % HALF < COLUMNS) & (column < N))[None, :, None] & (k < K)
    return tl.load(w_ptr + (column + m // HALF * N)[None, :, None] * K + k, mask=mask, other=0.0)


@triton.jit
def _words(x_ptr, z_ptr, tag, K: tl.constexpr, Z: tl.constexpr, ROWS: tl.constexpr):
    """All of x [ROWS, K] in steps along K, [_WARPS, _ROWS, _KB] each, with those of z between them: on their way
    together."""
    row = tl.arange(0, _ROWS)[None, :, None]
    words = ()
    for chunk in tl.static_range((K + _WARPS * _KB - 1) // (_WARPS * _KB)):
        k = (tl.arange(0, _WARPS) + chunk * _WARPS)[:, None, None] * _KB + tl.arange(0, _KB)[None, None, :]
        mask = (row < ROWS) & (k < K)
        words += (tl.load(x_ptr + row * K + k, mask=mask, other=tag, volatile=True),)
        if Z > 0:
            words += (tl.load(z_ptr + row * Z + k, mask=mask, other=tag, volatile=True),)
    return words


@triton.jit
def _fetch_ahead(w_ptr, first, N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr):
    """Lines of L2 with a program's columns, from memory: nothing waits for them."""
    LINES: tl.constexpr = triton.next_power_of_2((COLUMNS * K * 2 + 127) // 128)
    line = tl.arange(0, LINES) * 128
    last = tl.minimum(COLUMNS, N - first) * (K * 2) - 1
    for half in tl.static_range(HALVES):
        address = (w_ptr + (first + half * N).to(tl.int64) * K).to(tl.int64) + tl.maximum(tl.minimum(line, last), 0)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _linear(
    x_ptr, x_tag, z_ptr, table_ptr, layer, ahead, eps, residual_ptr, out_ptr, tag, member, MEMBERS: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, Z: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, W: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """[ROWS, K] words times W's columns, COLUMNS a program, to [ROWS, N] words. Z: x is first multiplied with silu of
    words in rows of Z. W, NORM: parts of the table; NORM, unless it is -1, a RMSNorm's of x, whose factor comes last.
    GATED: silu of N columns times N more. ADD: residual, which this program has written itself, is added. AHEAD: the
    same columns of layer `ahead` are sent for."""
    w_ptr = _address(table_ptr, layer, W)
    CHUNKS: tl.constexpr = (K + _WARPS * _KB - 1) // (_WARPS * _KB)
    HALF: tl.constexpr = M // 2 if GATED else M
    EACH: tl.constexpr = 2 if Z > 0 else 1
    row = tl.arange(0, _ROWS)
    for i in tl.static_range((N + MEMBERS * COLUMNS - 1) // (MEMBERS * COLUMNS)):
        first = (member + i * MEMBERS) * COLUMNS
        # Who has no column reads nothing: nobody would wait for it, and words that it still expects be overwritten.
        if first < N:
            tiles, norms = (), ()
            for chunk in tl.static_range(CHUNKS):
                tiles += (_columns(w_ptr, first, chunk, N, K, COLUMNS, M, GATED),)
                if NORM >= 0:
                    k = (tl.arange(0, _WARPS) + chunk * _WARPS)[:, None, None] * _KB + tl.arange(0, _KB)[None, None, :]
                    norms += (tl.load(_address(table_ptr, layer, NORM) + k, mask=k < K, other=0.0),)
            column = first + tl.arange(0, HALF)[:, None]
            at = row[None, :] * N + column
            mask = (row[None, :] < ROWS) & (column < tl.minimum(first + COLUMNS, N))
            if ADD:
                residual = _value(tl.load(residual_ptr + at, mask=mask, other=0, volatile=True))
            acc = tl.zeros([_WARPS, M, _ROWS], tl.float32)
            squares = tl.zeros([_ROWS], tl.float32)
            if ROWS >= _PROBE_ROWS:
                # The last row alone at first: reading all over and over would slow down those who write.
                k = tl.arange(0, triton.next_power_of_2(K))
                _await(x_ptr + (ROWS - 1) * K + k, k < K, x_tag)
            words = _words(x_ptr, z_ptr, x_tag, K, Z, ROWS)
            while _any_late(words, x_tag) != 0:
                words = _words(x_ptr, z_ptr, x_tag, K, Z, ROWS)
            for chunk in tl.static_range(CHUNKS):
                x = _value(words[chunk * EACH])
                if Z > 0:
                    z = _value(words[chunk * EACH + 1])
                    x = x * (z / (1.0 + tl.exp(-z)))
                if NORM >= 0:
                    squares += tl.sum(tl.sum(x * x, 2), 0)
                    x = x * norms[chunk].to(tl.float32)
                acc = tl.dot(tiles[chunk], tl.permute(x.to(tl.bfloat16), (0, 2, 1)), acc)
            y = tl.sum(acc, 0)
            if NORM >= 0:
                y = y * tl.rsqrt(squares / K + eps)[None, :]
            if GATED:
                gate, up = tl.split(tl.permute(tl.reshape(y, [2, HALF, _ROWS]), (1, 2, 0)))
                y = gate / (1.0 + tl.exp(-gate)) * up
            if ADD:
                y += residual
            _send(out_ptr + at, y, tag, mask)
            if AHEAD:
                _fetch_ahead(_address(table_ptr, ahead, W), first, N, K, COLUMNS, 2 if GATED else 1)


@triton.jit
def _mix_out_and_mlp(
    mixed_ptr, z_ptr, hidden_ptr, middle_ptr, inner_ptr, table_ptr, layer, ahead, tag, eps, pid,
    PROGRAMS: tl.constexpr, HIDDEN: tl.constexpr, MIXED: tl.constexpr, Z: tl.constexpr, INNER: tl.constexpr,
    COLUMNS: tl.constexpr, M: tl.constexpr, INNER_COLUMNS: tl.constexpr, INNER_M: tl.constexpr, ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """What follows a mixer: its output projection, and the MLP; with Z its gated norm ahead of them."""
    _linear(
        mixed_ptr, tag, z_ptr, table_ptr, layer, ahead, eps, hidden_ptr, middle_ptr, tag, pid, PROGRAMS, HIDDEN,
        MIXED, Z, COLUMNS, M, ROWS, _MIXER_NORM if Z > 0 else -1, _OUT, False, True, AHEAD,
    )  # fmt: skip
    _linear(
        middle_ptr, tag, middle_ptr, table_ptr, layer, ahead, eps, middle_ptr, inner_ptr, tag, pid, PROGRAMS, INNER,
        HIDDEN, 0, INNER_COLUMNS, INNER_M, ROWS, _MLP_NORM, _GATE_UP, True, False, AHEAD,
    )  # fmt: skip
    _linear(
        inner_ptr, tag, inner_ptr, table_ptr, layer, ahead, eps, middle_ptr, hidden_ptr, tag, pid, PROGRAMS, HIDDEN,
        INNER, 0, COLUMNS, M, ROWS, -1, _DOWN, False, True, AHEAD,
    )  # fmt: skip


@triton.jit
def _begin(
    x_ptr, out_ptr, tag, num_rows, pid, PROGRAMS: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr,
    M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """x [num_rows, N] as words; rows beyond the last are like that."""
    row, m = tl.arange(0, _ROWS)[None, :], tl.arange(0, M)[:, None]
    for i in tl.static_range((N + PROGRAMS * COLUMNS - 1) // (PROGRAMS * COLUMNS)):
        column = (pid + i * PROGRAMS) * COLUMNS + m
        mask = (m < COLUMNS) & (column < N) & (row < ROWS)
        x = tl.load(x_ptr + tl.minimum(row, num_rows - 1) * N + column, mask=mask, other=0.0)
        _send(out_ptr + row * N + column, x, tag, mask)


@triton.jit
def _end(
    word_ptr, out_ptr, num_rows, pid, PROGRAMS: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr
):
    """A program's own words as numbers [num_rows, N]."""
    tl.debug_barrier()
    row, m = tl.arange(0, _ROWS)[None, :], tl.arange(0, M)[:, None]
    for i in tl.static_range((N + PROGRAMS * COLUMNS - 1) // (PROGRAMS * COLUMNS)):
        column = (pid + i * PROGRAMS) * COLUMNS + m
        mask = (m < COLUMNS) & (column < N) & (row < num_rows)
        word = tl.load(word_ptr + row * N + column, mask=mask, other=0, volatile=True)
        tl.store(out_ptr + row * N + column, _value(word).to(tl.bfloat16), mask=mask)


def common_sizes(x: torch.Tensor, inner: int, programs: int, **widths: tuple[int, int]) -> dict[str, int]:
    """What kernels have in common, and columns of a program and its tile in products.

    Args:
        x: [R, d].
        inner: size of the MLP.
        programs: all that run.
        widths: columns of further products by prefix, and how many programs share them out.
    """
    sizes = {"PROGRAMS": programs, "ROWS": triton.next_power_of_2(len(x)), "HIDDEN": x.shape[1], "INNER": inner}
    sizes["AHEAD"] = programs > 1
    for kind, (width, members) in {"": (x.shape[1], programs), "INNER_": (inner, programs), **widths}.items():
        # An MLP's tile has as many columns of up beside those of gate.
        most, tiles = (32, 2) if kind == "INNER_" else (16, 1)
        columns = min(most, triton.cdiv(width, members))
        sizes |= {f"{kind}COLUMNS": columns, f"{kind}M": tiles * max(16 // tiles, triton.next_power_of_2(columns))}
    return sizes


def launch_options(x: torch.Tensor) -> dict[str, object]:
    """Of a launch whose programs wait for each other, so all have to run at once."""
    return {"num_warps": _WARPS.value, "num_stages": 1, **({"launch_cooperative_grid": True} if x.is_cuda else {})}
