"""One sequence as the host sees it: its tokens, its blocks, how far the device has come."""

from __future__ import annotations

import enum
import time

from nanovllm.engine.detokenizer import TextStream
from nanovllm.sampling_params import SamplingParams


class Status(enum.Enum):
    """Where a sequence is: in the queue (new or preempted), holding a row, or over."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """A prompt and one continuation of it.

    The host runs one step behind the device: `token_ids` holds the tokens it has read, `num_pending` counts
    sampled ones it has not, `num_computed` counts tokens whose KV a launched step writes. `is_decoding` is set once
    a step that ends the prefill is launched: from then on the row on the device holds the token to go on from.

    Args:
        seq_id: order of arrival, unique within an engine.
        prompt_token_ids: the prompt.
        params: how to continue it.
        seed: of this sequence's noise.
        max_tokens: most tokens to generate, resolved; 0 only computes the prompt (scoring).
        stop_ids: ids that end the sequence when drawn.
        prompt_logprobs: k to also score the prompt's tokens, with the k most likely ones each; None not to.
    """

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
        max_tokens: int,
        stop_ids: frozenset[int],
        prompt_logprobs: int | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.params = params
        self.seed = seed
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.prompt_logprobs = prompt_logprobs
        self.status = Status.WAITING
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_pending = 0
        self.num_computed = 0
        self.is_decoding = False
        self.num_cached_tokens = 0
        self.row = -1
        self.block_table: list[int] = []
        self.num_hashed_blocks = 0
        self.prefix_uid = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error = ""
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self.prompt_token_logprobs: list[float] = []
        self.prompt_top_logprobs: list[list[tuple[int, float]]] = []
        self.num_scored = 0
        self.num_preemptions = 0
        self.text: TextStream | None = None
        self.arrival_time = time.perf_counter()
        self.first_token_time: float | None = None

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
