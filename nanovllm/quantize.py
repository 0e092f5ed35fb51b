"""Offline quantization: a model directory in, a directory out that stands alone. `nanovllm-quantize --help`."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch.utils.hooks import RemovableHandle

from nanovllm import loader
from nanovllm.config import check
from nanovllm.layers.linear import Linear
from nanovllm.llm import LLM
from nanovllm.models.decoder import CausalDecoder
from nanovllm.models.registry import load_raw_config, resolve_model
from nanovllm.quantization.base import Int8Weights
from nanovllm.quantization.formats import FORMATS, METHODS, make_config, resolve_scheme
from nanovllm.quantization.quantizer import choose_smoothing, quantize_weight
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 30
SMOOTHING_KEY = "nanovllm_smoothed"  # in config.json: true where weights are not the float model's, but smoothed
_CHUNK, _MAX_CHUNKS = 512, 64  # tokens of the calibration text at once, and how often
_SAMPLE = 32  # rows that are kept of a layer's input in each prefill step
_MAX_CHANGE = 1e-3  # of log probabilities, root mean square, by smoothing alone
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class Smoothing(NamedTuple):
    """Factors by name of a checkpoint's tensor: [N] that its first dimension is divided by, [K] that its columns are
    multiplied by."""

    divided: dict[str, torch.Tensor]
    multiplied: dict[str, torch.Tensor]

    def apply(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor called `name`, smoothed, in its own dtype."""
        if name in self.divided:
            factors = self.divided[name].to(tensor.device)
            tensor = (tensor.float() / (factors[:, None] if tensor.dim() == 2 else factors)).to(tensor.dtype)
        if name in self.multiplied:
            tensor = (tensor.float() * self.multiplied[name].to(tensor.device)).to(tensor.dtype)
        return tensor


def quantize_checkpoint(
    model: str,
    output: str,
    quantization: str,
    *,
    calibration: str | None = None,
    file_format: str = "nanovllm",
    device: str = "auto",
    shard_bytes: int = SHARD_BYTES,
    show_progress: bool = False,
) -> None:
    """Write a quantized copy of a model directory, tensor by tensor: config, tokenizer files, weights.

    Args:
        model: directory of a float checkpoint.
        output: a directory that is empty or not there yet.
        quantization: "int8" or "w8a8".
        calibration: a text; w8a8 weights are then smoothed by what the model's activations are on it, for which the
            float model runs once on `device`.
        file_format: "nanovllm" or "compressed-tensors".
        device: where to compute.
        shard_bytes: most bytes of one file of weights, and of weights held in memory.

    Raises:
        ValueError: a setting or a checkpoint that does not fit; says what, got, allowed.
    """
    check(quantization in METHODS, "quantization", quantization, f"one of {', '.join(METHODS)}")
    check(file_format in FORMATS, "format", file_format, f"one of {', '.join(FORMATS)}")
    check(calibration is None or quantization == "w8a8", "calibration", "a text", "with quantization='w8a8' alone")
    target = Path(output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"output={output!r} is not an empty directory: name a new one")
    raw = load_raw_config(model, "auto")
    if raw.get("quantization_config"):
        raise ValueError(f"model={model!r} is quantized already: its config.json has a quantization_config")
    smoothing = Smoothing({}, {}) if calibration is None else calibrate(model, calibration, device)
    on = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))
    config, layout = make_config(quantization, file_format)
    bare = skeleton(raw, quantization)
    methods = {name: method for name, method, _ in loader.linear_parts(bare)}
    needed = frozenset(loader.checkpoint_targets(bare))
    target.mkdir(parents=True, exist_ok=True)
    shards = _Shards(target, shard_bytes)
    label = "Quantizing" if show_progress else None
    for name, tensor in loader.read_tensors(model, needed, bare.unneeded_tensors, label):
        tensor = smoothing.apply(name, tensor.to(on))
        layer, _, kind = name.rpartition(".")
        method = methods.get(layer)
        if isinstance(method, Int8Weights) and kind == "weight":
            encoded = layout.encode(*quantize_weight(tensor), method.scales)
            shards.add({f"{layer}.{part}": piece for part, piece in encoded.items()})
        else:
            shards.add({name: tensor})
    shards.close()
    _copy_rest(Path(model), target)
    # Last, so that a directory whose making was interrupted is not taken for a model.
    smoothed = {} if calibration is None else {SMOOTHING_KEY: True}
    (target / "config.json").write_text(json.dumps({**raw, "quantization_config": config, **smoothed}, indent=2) + "\n")


