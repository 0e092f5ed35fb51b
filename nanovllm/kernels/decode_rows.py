"""The two ends of a decode step: from rows of device state to a forward pass's inputs, and the drawn tokens back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.choice import twin


class DecodeRows(NamedTuple):
    """Inputs of R sequences that decode one token each.

    token_ids, positions, slot_mapping [R] int64 (slot -1 for padding); context_lens [R] int32, the new token
    included (0 for padding); block_table [R, max_blocks] int32.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    context_lens: Tensor
    block_table: Tensor


def gather_rows_ref(
    rows: Tensor, last_token: Tensor, context_len: Tensor, block_table: Tensor, block_size: int, padding_row: int
) -> DecodeRows:
    """Look up what the rows decode next.

    Args:
        rows: [R] int64; `padding_row` any number of times.
        last_token, context_len: [N] int64, the token to go on from and the tokens with KV of every row.
        block_table: [N, max_blocks] int32.
        block_size: tokens per block.
        padding_row: the row that belongs to nobody.
    """
    positions, table = context_len[rows], block_table[rows]
    is_padding = rows == padding_row
    block_ids = table.gather(1, (positions // block_size)[:, None])[:, 0].to(torch.int64)
    slots = (block_ids * block_size + positions % block_size).masked_fill(is_padding, -1)
    context_lens = (positions + 1).masked_fill(is_padding, 0).to(torch.int32)
    return DecodeRows(last_token[rows], positions, slots, context_lens, table)


def gather_rows(
    rows: Tensor, last_token: Tensor, context_len: Tensor, block_table: Tensor, block_size: int, padding_row: int
) -> DecodeRows:
    """`gather_rows_ref`, by one kernel where there is one instead of fifteen."""
    kernel = twin("decode_rows") if rows.is_cuda else None
    if kernel is None:
        return gather_rows_ref(rows, last_token, context_len, block_table, block_size, padding_row)
    return DecodeRows(*kernel.gather_rows(rows, last_token, context_len, block_table, block_size, padding_row))


def scatter_tokens_ref(rows: Tensor, token_ids: Tensor, last_token: Tensor) -> None:
    """last_token[rows] = token_ids [R]; a failed row (-1) goes on from token 0 until its sequence ends."""
    last_token[rows] = token_ids.clamp_min(0)


def scatter_tokens(rows: Tensor, token_ids: Tensor, last_token: Tensor) -> None:
    """`scatter_tokens_ref`, by a kernel where there is one."""
    kernel = twin("decode_rows") if rows.is_cuda and len(rows) else None
    run = scatter_tokens_ref if kernel is None else kernel.scatter_tokens
    run(rows, token_ids, last_token)
