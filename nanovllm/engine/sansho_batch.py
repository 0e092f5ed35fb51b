"""From a prefill's chunks to windows and state segments: planned on the host, packed into one copy, cut up again on the
device, where nothing but the sizes of `Room` decides what runs, so that a CUDA graph can hold it."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import torch

from nanovllm.attention.window import Ring, WindowMetadata
from nanovllm.engine.batch import pack_prefill, running_sum
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


@dataclass(frozen=True)
class Room:
    """What a packed prefill has room for.

    seqs, tokens: of the step.
    kept, left: ring slots that are copied from before it, and to after it.
    pages, columns: scratch pages of all sequences, and of one.
    piece: tokens whose projections exist at once.
    spans: of each piece (`span_table`).
    """

    seqs: int
    tokens: int
    kept: int
    left: int
    pages: int
    columns: int
    piece: int
    spans: int

    @classmethod
    def bucket(cls, seqs: int, tokens: int, ring: Ring, chunk_size: int) -> Room:
        """Room for any such step that takes no more snapshots than it has sequences."""
        past, piece = ring.window - 1, min(tokens, _PIECE_TOKENS)
        return cls(
            seqs=seqs,
            tokens=tokens,
            kept=seqs * past,
            left=min(tokens, seqs * past) + seqs * past,
            pages=-(-(tokens + seqs * past) // ring.block_size) + seqs,
            columns=-(-(tokens + past) // ring.block_size),
            piece=piece,
            spans=-(-piece // chunk_size) + 2 * seqs,
        )

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """Each piece: its first token, and the one behind its last."""
        return [(start, min(start + self.piece, self.tokens)) for start in range(0, self.tokens, self.piece)]

    def holds(self, other: Room) -> bool:
        """Whether there is room for what `other` has room for, cut into the same pieces."""
        return all(own >= needed for own, needed in zip(astuple(self), astuple(other), strict=True))


@dataclass(slots=True)
class Plan:
    """A prefill as the host sees it.

    slots: [T] scratch slot of each token.
    kept: [2, K] ring slots and scratch slots of keys of earlier steps.
    left: [2, M] scratch slots and ring slots of keys that later steps see.
    first_pages: [S + 1] where each chunk's scratch pages begin.
    lens: keys of each chunk, earlier ones included.
    segments: its way through the states.
    """

    chunks: list[PrefillChunk]
    slots: np.ndarray
    kept: np.ndarray
    left: np.ndarray
    first_pages: list[int]
    lens: list[int]
    segments: list[Segment]

    def room(self, chunk_size: int, scored: bool) -> Room:
        """As much as it needs; in one piece where it is `scored`: every token's outputs are wanted then."""
        tokens = len(self.slots)
        piece = max(1, tokens if scored else min(tokens, _PIECE_TOKENS))
        columns = max(np.diff(self.first_pages), default=0)
        sizes = (tokens, self.kept.shape[1], self.left.shape[1], self.first_pages[-1], columns, piece)
        spans = [len(table) for table in self.tables(Room(len(self.chunks), *sizes, spans=0), chunk_size)]
        return Room(len(self.chunks), *sizes, spans=max(spans, default=0))

    def tables(self, room: Room, chunk_size: int) -> list[list[tuple[int, ...]]]:
        """The spans of each piece."""
        return [span_table(_cut(self.segments, *cut), chunk_size) for cut in room.cuts]


