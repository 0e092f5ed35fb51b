"""Device state to inputs and back, one launch each: at small batches every launch counts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["padding_row", "max_blocks"])
def _gather_kernel(
    rows_ptr, last_token_ptr, context_len_ptr, table_ptr, token_ptr, position_ptr, slot_ptr, context_ptr,
    out_table_ptr, max_blocks, padding_row, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK entries of one row's block table; the first program of a row does the rest too."""
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < max_blocks
    entries = tl.load(table_ptr + row * max_blocks + column, mask=mask, other=0)
    tl.store(out_table_ptr + i.to(tl.int64) * max_blocks + column, entries, mask=mask)
    if tl.program_id(1) == 0:
        position = tl.load(context_len_ptr + row)
        block_id = tl.load(table_ptr + row * max_blocks + position // BLOCK_SIZE).to(tl.int64)
        is_padding = row == padding_row
        slot = tl.where(is_padding, -1, block_id * BLOCK_SIZE + position % BLOCK_SIZE)
        tl.store(token_ptr + i, tl.load(last_token_ptr + row))
        tl.store(position_ptr + i, position)
        tl.store(slot_ptr + i, slot)
        tl.store(context_ptr + i, tl.where(is_padding, 0, position + 1).to(tl.int32))


@triton.jit(do_not_specialize=["num_rows"])
def _scatter_kernel(rows_ptr, token_ptr, last_token_ptr, num_rows, BLOCK: tl.constexpr):
    """BLOCK tokens."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_rows
    row = tl.load(rows_ptr + i, mask=mask, other=0)
    token = tl.load(token_ptr + i, mask=mask, other=0)
    tl.store(last_token_ptr + row, tl.maximum(token, 0), mask=mask)


def gather_rows(
    rows: Tensor, last_token: Tensor, context_len: Tensor, block_table: Tensor, block_size: int, padding_row: int
) -> tuple[Tensor, ...]:
    """See `kernels/decode_rows.py`."""
    num_rows, max_blocks = rows.shape[0], block_table.shape[1]
    token_ids, positions, slots = torch.empty(3, num_rows, dtype=torch.int64, device=rows.device)
    context_lens = torch.empty(num_rows, dtype=torch.int32, device=rows.device)
    table = torch.empty(num_rows, max_blocks, dtype=torch.int32, device=rows.device)
    _gather_kernel[(num_rows, triton.cdiv(max_blocks, _BLOCK))](
        rows, last_token, context_len, block_table, token_ids, positions, slots, context_lens, table, max_blocks,
        padding_row, BLOCK_SIZE=block_size, BLOCK=min(_BLOCK, triton.next_power_of_2(max_blocks)), num_warps=4,
    )  # fmt: skip
    return token_ids, positions, slots, context_lens, table


def scatter_tokens(rows: Tensor, token_ids: Tensor, last_token: Tensor) -> None:
    """See `kernels/decode_rows.py`."""
    grid = (triton.cdiv(len(rows), _BLOCK),)
    _scatter_kernel[grid](rows, token_ids, last_token, len(rows), BLOCK=_BLOCK, num_warps=4)
