"""From a config to the device side of an engine: weights, caches, graphs. Every rank of a group does the same."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from nanovllm import distributed, loader, platform
from nanovllm.attention import choose_backend
from nanovllm.config import EngineConfig
from nanovllm.distributed import ALONE, Group
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sansho_runner import SanshoModelRunner
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalDecoder
from nanovllm.models.registry import load_raw_config, resolve_model
from nanovllm.models.sansho import SanshoForCausalLM
from nanovllm.models.sansho_config import SanshoConfig
from nanovllm.quantization.formats import resolve_scheme

logger = logging.getLogger(__name__)

# Of model classes that need another than ModelRunner.
RUNNERS = {SanshoForCausalLM: SanshoModelRunner}
# Share of the machine's RAM that KV blocks of all ranks may take on a CPU when num_kvcache_blocks is not given.
CPU_KV_SHARE = 0.25
# GPU memory left beside the measured peak for what torch and the libraries allocate later.
_GPU_SLACK = 256 << 20


@dataclass(frozen=True)
class Checkpoint:
    """What a config names: config.json as it is and as it was read, the model's class, the directory of the weights."""

    raw: dict[str, Any]
    directory: str
    model_class: type[CausalDecoder] | type[SanshoForCausalLM]
    config: ModelConfig | SanshoConfig

    @classmethod
    def find(cls, config: EngineConfig) -> Checkpoint:
        """Read what is needed to refuse a config that does not fit the model, and no weights.

        Raises:
            ValueError: it does not fit, or is not a checkpoint that this library reads.
        """
        raw, directory = load_raw_config(config.model, config.load_format), config.model
        if config.quantized_model_path is not None:
            directory = config.quantized_model_path
            if not Path(directory).is_dir():
                raise ValueError(f"quantized_model_path={directory!r} is not a model directory: no such directory")
            raw = load_raw_config(directory, "auto")
        found = cls(raw, directory, *resolve_model(raw))
        for knob in fields(config):
            value = getattr(config, knob.name)
            if knob.name.startswith("sansho_") and found.model_class is not SanshoForCausalLM and value != knob.default:
                name = found.model_class.__name__
                raise ValueError(f"{knob.name}={value!r} is not allowed: {name} has no use for it")
        found.config.check_ranks(config.tensor_parallel_size)
        return found


class DeviceSide:
    """One rank's part of an engine, ready to run steps.

    Attributes:
        runner: runs them.
        num_blocks, max_model_len: KV blocks of the pool, and the longest sequence; equal on all ranks.
        kernel_paths: see `loader.kernel_paths`.
        load_allocated, load_reserved: bytes that the weights need, and that torch holds for them on a GPU.
        capture_seconds: of CUDA graphs.

    Raises:
        ValueError: the config does not fit the model or the machine; says what, got, allowed.
    """

    def __init__(self, config: EngineConfig, device: torch.device, group: Group = ALONE) -> None:
        self.config, self.device, self.group = config, device, group
        self.checkpoint = Checkpoint.find(config)
        model_class, self.model_config = self.checkpoint.model_class, self.checkpoint.config
        self.dtype = platform.resolve_dtype(config.dtype, self.model_config.dtype, device)
        self.backend, self.backend_reason = choose_backend(config.attention_backend, device, self.dtype)
        self.block_size = _resolve_block_size(config, self.backend)
        # Another engine of this process may hold memory of the same card; its share is its own.
        self._memory_before = platform.held_memory(device)
        wanted_len = _wanted_model_len(config, self.model_config)
        model = self._load_model(wanted_len)
        self.runner = RUNNERS.get(model_class, ModelRunner)(
            model, self.backend, self.dtype, device, self.block_size, config.max_num_seqs, wanted_len
        )
        self.num_blocks = self._size_pool(wanted_len)
        self.max_model_len = _fitting_model_len(config, wanted_len, self.num_blocks * self.block_size)
        self.runner.allocate(self.num_blocks)
        self.capture_seconds = 0.0
        if not config.enforce_eager:
            self.capture_seconds = self.runner.capture(config, self._shows_progress)
        if config.sansho_warmup_prompt_lens:
            self.runner.touch(config)
        group.exchange(None)  # what went wrong on another rank is known before a request comes

    @property
    def _shows_progress(self) -> bool:
        return self.group.rank == 0 and logger.isEnabledFor(logging.INFO)

    def _load_model(self, max_model_len: int) -> CausalDecoder | SanshoForCausalLM:
        """The model with its weights on the device; fills `kernel_paths` and the bytes they took."""
        config, checkpoint, device = self.config, self.checkpoint, self.device
        found, converted = checkpoint.raw.get("quantization_config"), config.quantized_model_path is not None
        scheme = resolve_scheme(found, config.quantization, checkpoint.directory, converted)
        scheme.check_device(device)
        with distributed.use(self.group):
            model = loader.build_model(
                lambda: checkpoint.model_class(self.model_config, max_model_len, self.dtype), self.dtype, device, scheme
            )
        if config.load_format == "dummy":
            loader.fill_with_noise(model, config.seed, self.dtype)
        else:
            loader.load_weights(model, checkpoint.directory, model.unneeded_tensors, self._shows_progress)
        self.kernel_paths = loader.kernel_paths(model, device)
        for kind, path in self.kernel_paths.items():
            logger.info("%s: %s", kind, path)
        platform.empty_cache(device)  # of what quantizing took
        held = zip(platform.held_memory(device), self._memory_before, strict=True)
        self.load_allocated, self.load_reserved = (now - before for now, before in held)
        if device.type == "cpu":
            self.load_allocated = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        return model

    def _size_pool(self, max_model_len: int) -> int:
        """Number of KV blocks: as asked for, or what memory allows where there is least of it, but no more than could
        ever be used."""
        config, runner = self.config, self.runner
        if config.num_kvcache_blocks != -1:
            runner.reserve(None, config)
            return config.num_kvcache_blocks
        if self.device.type == "cpu":
            budget = int(platform.cpu_memory() * CPU_KV_SHARE) // self.group.size
        else:
            budget = self._gpu_budget(max_model_len)
        budget = min(self.group.exchange(budget))
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
