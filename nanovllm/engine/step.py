"""What the scheduler tells the runner, and what it hears back: plain data that could travel to another process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from nanovllm.sampling_params import SamplingParams


@dataclass(slots=True)
class RowStart:
    """A sequence takes a row, new or after preemption: whatever the row held before is void.

    prompt_token_ids and output_token_ids are there when penalties need them.
    snapshot: slot of the snapshot that the row goes on from; None to start from nothing, or from blocks alone.
    """

    row: int
    params: SamplingParams
    seed: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    snapshot: int | None = None


@dataclass(slots=True)
class BlockUpdates:
    """New entries of block tables: block_table[rows[i], columns[i]] = block_ids[i]."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)

    def add(self, row: int, first_column: int, block_ids: list[int]) -> None:
        """Entries of one row from `first_column` on."""
        self.rows += [row] * len(block_ids)
        self.columns += range(first_column, first_column + len(block_ids))
        self.block_ids += block_ids


@dataclass(slots=True)
class PrefillChunk:
    """Tokens start .. start + len(token_ids) - 1 of one sequence, whole, whoever computed them before.

    samples: the chunk ends the known tokens, and the next one is wanted.
    score_start: position of the first token whose successor is scored.
    score_targets: those successors: token ids whose log probabilities are wanted, or [].
    num_score_logprobs: how many most likely tokens go with each.
    snapshots: (p, slot) ascending, start < p <= start + len(token_ids): what the row is after p tokens goes into the
        slot. Rows start before any slot of the same step is written; of two writes to one slot the later chunk's stays.
    """

    row: int
    start: int
    token_ids: list[int]
    samples: bool
    score_start: int
    score_targets: list[int]
    num_score_logprobs: int
    snapshots: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Sampling:
    """What the sampled rows of a step need beyond their row's own numbers; decided on the host, so that the
    device is never asked.

    greedy: all of them take the largest logit.
    filtered: some use top-k, top-p or min-p.
    penalized: positions (within the sampled rows) that use penalties.
    biases: (position, token ids, numbers added to their logits).
    num_logprobs: most likely tokens to report for each row; -1 for no log probabilities at all.
    """

    greedy: bool
    filtered: bool
    penalized: list[int]
    biases: list[tuple[int, list[int], list[float]]]
    num_logprobs: int

    @property
    def is_plain(self) -> bool:
        """Whether the rows' temperatures say all."""
        return not (self.filtered or self.penalized or self.biases) and self.num_logprobs < 0


@dataclass(slots=True)
class Step:
    """One forward pass: prefill chunks, or one token for each of `decode_rows`.

    context_lens: for a decode step, each row's tokens including the new one.
    launch_time: when the host made it (time.perf_counter seconds).
    """

    starts: list[RowStart] = field(default_factory=list)
    block_updates: BlockUpdates = field(default_factory=BlockUpdates)
    chunks: list[PrefillChunk] = field(default_factory=list)
    decode_rows: list[int] = field(default_factory=list)
    context_lens: list[int] = field(default_factory=list)
    sampling: Sampling | None = None
    launch_time: float = field(default_factory=time.perf_counter)

    @property
    def num_tokens(self) -> int:
        """Tokens this step computes."""
        return sum(len(chunk.token_ids) for chunk in self.chunks) or len(self.decode_rows)


@dataclass(slots=True)
class Logprobs:
    """Log probabilities of M tokens: chosen [M]; top_ids and top [M][k], most likely first."""

    chosen: list[float]
    top_ids: list[list[int]]
    top: list[list[float]]


@dataclass(slots=True)
class StepResult:
    """What a step found, in the step's order.

    token_ids: one per sampled row; -1 where the logits were not finite.
    logprobs: of those, if asked for.
    scores: one per chunk with score_targets; a NaN where the logits were not finite.
    """

    token_ids: list[int]
    logprobs: Logprobs | None
    scores: list[Logprobs]
