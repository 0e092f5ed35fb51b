"""One sequence as the host sees it: its tokens, its blocks, how far the device has come."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from nanovllm.engine.detokenizer import TextStream
from nanovllm.sampling_params import SamplingParams


class Status(enum.Enum):
    """Where a sequence is: in the queue (new or preempted), holding a row, or over."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class Sequence:
    """A prompt and one continuation of it.

    The host runs one step behind the device: `token_ids` holds the tokens it has read, `num_pending` counts
    sampled ones it has not, `num_computed` counts tokens whose KV a launched step writes. `is_decoding` is set once
    a step that ends the prefill is launched: from then on the row on the device holds the token to go on from.
    `snapshot_at` holds the lengths of its prefixes that are worth a snapshot.

    Args:
        seq_id: order of arrival, unique within an engine.
        token_ids: the prompt; copied.
        params: how to continue it.
        seed: of this sequence's noise.
        max_tokens: most tokens to generate, resolved; 0 only computes the prompt (scoring).
        stop_ids: ids that end the sequence when drawn.
        prompt_logprobs: k to also score the prompt's tokens, with the k most likely ones each; None not to.
    """

    seq_id: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    prompt_logprobs: int | None = None
    status: Status = Status.WAITING
    num_pending: int = 0
    num_computed: int = 0
    is_decoding: bool = False
    num_cached_tokens: int = 0
    row: int = -1
    block_table: list[int] = field(default_factory=list)
    num_hashed_blocks: int = 0
    prefix_uid: int = 0
    snapshot_at: set[int] = field(default_factory=set)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str = ""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_token_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    num_scored: int = 0
    num_preemptions: int = 0
    text: TextStream | None = None
    arrival_time: float = field(default_factory=time.perf_counter)
    first_token_time: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Generated tokens the host has read."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many generated tokens the host has read."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, on the device at least."""
        return len(self.token_ids) + self.num_pending

    @property
    def wants_token(self) -> bool:
        """Whether a further token may be drawn, counting those not read yet."""
        return self.num_tokens - self.num_prompt_tokens < self.max_tokens

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token the host read."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    def record_token(self, token_id: int) -> None:
        """Append a token the host has read."""
        if self.first_token_time is None:
            self.first_token_time = time.perf_counter()
        self.token_ids.append(token_id)
