"""Where host side and device side meet: requests in, steps launched, results handed out."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from nanovllm.config import EngineConfig, read_json
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.build import Checkpoint
from nanovllm.engine.detokenizer import TextStream
from nanovllm.engine.results import PendingResult
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.step import Step
from nanovllm.engine.tokenizer import Tokenizer
from nanovllm.engine.worker import start
from nanovllm.models.config import ModelConfig, as_id_set
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineStats:
    """Running totals: tokens computed and seconds spent, by kind of step; and what loading took: seconds, and bytes of
    memory that the weights need and that torch holds for them on a GPU, before there is a KV cache."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    load_seconds: float = 0.0
    load_allocated: int = 0
    load_reserved: int = 0
    capture_seconds: float = 0.0

    def copy(self) -> EngineStats:
        """The totals as they are now."""
        return replace(self)

    def rates_since(self, earlier: EngineStats) -> str:
        """Tokens per second of prefill and decode since `earlier`, for people."""
        prefill = (self.prefill_tokens - earlier.prefill_tokens, self.prefill_seconds - earlier.prefill_seconds)
        decode = (self.decode_tokens - earlier.decode_tokens, self.decode_seconds - earlier.decode_seconds)
        rates = [int(tokens / seconds) if seconds > 0 else 0 for tokens, seconds in (prefill, decode)]
        return f"prefill {rates[0]} tok/s, decode {rates[1]} tok/s"


