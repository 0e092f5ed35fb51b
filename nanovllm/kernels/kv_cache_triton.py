"""Keys and values from one cache to another in one launch; see kv_cache.py for the contract."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Numbers of a program's tile.
_TILE = 4096


@triton.jit(do_not_specialize=["count"])
def _move_kernel(
    k_source_ptr, v_source_ptr, k_target_ptr, v_target_ptr, slots_ptr, count,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SLOTS slots, keys and values."""
    at = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    begin = tl.load(slots_ptr + at, mask=at < count, other=0)
    end = tl.load(slots_ptr + count + at, mask=at < count, other=-1)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (end >= 0)[:, None] & (column < WIDTH)
    begin, end = begin[:, None] * WIDTH + column, end[:, None] * WIDTH + column
    tl.store(k_target_ptr + end, tl.load(k_source_ptr + begin, mask=mask), mask=mask)
    tl.store(v_target_ptr + end, tl.load(v_source_ptr + begin, mask=mask), mask=mask)


def move_kv(
    source: tuple[torch.Tensor, torch.Tensor], target: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
) -> None:
    """See `move_kv_ref`."""
    count, width = slots.shape[1], source[0][0, 0].numel()
    block = triton.next_power_of_2(width)
    rows = max(1, _TILE // block)
    _move_kernel[(triton.cdiv(count, rows),)](
        *source, *target, slots, count, WIDTH=width, SLOTS=rows, BLOCK=block, num_warps=4
    )
