"""Where host side and device side meet: requests in, steps launched, results handed out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from nanovllm import loader, platform
from nanovllm.attention import choose_backend
from nanovllm.config import EngineConfig, read_json
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.detokenizer import TextStream
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.results import PendingResult
from nanovllm.engine.sansho_runner import SanshoModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.step import Step
from nanovllm.engine.tokenizer import Tokenizer
from nanovllm.models.config import ModelConfig, as_id_set
from nanovllm.models.decoder import CausalDecoder
from nanovllm.models.registry import load_raw_config, resolve_model
from nanovllm.models.sansho import SanshoForCausalLM
from nanovllm.quantization.formats import resolve_scheme
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Of model classes that need another than ModelRunner.
RUNNERS = {SanshoForCausalLM: SanshoModelRunner}
# Share of the machine's RAM that KV blocks may take on a CPU when num_kvcache_blocks is not given.
CPU_KV_SHARE = 0.25
# GPU memory left beside the measured peak for what torch and the libraries allocate later.
_GPU_SLACK = 256 << 20


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
    """

    def __init__(self, config: EngineConfig) -> None:
        started = time.perf_counter()
        self.config = config
        self.stats = EngineStats()
        self.device = platform.resolve_device(config.device)
        raw, directory = _raw_config(config)
        model_class, self.model_config = resolve_model(raw)
        _check_family_knobs(config, model_class)
        self.dtype = platform.resolve_dtype(config.dtype, self.model_config.dtype, self.device)
        self.backend, reason = choose_backend(config.attention_backend, self.device, self.dtype)
        self.block_size = _resolve_block_size(config, self.backend)
        self.tokenizer = None if config.skip_tokenizer_init else Tokenizer(config.tokenizer or directory)
        # Another engine of this process may hold memory of the same card; its share is its own.
        self._memory_before = platform.held_memory(self.device)
        self.eos_token_ids = _eos_token_ids(directory, self.model_config, self.tokenizer)
        max_model_len = _wanted_model_len(config, self.model_config)
        model = self._load_model(
            lambda: model_class(self.model_config, max_model_len, self.dtype), raw.get("quantization_config"), directory
        )
        self.runner = RUNNERS.get(model_class, ModelRunner)(
            model, self.backend, self.dtype, self.device, self.block_size, config.max_num_seqs, max_model_len
        )
        num_blocks = self._size_pool(max_model_len)
        self.max_model_len = _fitting_model_len(config, max_model_len, num_blocks * self.block_size)
        self.runner.allocate(num_blocks)
        if not config.enforce_eager:
            self.stats.capture_seconds = self.runner.capture(config, show_progress=logger.isEnabledFor(logging.INFO))
        if config.sansho_warmup_prompt_lens:
            self.runner.touch(config)
        block_manager = BlockManager(
            num_blocks, self.block_size, config.enable_prefix_caching, self.runner.num_snapshots
        )
        self.scheduler = Scheduler(self.runner.rows.padding_row, config.max_num_batched_tokens, block_manager)
        self._in_flight: tuple[Step, PendingResult] | None = None
        self._num_added = 0
        self._num_requests = 0
        self._last_read = 0.0
        self.stats.load_seconds = time.perf_counter() - started
        logger.info(
            "%s on %s in %s: attention %s (%s), %d KV blocks of %d tokens, at most %d tokens a sequence, %.1f s",
            self.model_config.architecture, self.device, self.dtype, self.backend.name, reason,
            num_blocks, self.block_size, self.max_model_len, self.stats.load_seconds,
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
        """Free the device; the engine cannot be used afterwards."""
        self.recover()
        self.runner.exit()

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

    def _load_model(
        self, construct: Callable[[], CausalDecoder], quantization_config: dict | None, directory: str
    ) -> CausalDecoder:
        """The model with its weights on the device; fills `kernel_paths` and what it took in `stats`."""
        config = self.config
        converted = config.quantized_model_path is not None
        scheme = resolve_scheme(quantization_config, config.quantization, directory, converted)
        scheme.check_device(self.device)
        model = loader.build_model(construct, self.dtype, self.device, scheme)
        if config.load_format == "dummy":
            loader.fill_with_noise(model, config.seed, self.dtype)
        else:
            show_progress = logger.isEnabledFor(logging.INFO)
            loader.load_weights(model, directory, model.unneeded_tensors, show_progress)
        self.kernel_paths = loader.kernel_paths(model, self.device)
        for kind, path in self.kernel_paths.items():
            logger.info("%s: %s", kind, path)
        platform.empty_cache(self.device)  # of what quantizing took
        held = zip(platform.held_memory(self.device), self._memory_before, strict=True)
        self.stats.load_allocated, self.stats.load_reserved = (now - before for now, before in held)
        if self.device.type == "cpu":
            self.stats.load_allocated = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        return model

    def _size_pool(self, max_model_len: int) -> int:
        """Number of KV blocks: as asked for, or what memory allows, but no more than could ever be used."""
        config, runner = self.config, self.runner
        if config.num_kvcache_blocks != -1:
            runner.reserve(None, config)
            return config.num_kvcache_blocks
        if self.device.type == "cpu":
            budget = int(platform.cpu_memory() * CPU_KV_SHARE)
        else:
            budget = self._gpu_budget(max_model_len)
        budget -= runner.reserve(budget, config)
        num_blocks = budget // runner.bytes_per_block - 1  # one block is padding
        if num_blocks < 1:
            source = f"gpu_memory_utilization={config.gpu_memory_utilization} after weights and activations"
            remedy = "raise gpu_memory_utilization or lower max_num_batched_tokens"
            if self.device.type == "cpu":
                source = f"{CPU_KV_SHARE:.0%} of this machine's RAM"
                remedy = "set num_kvcache_blocks, or lower kvcache_block_size"
            raise ValueError(
                f"no memory for the KV cache: {budget / 2**20:.0f} MiB ({source}), and two blocks of "
                f"{runner.bytes_per_block / 2**20:.2f} MiB are the least; {remedy}"
            )
        return min(num_blocks, runner.rows.padding_row * -(-max_model_len // self.block_size))

    def _gpu_budget(self, max_model_len: int) -> int:
        """Bytes for KV: this engine's share of the card less what it peaked at in the largest prefill. Memory of
        other processes is not charged to the share, only what they leave free limits it."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self.runner.warm_up(self.config.max_num_batched_tokens, max_model_len)
        platform.empty_cache(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        allocated_before, reserved_before = self._memory_before
        return gpu_kv_budget(
            total=total,
            free=free,
            held=torch.cuda.memory_reserved(self.device) - reserved_before,
            peak=torch.cuda.max_memory_allocated(self.device) - allocated_before,
            utilization=self.config.gpu_memory_utilization,
        )


def gpu_kv_budget(total: int, free: int, held: int, peak: int, utilization: float) -> int:
    """Bytes the KV pool may take.

    Args:
        total: bytes of the card.
        free: bytes nobody holds now.
        held: bytes this process holds now (weights).
        peak: most bytes this process used at once in the largest prefill.
        utilization: share of the card this engine may use.
    """
    own_share = int(total * utilization) - peak
    left_by_others = free + held - peak
    return min(own_share, left_by_others) - _GPU_SLACK


def _raw_config(config: EngineConfig) -> tuple[dict[str, Any], str]:
    """config.json of the checkpoint to run, and its directory."""
    raw = load_raw_config(config.model, config.load_format)
    directory = config.quantized_model_path
    if directory is None:
        return raw, config.model
    if not Path(directory).is_dir():
        raise ValueError(f"quantized_model_path={directory!r} is not a model directory: no such directory")
    return load_raw_config(directory, "auto"), directory


def _check_family_knobs(config: EngineConfig, model_class: type) -> None:
    for knob in fields(config):
        value = getattr(config, knob.name)
        if knob.name.startswith("sansho_") and model_class is not SanshoForCausalLM and value != knob.default:
            raise ValueError(f"{knob.name}={value!r} is not allowed: {model_class.__name__} has no use for it")


def _resolve_block_size(config: EngineConfig, backend: object) -> int:
    size = config.kvcache_block_size or backend.default_block_size
    if size % backend.block_size_multiple:
        raise ValueError(
            f"kvcache_block_size={size} is not allowed: attention backend {backend.name!r} takes multiples of "
            f"{backend.block_size_multiple}; change it or attention_backend"
        )
    return size


def _wanted_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_model_len
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(f"max_model_len={config.max_model_len} is not allowed: the model takes at most {limit} tokens")
    return config.max_model_len or limit


def _fitting_model_len(config: EngineConfig, max_model_len: int, pool_tokens: int) -> int:
    """Longest sequence that the pool can hold alone, so that no running sequence can ever be stuck."""
    if max_model_len <= pool_tokens:
        return max_model_len
    if config.max_model_len is not None:
        raise ValueError(
            f"max_model_len={config.max_model_len} does not fit: the KV cache holds {pool_tokens} tokens; lower "
            f"max_model_len, or raise num_kvcache_blocks or gpu_memory_utilization"
        )
    if pool_tokens < 2:
        raise ValueError(
            f"the KV cache is too small for one sequence: it holds {pool_tokens} token(s) and a prompt token and a "
            f"generated one are needed; raise num_kvcache_blocks or kvcache_block_size"
        )
    logger.warning(
        "max_model_len is %d, not the model's %d: the KV cache holds no more tokens", pool_tokens, max_model_len
    )
    return pool_tokens


def _eos_token_ids(model: str, model_config: ModelConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every id that ends a text: of generation_config.json, config.json and the tokenizer, which often differ."""
    ids = set(model_config.eos_token_ids)
    generation_config = Path(model) / "generation_config.json"
    if generation_config.is_file():
        ids |= as_id_set(read_json(generation_config).get("eos_token_id"))
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