class LLMEngine:
    """One model, one scheduler, one runner.

    Raises:
        ValueError: the config does not fit the model or the machine; says what, got, allowed.
        RuntimeError: another rank failed to start; with its traceback.
    """

    def __init__(self, config: EngineConfig) -> None:
        started = time.perf_counter()
        self.config = config
        checkpoint = Checkpoint.find(config)
        self.tokenizer = None if config.skip_tokenizer_init else Tokenizer(config.tokenizer or checkpoint.directory)
        self.eos_token_ids = _eos_token_ids(checkpoint.directory, checkpoint.config, self.tokenizer)
        side = start(config)
        self.runner, self.group, self.model_config = side.runner, side.group, side.model_config
        self.device, self.dtype, self.backend = side.device, side.dtype, side.backend
        self.block_size, self.max_model_len, self.kernel_paths = side.block_size, side.max_model_len, side.kernel_paths
        block_manager = BlockManager(
            side.num_blocks, self.block_size, config.enable_prefix_caching, self.runner.num_snapshots
        )
        self.scheduler = Scheduler(self.runner.rows.padding_row, config.max_num_batched_tokens, block_manager)
        self._in_flight: tuple[Step, PendingResult] | None = None
        self._num_added = 0
        self._num_requests = 0
        self._last_read = 0.0
        self.stats = EngineStats(
            load_seconds=time.perf_counter() - started, load_allocated=side.load_allocated,
            load_reserved=side.load_reserved, capture_seconds=side.capture_seconds,
        )  # fmt: skip
        logger.info(
            "%s on %d x %s in %s: attention %s (%s), %d KV blocks of %d tokens, at most %d tokens a sequence, %.1f s",
            self.model_config.architecture, self.group.size, self.device, self.dtype, self.backend.name,
            side.backend_reason, side.num_blocks, self.block_size, self.max_model_len, self.stats.load_seconds,
        )  # fmt: skip

    def step(self) -> list[Sequence]:
        """Launch the next step, then read the one before: the host runs one step behind the device.

        Returns the sequences that the read step took further or ended.
        """
        step = self.scheduler.schedule()
        ready, self._in_flight = self._in_flight, None
        if step is not None:
            self._in_flight = (step, self.runner.run(step))
        return [] if ready is None else self._read(*ready)

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything left to do."""
        return self.scheduler.has_unfinished

    def check_request(self, token_ids: list[int], params: SamplingParams, num_new_tokens: int = 1) -> None:
        """Refuse what cannot be served, before anything is queued.

        Raises:
            ValueError: the prompt is empty, too long or holds an id outside the vocabulary, or the parameters
                do not fit the model.
        """
        vocab_size = self.model_config.vocab_size
        if not token_ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        # All at once first: looking at the tokens of a long prompt one by one takes longer than a step.
        if set(map(type, token_ids)) != {int} or min(token_ids) < 0 or max(token_ids) >= vocab_size:
            for token_id in token_ids:
                if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                    raise ValueError(f"prompt token id {token_id!r} is not allowed: an integer in [0, {vocab_size})")
        if len(token_ids) + num_new_tokens > self.max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and needs room for {num_new_tokens} more, but "
                f"max_model_len is {self.max_model_len}: shorten it, or raise max_model_len (model: "
                f"{self.model_config.max_model_len}) and num_kvcache_blocks"
            )
        for token_id in (*params.stop_token_ids, *(params.logit_bias or {})):
            if token_id >= vocab_size:
                raise ValueError(f"token id {token_id} in stop_token_ids or logit_bias: must be below {vocab_size}")
        if (params.logprobs or 0) > vocab_size:
            raise ValueError(f"logprobs={params.logprobs} is not allowed: at most the vocabulary size {vocab_size}")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer; use stop_token_ids with skip_tokenizer_init")

    def add(
        self,
        token_ids: list[int],
        params: SamplingParams,
        prompt_logprobs: int | None = None,
        generate: bool = True,
        stream_text: bool = False,
    ) -> list[Sequence]:
        """Queue a checked request; returns its `params.n` sequences, which `step` takes further.

        Args:
            token_ids: the prompt.
            params: how to continue it.
            prompt_logprobs: k to score the prompt's tokens too.
            generate: False to draw nothing (scoring alone).
            stream_text: keep `text` of the sequences up to date with every step.
        """
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        room = self.max_model_len - len(token_ids)
        max_tokens = min(params.max_tokens or room, room) if generate else 0
        seed = params.seed
        if seed is None:  # apart for each request, the same in each run
            seed = (self.config.seed << 32) + (self._num_requests << 16)
        self._num_requests += 1
        seqs = []
        for i in range(params.n):
            seq = Sequence(
                self._num_added, token_ids, params, (seed + i) % 2**63, max_tokens, stop_ids, prompt_logprobs
            )
            if self.tokenizer is not None and (stream_text or params.stop):
                seq.text = self.new_text_stream(params)
            self._num_added += 1
            self.scheduler.add(seq)
            seqs.append(seq)
        return seqs

    def new_text_stream(self, params: SamplingParams) -> TextStream:
        """A decoder of one sequence's tokens."""
        return TextStream(self.tokenizer, params.stop, params.min_tokens, params.skip_special_tokens)

    def abort(self, seqs: list[Sequence]) -> None:
        """End sequences that nobody waits for any more; those that ended already are left as they are."""
        for seq in seqs:
            if seq.status is not Status.FINISHED:
                self.scheduler.finish(seq, "abort")

    def recover(self) -> None:
        """After an exception in `step`: the state on the device is not known, so end every sequence (reason
        "abort") and start from an empty pool."""
        self._in_flight = None
        self.scheduler.reset()

    def drain(self) -> None:
        """Read what is in flight when all sequences ended early, and check that the books balance."""
        while self.scheduler.has_unfinished and not (self.scheduler.waiting or self.scheduler.running):
            self.step()
        if not self.scheduler.has_unfinished:
            self.scheduler.check()

    def exit(self) -> None:
        """Free the device and end the other ranks' processes; the engine cannot be used afterwards."""
        self.recover()
        self.runner.exit()
        self.group.close()

    def _read(self, step: Step, pending: PendingResult) -> list[Sequence]:
        touched = self.scheduler.update(pending.wait())
        for seq in touched:
            self._extend_text(seq)
        now = time.perf_counter()
        seconds, self._last_read = now - max(self._last_read, step.launch_time), now
        if step.chunks:
            self.stats.prefill_tokens += step.num_tokens
            self.stats.prefill_seconds += seconds
        else:
            self.stats.decode_tokens += step.num_tokens
            self.stats.decode_seconds += seconds
        return touched

    def _extend_text(self, seq: Sequence) -> None:
        """Keep a watched sequence's text up to date; a stop string in it ends the sequence."""
        if seq.text is None:
            return
        new_ids = seq.output_token_ids[seq.text.num_tokens :]
        stop = seq.text.push(new_ids) if new_ids else None
        if stop is None and seq.status is Status.FINISHED:
            stop = seq.text.finish()
        if stop is not None and seq.finish_reason != "error":
            self.scheduler.finish(seq, "stop", stop)


def _eos_token_ids(model: str, model_config: ModelConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every id that ends a text: of generation_config.json, config.json and the tokenizer, which often differ."""
    ids = set(model_config.eos_token_ids)
    generation_config = Path(model) / "generation_config.json"
    if generation_config.is_file():
        ids |= as_id_set(read_json(generation_config).get("eos_token_id"))
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
