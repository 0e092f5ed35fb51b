"""Everything a user can set on the engine, checked before anything is loaded."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

_DTYPES = ("auto", "float32", "float16", "bfloat16")
_LOAD_FORMATS = ("auto", "dummy")
_BACKENDS = ("auto", "triton", "flash", "torch")
_EXECUTORS = ("mp", "external")
_QUANTIZATIONS = (None, "int8", "w8a8")


def check(condition: bool, name: str, got: Any, allowed: str) -> None:
    """Raise ValueError naming the setting, the value it got and what it allows, unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name}={got!r} is not allowed: {allowed}")


def check_int(name: str, got: Any, minimum: int, note: str = "") -> None:
    """Raise ValueError unless `got` is an int (no bool) of at least `minimum`."""
    is_int = isinstance(got, int) and not isinstance(got, bool)
    check(is_int and got >= minimum, name, got, f"an integer of at least {minimum}{note}")


def is_number(value: Any) -> bool:
    """Whether `value` is a real number; booleans are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def unknown_name_error(what: str, name: str, known: list[str]) -> TypeError:
    """TypeError for an unknown keyword, with the nearest known name as a hint."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
    return TypeError(f"{what} got an unknown argument {name!r}{hint}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file as a dict.

    Raises:
        ValueError: it is not there, or not JSON.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"model={str(path.parent)!r} is not a model directory: {path.name} is not there") from None
    except ValueError as error:  # of the JSON, or of its encoding
        raise ValueError(f"{path.name} in {str(path.parent)!r} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} in {str(path.parent)!r} is not a JSON object but a {type(found).__name__}")
    return found


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. Every check raises ValueError: what, got, allowed.

    Args:
        model: a directory in Hugging Face layout, or with `load_format="dummy"` the name of a built-in shape.
        tokenizer: directory of the tokenizer; the model's own when None.
        dtype: "auto" takes the checkpoint's (see docs/tour.md for what a CPU does), or a name such as "bfloat16".
        device: "auto" is "cuda" where there is one, else "cpu".
        load_format: "auto" reads safetensors, "dummy" fills the weights with random numbers.
        skip_tokenizer_init: run on token ids alone; `text` of the outputs stays empty.
        max_model_len: most tokens of prompt and output together; the model's own limit when None.
        max_num_seqs: most sequences that run at once (each owns a row of device state).
        max_num_batched_tokens: most prompt tokens computed in one prefill step.
        gpu_memory_utilization: share of the GPU's memory this engine may use, weights included.
        kvcache_block_size: tokens per KV block; what the attention backend prefers when None.
        num_kvcache_blocks: KV blocks in the pool; -1 sizes the pool from memory.
        enable_prefix_caching: reuse KV blocks of equal prompt prefixes.
        enforce_eager: never capture CUDA graphs.
        tensor_parallel_size: number of GPUs (or processes on a CPU) a model is split over, 1 to 8.
        distributed_executor: "mp" starts a process per rank beside this one; "external" leaves that to a launcher such
            as torchrun, under which every rank runs the same script.
        attention_backend: "auto", "triton" (our kernels), "flash" (the flash-attn package) or "torch".
        quantization: "int8" (int8 weights) or "w8a8" (int8 weights and activations) in the linear layers of the
            decoder: of a float model they are quantized while loading. None is what the checkpoint's config says.
        quantized_model_path: a directory that `nanovllm-quantize` made; config, tokenizer and weights are its own,
            and `model` is only checked to be there.
        sansho_prefix_checkpoints: (Sansho only, as all that follow of that name) prefixes whose state is kept, so that
            they can be resumed; None sizes the pool from memory, 0 resumes none.
        sansho_warmup_prompt_lens, sansho_warmup_batch_sizes, sansho_warmup_decode_tokens: shapes to run once at the
            start, every length with every batch size, so that the first request pays for nothing; those over
            max_num_seqs, max_num_batched_tokens or the KV cache are skipped.
        sansho_decode_graph_replay_max_tokens: decode tokens of a sequence up to which CUDA graphs are replayed; None
            has no limit, 0 always decodes eagerly.
        seed: seed of the engine; requests without a seed of their own derive theirs from it.
    """

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 16384
    gpu_memory_utilization: float = 0.9
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int = -1
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    distributed_executor: str = "mp"
    attention_backend: str = "auto"
    sansho_prefix_checkpoints: int | None = None
    sansho_warmup_prompt_lens: tuple[int, ...] = ()
    sansho_warmup_batch_sizes: tuple[int, ...] = ()
    sansho_warmup_decode_tokens: int = 1
    sansho_decode_graph_replay_max_tokens: int | None = None
    quantization: str | None = None
    quantized_model_path: str | None = None
    seed: int = 0

    @classmethod
    def from_kwargs(cls, model: str, **kwargs: Any) -> EngineConfig:
        """Build a config from keyword arguments.

        Raises:
            TypeError: an unknown name, with the nearest known one.
            ValueError: a value out of range.
        """
        known = [f.name for f in fields(cls)]
        for name in kwargs:
            if name not in known:
                raise unknown_name_error("LLM()", name, known)
        return cls(model=str(model), **kwargs)

    def __post_init__(self) -> None:
        # A torch.dtype is accepted as its name, so that this module needs no torch; a Path as a str.
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        for name in ("tokenizer", "quantized_model_path"):
            if isinstance(getattr(self, name), Path):
                object.__setattr__(self, name, str(getattr(self, name)))
        self._check_choices()
        self._check_numbers()

    def _check_choices(self) -> None:
        choices = {"dtype": _DTYPES, "load_format": _LOAD_FORMATS, "attention_backend": _BACKENDS}
        for name, allowed in (choices | {"distributed_executor": _EXECUTORS}).items():
            check(getattr(self, name) in allowed, name, getattr(self, name), f"one of {', '.join(allowed)}")
        check(self.quantization in _QUANTIZATIONS, "quantization", self.quantization, "one of None, int8, w8a8")
        for name in ("tokenizer", "quantized_model_path"):
            check(isinstance(getattr(self, name), (str, type(None))), name, getattr(self, name), "None or a directory")
        device_ok = self.device in ("auto", "cpu", "cuda") or (
            isinstance(self.device, str) and self.device.startswith("cuda:") and self.device[5:].isdigit()
        )
        check(device_ok, "device", self.device, "auto, cpu, cuda or cuda:N")
        for name in ("skip_tokenizer_init", "enable_prefix_caching", "enforce_eager"):
            check(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")

    def _check_numbers(self) -> None:
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 2, " (a prompt token and a generated one)")
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_int("tensor_parallel_size", self.tensor_parallel_size, 1)
        check(self.tensor_parallel_size <= 8, "tensor_parallel_size", self.tensor_parallel_size, "at most 8")
        check_int("seed", self.seed, 0)
        check(self.seed < 2**63, "seed", self.seed, "below 2**63")
        if self.kvcache_block_size is not None:
            check_int("kvcache_block_size", self.kvcache_block_size, 1)
        if self.num_kvcache_blocks != -1:
            check_int("num_kvcache_blocks", self.num_kvcache_blocks, 1, ", or -1 to size the pool from memory")
        for name in ("sansho_prefix_checkpoints", "sansho_decode_graph_replay_max_tokens"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, ", or None")
        check_int("sansho_warmup_decode_tokens", self.sansho_warmup_decode_tokens, 1)
        for name in ("sansho_warmup_prompt_lens", "sansho_warmup_batch_sizes"):
            check(isinstance(getattr(self, name), (list, tuple)), name, getattr(self, name), "a list of integers")
            for entry in getattr(self, name):
                check_int(name, entry, 1)
        share = self.gpu_memory_utilization
        check(is_number(share) and 0 < share <= 1, "gpu_memory_utilization", share, "a number in (0, 1]")