def plan_prefill(chunks: list[PrefillChunk], snapshots: list[list[tuple[int, int]]], ring: Ring) -> Plan:
    """Scratch pages for each chunk's earlier keys and its own, one sequence after the other; `snapshots` as
    `snapshot_rows` gives them."""
    slots, kept, left = [np.empty(0, int)], [np.empty((2, 0), int)], [np.empty((2, 0), int)]
    first_pages, lens = [0], []
    for chunk, taken in zip(chunks, snapshots, strict=True):
        n = len(chunk.token_ids)
        past = min(ring.window - 1, chunk.start)
        end = chunk.start + n
        base = first_pages[-1] * ring.block_size - (chunk.start - past)  # scratch slot of position 0, if it had one

        def pairs(row: int, begin: int, end: int, base: int = base) -> np.ndarray:
            """Scratch slots and ring slots of positions begin .. end - 1."""
            positions = np.arange(begin, end)
            return np.stack((base + positions, row * ring.size + positions % ring.size))

        slots.append(base + np.arange(chunk.start, end))
        kept.append(pairs(chunk.row, chunk.start - past, chunk.start)[::-1])
        left.append(pairs(chunk.row, max(chunk.start, end - ring.window + 1), end))
        left += [pairs(row, max(0, length - ring.window + 1), length) for length, row in taken]
        lens.append(past + n)
        first_pages.append(first_pages[-1] + -(-(past + n) // ring.block_size))
    joined = np.concatenate(slots), np.concatenate(kept, 1), np.concatenate(left, 1)
    return Plan(chunks, *joined, first_pages, lens, state_segments(chunks, snapshots))


def pack(plan: Plan, room: Room, chunk_size: int, padding_row: int) -> np.ndarray:
    """All that the step needs from the host, to cross in one copy: int64, as `pack_prefill` and then in the order of
    `unpack`. What is not needed of the room is written nowhere, seen by no token and moves no state."""
    pages = np.array(plan.first_pages[:-1], int)[:, None] + np.arange(room.columns)
    table = np.zeros((room.seqs, room.columns), int)
    table[: len(pages)] = np.minimum(pages, plan.first_pages[-1] - 1)
    spans = np.tile(np.array([0, 0, -1, -1, 0, 0]), (len(room.cuts), room.spans, 1))
    for own, found in zip(spans, plan.tables(room, chunk_size), strict=True):
        own[: len(found)] = np.reshape(found, (-1, 6))
    parts = (
        pack_prefill(plan.chunks, room.seqs, room.tokens, padding_row),
        _filled(plan.slots, room.tokens, -1),
        *(_filled(half, room.kept, -1) for half in plan.kept),
        *(_filled(half, room.left, -1) for half in plan.left),
        table.ravel(),
        _filled(np.array(plan.lens, int), room.seqs, 0),
        spans.ravel(),
    )
    return np.concatenate(parts)


def _filled(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    return np.pad(values, (0, size - len(values)), constant_values=fill)


def unpack(
    packed: torch.Tensor, room: Room, ring: Ring, chunk_size: int, segments: list[Segment] | None = None
) -> tuple[torch.Tensor, WindowMetadata, list[Piece]]:
    """What `pack` packed, as views where they can be: the part of `pack_prefill`, windows, and pieces of the tokens.
    Without `segments` the pieces are for kernels alone, which read tables."""
    seqs, cuts = room.seqs, room.cuts
    sizes = (3 * seqs + room.tokens, room.tokens, 2 * room.kept, 2 * room.left, seqs * room.columns, seqs)
    base, slots, kept, left, table, lens, spans = packed.split([*sizes, 6 * room.spans * len(cuts)])
    window = WindowMetadata(
        window=ring.window,
        slots=slots,
        table=table.view(seqs, room.columns).to(torch.int32),
        cu_seqlens_q=running_sum(base[2 * seqs : 3 * seqs]),
        lens=lens.to(torch.int32),
        num_pages=room.pages,
        kept=kept.view(2, room.kept),
        left=left.view(2, room.left),
    )
    tables = spans.to(torch.int32).view(len(cuts), room.spans, 6)
    parts = [[] if segments is None else _cut(segments, *cut) for cut in cuts]
    pieces = [Piece(*cut, part, chunk_size, own) for cut, part, own in zip(cuts, parts, tables, strict=True)]
    return base, window, pieces


def _cut(segments: list[Segment], start: int, end: int) -> list[Segment]:
    """The parts of segments within tokens start .. end - 1, counted from start; what was begun before goes on in its
    target row. A segment without tokens belongs to where the one before it ended."""
    parts = []
    for first, last, source, target in segments:
        if max(first, start) < min(last, end) or start < first == last <= end:
            begun = target if first < start else source
            parts.append(Segment(max(first, start) - start, min(last, end) - start, begun, target))
    return parts
