"""From a step's chunks to windows, state segments and the rows that meet the cross-decoder."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.window import Ring, WindowMetadata
from nanovllm.engine.batch import upload
from nanovllm.engine.step import PrefillChunk
from nanovllm.kernels.ssd import Segment


def snapshot_rows(chunks: list[PrefillChunk], first_row: int) -> list[list[tuple[int, int]]]:
    """For each chunk the (length, row) of its snapshots, slot 0 being row `first_row`; a slot that a later chunk takes
    too is left to that one."""
    taken: set[int] = set()
    found = []
    for chunk in reversed(chunks):
        found.append([(length, first_row + slot) for length, slot in chunk.snapshots if slot not in taken])
        taken |= {slot for _, slot in chunk.snapshots}
    return found[::-1]


def state_segments(chunks: list[PrefillChunk], snapshots: list[list[tuple[int, int]]]) -> list[Segment]:
    """Each chunk's tokens in its row's states; where a snapshot is wanted they go on from that."""
    segments = []
    first = 0
    for chunk, taken in zip(chunks, snapshots, strict=True):
        base, row = first - chunk.start, chunk.row
        for length, target in taken:
            segments.append(Segment(first, base + length, row, target))
            first, row = base + length, target
        end = base + chunk.start + len(chunk.token_ids)
        segments.append(Segment(first, end, row, chunk.row))
        first = end
    return segments


def prefill_window(
    chunks: list[PrefillChunk], snapshots: list[list[tuple[int, int]]], ring: Ring, device: torch.device
) -> WindowMetadata:
    """Scratch pages for each chunk's earlier keys and its own, one sequence after the other."""
    own, kept, left, first_pages = [], [], [], [0]
    query_lens, seq_lens = [len(chunk.token_ids) for chunk in chunks], []
    for chunk, n, taken in zip(chunks, query_lens, snapshots, strict=True):
        past = min(ring.window - 1, chunk.start)
        end = chunk.start + n
        base = first_pages[-1] * ring.block_size - (chunk.start - past)  # scratch slot of position 0, if it had one

        def pairs(row: int, begin: int, end: int, base: int = base) -> np.ndarray:
            """Scratch slots and ring slots of positions begin .. end - 1."""
            positions = np.arange(begin, end)
            return np.stack((base + positions, row * ring.size + positions % ring.size))

        own.append(base + np.arange(chunk.start, end))
        kept.append(pairs(chunk.row, chunk.start - past, chunk.start)[::-1])
        left.append(pairs(chunk.row, max(chunk.start, end - ring.window + 1), end))
        left += [pairs(row, max(0, length - ring.window + 1), length) for length, row in taken]
        seq_lens.append(past + n)
        first_pages.append(first_pages[-1] + -(-(past + n) // ring.block_size))
    pages = np.minimum(
        np.array(first_pages[:-1])[:, None] + np.arange(-(-max(seq_lens) // ring.block_size)), first_pages[-1] - 1
    )
    parts = [
        np.concatenate(own), *np.concatenate(kept, 1), *np.concatenate(left, 1),
        pages.ravel(), np.cumsum([0, *query_lens]), np.array(seq_lens),
    ]  # fmt: skip
    packed = upload(np.concatenate(parts), torch.int64, device).split([len(part) for part in parts])
    slots, kept_from, kept_to, left_from, left_to = packed[:5]
    table, starts, lens = (part.to(torch.int32) for part in packed[5:])
    table = table.view(pages.shape)
    meta = AttentionMetadata(slots, table, starts, None, lens, query_lens, seq_lens, is_decode=False)
    return WindowMetadata(ring.window, meta, first_pages[-1], (kept_from, kept_to), (left_from, left_to))


def last_rows(
    chunks: list[PrefillChunk], rows: torch.Tensor, meta: AttentionMetadata
) -> tuple[list[int], torch.Tensor, torch.Tensor, AttentionMetadata]:
    """The tokens of a prefill that meet the cross-decoder: the last one of each chunk that samples.

    Returns:
        which they are, on the host and on the device [R]; their rows [R]; attention of one query each.
    """
    picked = [i for i, chunk in enumerate(chunks) if chunk.samples]
    last = (np.cumsum([len(chunk.token_ids) for chunk in chunks]) - 1)[picked].tolist()
    at, index = upload([picked, last], torch.int64, rows.device)
    seq_lens = [meta.seq_lens[i] for i in picked]
    one = AttentionMetadata(
        slot_mapping=meta.slot_mapping,
        block_table=meta.block_table[at],
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        context_lens=meta.context_lens[at],
        query_lens=[1] * len(picked),
        seq_lens=seq_lens,
        is_decode=True,
    )
    return last, index, rows[at], one
