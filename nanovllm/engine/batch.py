"""From a `Step` to device tensors. What a running sequence needs from step to step stays on the device, one row
per sequence; a decode step is told only which rows run and which blocks are new."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.attention.base import AttentionMetadata
from nanovllm.engine.step import PrefillChunk, RowStart, Sampling, Step
from nanovllm.kernels import sampling as ops
from nanovllm.kernels.decode_rows import gather_rows, scatter_tokens


def upload(values: Seq, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A list or array on the device, copied from pinned memory so that the host does not wait."""
    host = torch.as_tensor(np.asarray(values)).to(dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class Rows:
    """Per-sequence state on the device, indexed by row. One row more than asked for belongs to nobody
    (`padding_row`): it has no context, and fills up the batch of a CUDA graph.

    last_token [R] int64: the token to go on from.
    context_len [R] int64: tokens with KV.
    block_table [R, max_blocks] int32.
    temperature, top_p, min_p, presence, frequency, repetition [R] float32; top_k [R] int32; seed [R] int64.
    prompt_mask [R, V] bool and output_counts [R, V] int16: made when the first request asks for penalties.
    """

    def __init__(self, num_rows: int, max_blocks: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self.padding_row = num_rows
        num_rows += 1
        self.last_token = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.context_len = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        # The parameters of a row, one column each, are uploaded together.
        self._floats = torch.zeros(num_rows, 6, dtype=torch.float32, device=device)
        self.temperature, self.top_p, self.min_p, self.presence, self.frequency, self.repetition = self._floats.T
        self.top_k = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.seed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.prompt_mask: torch.Tensor | None = None
        self.output_counts: torch.Tensor | None = None

    def apply(self, step: Step) -> None:
        """Start rows and extend block tables as the step says."""
        if step.starts:
            rows = upload([start.row for start in step.starts], torch.int64, self.device)
            params = [start.params for start in step.starts]
            floats = [
                (p.temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty)
                for p in params
            ]
            self._floats[rows] = upload(floats, torch.float32, self.device)
            self.top_k[rows] = upload([min(p.top_k, self.vocab_size) for p in params], torch.int32, self.device)
            self.seed[rows] = upload([start.seed for start in step.starts], torch.int64, self.device)
            for start in step.starts:
                if start.params.penalized:
                    self._start_counts(start)
        updates = step.block_updates
        if updates.rows:
            entries = upload([updates.rows, updates.columns, updates.block_ids], torch.int64, self.device)
            self.block_table[entries[0], entries[1]] = entries[2].to(torch.int32)

    def record(self, rows: torch.Tensor, token_ids: torch.Tensor, sampling: Sampling) -> None:
        """Remember the drawn tokens ([R'] for [R'] rows); a failed row (-1) goes on from token 0 until it ends."""
        scatter_tokens(rows, token_ids, self.last_token)
        if sampling.penalized:
            at = upload(sampling.penalized, torch.int64, self.device)
            self.output_counts.index_put_(
                (rows[at], token_ids[at].clamp_min(0)),
                torch.ones(1, dtype=torch.int16, device=self.device),
                accumulate=True,
            )

    def penalize(self, logits: torch.Tensor, rows: torch.Tensor, positions: list[int]) -> None:
        """Apply penalties in place to logits[positions]."""
        at = upload(positions, torch.int64, self.device)
        own = rows[at]
        logits[at] = ops.penalize_ref(
            logits[at],
            self.prompt_mask[own],
            self.output_counts[own],
            self.presence[own],
            self.frequency[own],
            self.repetition[own],
        )

    def _start_counts(self, start: RowStart) -> None:
        if self.output_counts is None:
            shape = (self.last_token.shape[0], self.vocab_size)
            self.prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self.output_counts = torch.zeros(shape, dtype=torch.int16, device=self.device)
        self.prompt_mask[start.row].zero_()
        self.prompt_mask[start.row, upload(start.prompt_token_ids, torch.int64, self.device)] = True
        counts = torch.bincount(torch.tensor(start.output_token_ids, dtype=torch.int64), minlength=self.vocab_size)
        self.output_counts[start.row] = upload(counts, torch.int16, self.device)


@dataclass(slots=True)
class Inputs:
    """What a forward pass takes, T tokens: token_ids and positions [T] int64, and where they belong."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata


def decode_inputs(rows: torch.Tensor, state: Rows, block_size: int, seq_lens: list[int]) -> Inputs:
    """One token per row, all from device state; `rows` may hold padding.

    Args:
        rows: [R] int64.
        state: of all rows.
        block_size: tokens per KV block.
        seq_lens: tokens of each row including the new one, or a bound on them.
    """
    gathered = gather_rows(rows, state.last_token, state.context_len, state.block_table, block_size, state.padding_row)
    attention = AttentionMetadata(
        slot_mapping=gathered.slot_mapping,
        block_table=gathered.block_table,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        context_lens=gathered.context_lens,
        query_lens=[1] * len(seq_lens),
        seq_lens=seq_lens,
        is_decode=True,
    )
    return Inputs(gathered.token_ids, gathered.positions, attention)


def pack_prefill(chunks: list[PrefillChunk], num_seqs: int, num_tokens: int, padding_row: int) -> np.ndarray:
    """All that a prefill needs from the host, to cross in one copy: [3 * num_seqs + num_tokens] int64, rows, first
    positions and lengths of the chunks, then their tokens. Sequences and tokens may be fewer than there is room for."""
    packed = np.zeros(3 * num_seqs + num_tokens, dtype=np.int64)
    packed[:num_seqs] = padding_row
    for i, chunk in enumerate(chunks):
        packed[i : 3 * num_seqs : num_seqs] = chunk.row, chunk.start, len(chunk.token_ids)
    first = 3 * num_seqs
    for chunk in chunks:
        end = first + len(chunk.token_ids)
        packed[first:end] = chunk.token_ids
        first = end
    return packed


def prefill_inputs(
    packed: torch.Tensor, num_seqs: int, state: Rows, block_size: int, query_lens: list[int], seq_lens: list[int]
) -> tuple[torch.Tensor, Inputs]:
    """Rows [num_seqs] and inputs of all tokens in a row; nothing but shapes is known to the host, so that a CUDA graph
    can hold it. Padding tokens follow the others: they belong to no sequence, and their KV is not written.

    Args:
        packed: as `pack_prefill` made it, on the device.
        query_lens, seq_lens: the chunks' tokens, and their sequences' up to their end, or bounds on them.
    """
    rows, starts, lens = packed[: 3 * num_seqs].view(3, num_seqs)
    token_ids = packed[3 * num_seqs :]
    ends = lens.cumsum(0)
    index = torch.arange(len(token_ids), device=packed.device)
    owner = torch.searchsorted(ends, index, right=True).clamp_max(num_seqs - 1)
    live = index < ends[-1]
    # Token t of the batch is token t - (start of its chunk in the batch) + (start of the chunk in its sequence).
    positions = torch.where(live, index + (starts - ends + lens)[owner], 0)
    block_table = state.block_table[rows]
    context_lens = starts + lens
    attention = AttentionMetadata(
        slot_mapping=torch.where(live, _slots(block_table, owner, positions, block_size), -1),
        block_table=block_table,
        cu_seqlens_q=running_sum(lens),
        cu_seqlens_k=running_sum(context_lens),
        context_lens=context_lens.to(torch.int32),
        query_lens=query_lens,
        seq_lens=seq_lens,
        is_decode=False,
    )
    return rows, Inputs(token_ids, positions, attention)


def _slots(block_table: torch.Tensor, owner: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Cache slot of position positions[t] of the sequence in row owner[t] of the block table."""
    block_ids = block_table[owner, positions // block_size].to(torch.int64)
    return block_ids * block_size + positions % block_size


def running_sum(lens: torch.Tensor) -> torch.Tensor:
    """Lengths [S] to [S + 1] int32, starting at 0."""
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