def calibrate(model: str, text: str, device: str = "auto") -> Smoothing:
    """Smoothing factors for a float checkpoint from its activations on a text, folded into what precedes the layers.

    Raises:
        ValueError: the text has no tokens, or smoothing would change what the float model computes.
    """
    knobs = {"max_num_seqs": 8, "max_num_batched_tokens": 4 * _CHUNK, "enforce_eager": True}
    with LLM(model, device=device, **knobs) as llm:
        size = min(_CHUNK, llm.engine.max_model_len - 1)
        ids = llm.engine.tokenizer.encode([text])[0]
        chunks = [ids[i : i + size] for i in range(0, len(ids), size)][:_MAX_CHUNKS]
        if not chunks:
            raise ValueError("the calibration text is empty: it needs at least one token")
        decoder = llm.engine.runner.model
        smoothing = _choose(decoder, _sample_inputs(llm, chunks))
        before = llm.score(chunks[:1])[0]["token_logprobs"][1:]
        views = {f"{name}.{kind}": view for name, _, v in loader.linear_parts(decoder) for kind, view in v.items()}
        for name, view in {**dict(decoder.named_parameters()), **views}.items():
            view.copy_(smoothing.apply(name, view))
        after = llm.score(chunks[:1])[0]["token_logprobs"][1:]
    change = (torch.tensor(before) - torch.tensor(after)).square().mean().sqrt().item() if before else 0.0
    if not change <= _MAX_CHANGE:
        raise ValueError(f"smoothing changes the float model's log probabilities by {change:.2g}: calibrate without it")
    logger.info("smoothing changes the float model's log probabilities by %.2g", change)
    return smoothing


def _sample_inputs(llm: LLM, chunks: list[list[int]]) -> dict[str, torch.Tensor]:
    """Rows of the input of each linear layer that can be smoothed, by its name."""
    decoder = llm.engine.runner.model
    rows: dict[str, list[torch.Tensor]] = {path: [] for path in decoder.input_producers}

    def watch(path: str) -> RemovableHandle:
        def keep(module: Linear, args: tuple[torch.Tensor]) -> None:
            rows[path].append(args[0][:: -(-len(args[0]) // _SAMPLE)].clone())

        return decoder.get_submodule(path).register_forward_pre_hook(keep)

    hooks = [watch(path) for path in rows]
    llm.generate(chunks, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    for hook in hooks:
        hook.remove()
    return {path: torch.cat(kept) for path, kept in rows.items()}


def _choose(decoder: CausalDecoder, samples: dict[str, torch.Tensor]) -> Smoothing:
    smoothing = Smoothing({}, {})
    for path, producer in decoder.input_producers.items():
        layer = decoder.get_submodule(path)
        factors = choose_smoothing(samples[path], layer.weight)
        smoothing.divided.update({f"{producer}.{kind}": factors for kind in ("weight", "bias")})
        for part in layer.parts:
            smoothing.multiplied[f"{path.rpartition('.')[0]}.{part}.weight"] = factors
    return smoothing


def skeleton(raw: dict[str, Any], quantization: str | None) -> CausalDecoder:
    """The model, quantized or not, without memory: for its names."""
    model_class, model_config = resolve_model(raw)
    scheme = resolve_scheme(None, quantization, "", converted=False)
    meta = torch.device("meta")
    return loader.build_model(lambda: model_class(model_config, 1, torch.float32), torch.float32, meta, scheme)


class _Shards:
    """Collects tensors and writes them as files of at most `limit` bytes, with an index if there are several."""

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory, self._limit = directory, limit
        self._tensors: dict[str, torch.Tensor] = {}
        self._size = self._total = 0
        self._weight_map: dict[str, str] = {}

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take them; what does not fit beside them is written first."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._tensors and self._size + size > self._limit:
            self._write()
        self._tensors |= {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        self._size += size
        self._total += size

    def close(self) -> None:
        """Write what is left, and the index."""
        self._write()
        files = sorted(set(self._weight_map.values()))
        if len(files) == 1:
            (self._directory / files[0]).rename(self._directory / loader.SINGLE)
            return
        index = {"metadata": {"total_size": self._total}, "weight_map": self._weight_map}
        (self._directory / loader.INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        file = self._directory / f"model-{len(set(self._weight_map.values())) + 1:05}.safetensors"
        save_file(self._tensors, file, metadata={"format": "pt"})
        file.chmod(0o644)  # safetensors makes files that their owner alone can read
        self._weight_map |= dict.fromkeys(self._tensors, file.name)
        self._tensors, self._size = {}, 0


def _copy_rest(source: Path, target: Path) -> None:
    """Tokenizer, generation config, licence and the like: every small file that is neither weights nor the config."""
    for file in sorted(source.iterdir()):
        is_weights = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and file.name != "config.json":
            shutil.copyfile(file, target / file.name)


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="nanovllm-quantize", description=__doc__)
    parser.add_argument("--model", required=True, help="directory of a float checkpoint")
    parser.add_argument("--output", required=True, help="directory to make")
    parser.add_argument("--quantization", required=True, choices=list(METHODS))
    parser.add_argument("--calibration", metavar="FILE", help="a text; w8a8 weights are smoothed by activations on it")
    parser.add_argument("--format", default="nanovllm", choices=FORMATS)
    parser.add_argument("--device", default="auto", help="where to compute; 'auto' is a GPU if there is one")
    args = parser.parse_args()
    try:
        text = None if args.calibration is None else Path(args.calibration).read_text(encoding="utf-8")
        quantize_checkpoint(
            args.model, args.output, args.quantization, calibration=text, file_format=args.format, device=args.device,
            show_progress=True,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
