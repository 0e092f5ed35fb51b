"""From a step's chunks to windows, state segments and the rows that meet the cross-decoder."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.window import Ring, WindowMetadata
from nanovllm.engine.batch import upload
from nanovllm.engine.step import PrefillChunk
from nanovllm.kernels.ssd import Piece, Segment, span_table

# Tokens of a prefill whose projections exist at once where nobody wants all outputs: 27,008 numbers a token in the
# 500m shape.
_PIECE_TOKENS = 1024


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


def state_pieces(segments: list[Segment], scored: bool, chunk_size: int, device: torch.device) -> list[Piece]:
    """All tokens of a step in pieces, or in one where it is `scored`: every token's outputs are wanted then."""
    num_tokens = segments[-1].end
    size = num_tokens if scored else _PIECE_TOKENS
    cuts = [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]
    parts = [_cut(segments, *cut) for cut in cuts]
    tables = [span_table(part, chunk_size) for part in parts]
    uploaded = upload(np.concatenate(tables), torch.int32, device).split([len(table) for table in tables])
    return [Piece(*cut, part, chunk_size, table) for cut, part, table in zip(cuts, parts, uploaded, strict=True)]


def _cut(segments: list[Segment], start: int, end: int) -> list[Segment]:
    """The parts of segments within tokens start .. end - 1, counted from start; what was begun before goes on in its
    target row. A segment without tokens belongs to where the one before it ended."""
    parts = []
    for first, last, source, target in segments:
        if max(first, start) < min(last, end) or start < first == last <= end:
            begun = target if first < start else source
            parts.append(Segment(max(first, start) - start, min(last, end) - start, begun, target))
    return parts


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
