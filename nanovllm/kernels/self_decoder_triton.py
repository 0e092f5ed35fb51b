"""All loops of a self-decoder over sliding windows in one launch. See persistent_decode.py for the contract, and
persistent_triton.py for how programs exchange what they compute."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanovllm.kernels.persistent_triton import (
    _IN,
    _KEY_NORM,
    _MIXER_NORM,
    _NORM,
    _address,
    _any_late,
    _begin,
    _end,
    _linear,
    _mix_out_and_mlp,
    _send,
    _value,
    common_sizes,
    launch_options,
)
from nanovllm.kernels.window_decode_triton import _attend, _factors, _load_tile, _rotated

_LOG2_E = 1.4426950408889634
_TILE_BYTES = 32768  # of keys, and of values


@triton.jit
def _window(
    qkv_ptr, tag, out_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, position_ptr, rows_ptr, k_ptr, v_ptr, task,
    num_rows, window, eps, scale_log2, SIZE: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One KV head of one row, as `window_decode` does it. A row beyond the last is like that, its writes too."""
    kv_head, i = task % KV, task // KV
    position = tl.load(position_ptr + tl.minimum(i, num_rows - 1))
    ring = (tl.load(rows_ptr + tl.minimum(i, num_rows - 1)) * (SIZE * KV) + kv_head) * D
    k_ptr += ring
    v_ptr += ring
    k, v, live = _load_tile(k_ptr, v_ptr, 0, position, window, SIZE, KV, D, BLOCK_N, BLOCK_D)
    weight, other_weight, cos, sin = _factors(
        q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, position, GROUP, D, BLOCK_H, BLOCK_D, NORM
    )
    head, dims = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    partner = tl.where(dims < D // 2, dims + D // 2, dims - D // 2)
    in_head = dims < D
    is_q, is_k = (head < GROUP) & in_head, (head == GROUP) & in_head
    qkv_ptr += i * (KV * (GROUP + 2) * D)
    source = qkv_ptr + tl.where(head < GROUP, kv_head * GROUP + head, KV * GROUP + kv_head) * D
    own_ptr = qkv_ptr + (KV * (GROUP + 1) + kv_head) * D + dims
    x = tl.load(source + dims, mask=is_q | is_k, other=tag, volatile=True)
    other = tl.load(source + partner, mask=is_q | is_k, other=tag, volatile=True)
    own_v = tl.load(own_ptr, mask=in_head, other=tag, volatile=True)
    while _any_late((x, other, own_v), tag) != 0:  # all three at once: one way through L2
        x = tl.load(source + dims, mask=is_q | is_k, other=tag, volatile=True)
        other = tl.load(source + partner, mask=is_q | is_k, other=tag, volatile=True)
        own_v = tl.load(own_ptr, mask=in_head, other=tag, volatile=True)
    own_v = _value(own_v).to(tl.bfloat16)
    heads = _rotated(_value(x), _value(other), weight, other_weight, cos, sin, eps, D, NORM).to(tl.bfloat16)
    slot = position % SIZE * (KV * D)
    tl.store(k_ptr + slot + dims + tl.zeros_like(head), heads, mask=is_k)
    tl.store(v_ptr + slot + dims, own_v, mask=in_head)
    acc = _attend(
        heads, own_v, k, v, live, k_ptr, v_ptr, position, window, scale_log2, SIZE, KV, GROUP, D, BLOCK_H, BLOCK_D,
        BLOCK_N,
    )  # fmt: skip
    _send(out_ptr + (i * (KV * GROUP) + kv_head * GROUP + head) * D + dims, acc, tag, is_q)


@triton.jit(do_not_specialize=["num_rows", "window"])
def _self_decoder_kernel(
    x_ptr, out_ptr, table_ptr, cos_ptr, sin_ptr, position_ptr, rows_ptr, k_ptr, v_ptr, words_ptr, num_rows, window,
    eps, scale_log2, ring_stride, LAYERS: tl.constexpr, BLOCKS: tl.constexpr, PROGRAMS: tl.constexpr,
    READERS: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, INNER: tl.constexpr, SIZE: tl.constexpr, IN_COLUMNS: tl.constexpr, IN_M: tl.constexpr,
    COLUMNS: tl.constexpr, M: tl.constexpr, INNER_COLUMNS: tl.constexpr, INNER_M: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, NORM: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """All loops of the self-decoder. The last READERS programs attend: while the others project queries, keys and
    values, those load the old keys and values."""
    QKV: tl.constexpr = KV * (GROUP + 2) * D
    MAKERS: tl.constexpr = PROGRAMS - READERS if PROGRAMS > READERS else PROGRAMS
    pid = tl.program_id(0)
    hidden_ptr = words_ptr + 4
    middle_ptr = hidden_ptr + ROWS * HIDDEN
    qkv_ptr = middle_ptr + ROWS * HIDDEN
    mixed_ptr = qkv_ptr + ROWS * QKV
    inner_ptr = mixed_ptr + ROWS * KV * GROUP * D
    tag = tl.load(words_ptr) & 65535
    _begin(x_ptr, hidden_ptr, tag, num_rows, pid, PROGRAMS, HIDDEN, COLUMNS, M, ROWS)
    for block in range(BLOCKS):
        layer, ahead, before, tag = block % LAYERS, (block + 1) % LAYERS, tag, (tag + 1) & 65535
        if pid < MAKERS:
            _linear(
                hidden_ptr, before, hidden_ptr, table_ptr, layer, ahead, eps, hidden_ptr, qkv_ptr, tag, pid, MAKERS,
                QKV, HIDDEN, 0, IN_COLUMNS, IN_M, ROWS, _NORM, _IN, False, False, AHEAD,
            )  # fmt: skip
        if pid >= PROGRAMS - READERS:
            for task in range(pid - (PROGRAMS - READERS), ROWS * KV, READERS):
                _window(
                    qkv_ptr, tag, mixed_ptr, _address(table_ptr, layer, _MIXER_NORM),
                    _address(table_ptr, layer, _KEY_NORM), cos_ptr, sin_ptr, position_ptr, rows_ptr,
                    k_ptr + block * ring_stride, v_ptr + block * ring_stride, task, num_rows, window, eps, scale_log2,
                    SIZE, KV, GROUP, D, BLOCK_H, BLOCK_D, BLOCK_N, NORM,
                )  # fmt: skip
        _mix_out_and_mlp(
            mixed_ptr, mixed_ptr, hidden_ptr, middle_ptr, inner_ptr, table_ptr, layer, ahead, tag, eps, pid, PROGRAMS,
            HIDDEN, KV * GROUP * D, 0, INNER, COLUMNS, M, INNER_COLUMNS, INNER_M, ROWS, AHEAD,
        )  # fmt: skip
    _end(hidden_ptr, out_ptr, num_rows, pid, PROGRAMS, HIDDEN, COLUMNS, M)
    if pid == 0:
        tl.store(words_ptr, tag + 1)  # the next launch goes on from there


def self_decoder(
    x: torch.Tensor,
    table: torch.Tensor,
    cos_table: torch.Tensor,
    sin_table: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    k_rings: torch.Tensor,
    v_rings: torch.Tensor,
    words: torch.Tensor,
    window: int,
    inner: int,
    heads: int,
    qk_norm: bool,
    eps: float,
    programs: int,
) -> torch.Tensor:
    """See `kernels/persistent_decode.py`."""
    blocks, _, size, kv_heads, dim = k_rings.shape
    out = torch.empty_like(x)
    readers = min(triton.next_power_of_2(len(x)) * kv_heads, max(1, programs // 4))
    sizes = common_sizes(x, inner, programs, IN_=((heads + 2 * kv_heads) * dim, max(programs - readers, 1)))
    block_d = max(16, triton.next_power_of_2(dim))
    _self_decoder_kernel[(programs,)](
        x, out, table, cos_table, sin_table, positions, rows, k_rings, v_rings, words, len(x), window, eps,
        dim**-0.5 * _LOG2_E, k_rings.stride(0), LAYERS=len(table), BLOCKS=blocks, READERS=readers, KV=kv_heads,
        GROUP=heads // kv_heads, D=dim, SIZE=size, BLOCK_H=max(16, triton.next_power_of_2(heads // kv_heads + 1)),
        BLOCK_D=block_d, BLOCK_N=max(16, min(triton.next_power_of_2(size), _TILE_BYTES // (2 * block_d))), NORM=qk_norm,
        **sizes, **launch_options(x),
    )  # fmt: skip
    return out
