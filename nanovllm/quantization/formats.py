"""config.json's `quantization_config`, read and written: our own, and the int8 part of compressed-tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.quantization.base import UNQUANTIZED, Int8Weights, LinearMethod
from nanovllm.quantization.int8 import Int8
from nanovllm.quantization.layouts import LAYOUTS, Layout
from nanovllm.quantization.w8a8 import W8A8

METHODS: dict[str, type[Int8Weights]] = {"int8": Int8, "w8a8": W8A8}
FORMATS = ("nanovllm", "compressed-tensors")
_COMPRESSED_LAYOUTS = {"int8": "pack-quantized", "w8a8": "int-quantized"}

# What a group of compressed-tensors must say. In a tuple the first is what is written; null is what some writers leave
# out.
_WEIGHTS = {
    "num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True,
    "dynamic": (False, None), "group_size": (None, -1), "actorder": None, "block_structure": None,
}  # fmt: skip
_ACTIVATIONS = {
    "num_bits": 8, "type": "int", "strategy": "token", "symmetric": True,
    "dynamic": True, "group_size": None, "block_structure": None,
}  # fmt: skip


@dataclass(frozen=True)
class Scheme:
    """Which linear layers of a model are quantized, and how.

    groups: targets and method; the first group with a target that fits a layer decides, no group means unquantized. A
    target is a layer's name, a regular expression after "re:", or "Linear" for all; `ignore` holds such names too.
    """

    groups: tuple[tuple[tuple[str, ...], LinearMethod], ...] = ()
    ignore: tuple[str, ...] = ()

    def method_of(self, layers: list[str]) -> LinearMethod:
        """The method of a linear layer.

        Args:
            layers: the checkpoint's names of the projections packed into it.

        Raises:
            ValueError: they are not all quantized alike.
        """
        methods = {id(method): method for method in map(self._method_of_one, layers)}
        if len(methods) > 1:
            raise ValueError(
                f"config.json: quantization_config treats {', '.join(layers)} differently, but they share one matrix: "
                "quantize or ignore all of them"
            )
        return next(iter(methods.values()))

    def _method_of_one(self, layer: str) -> LinearMethod:
        if not _fits(layer, self.ignore):
            for targets, method in self.groups:
                if "Linear" in targets or _fits(layer, targets):
                    return method
        return UNQUANTIZED

    def check_device(self, device: torch.device) -> None:
        """Refuse a GPU without the int8 instructions, now rather than in the first step.

        Raises:
            ValueError: the GPU is older than sm_80.
        """
        if self.groups and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            major, minor = torch.cuda.get_device_capability(device)
            raise ValueError(
                f"quantization={self.groups[0][1].name!r} is not available on {device}: it is sm_{major}{minor} and "
                "sm_80 or newer is needed; use an unquantized model or device='cpu'"
            )


def resolve_scheme(found: dict[str, Any] | None, wanted: str | None, directory: str, converted: bool) -> Scheme:
    """How the linear layers of a checkpoint are to be held.

    Args:
        found: its config.json's quantization_config, if there is one.
        wanted: `EngineConfig.quantization`.
        directory: of the checkpoint, for messages.
        converted: whether it must hold quantized weights (it is the `quantized_model_path`).

    Raises:
        ValueError: the config is not one of those read here, contradicts `wanted`, or is missing.
    """
    if not found:
        if converted:
            raise ValueError(f"quantized_model_path={directory!r} is not quantized: no quantization_config is there")
        return Scheme() if wanted is None else Scheme(((("Linear",), METHODS[wanted]()),))
    scheme = _read_config(found)
    names = {method.name for _, method in scheme.groups}
    if wanted is not None and names != {wanted}:
        raise ValueError(
            f"quantization={wanted!r} contradicts {directory!r}, which is quantized with {', '.join(sorted(names))}; "
            "leave quantization at None, or take the unquantized model"
        )
    return scheme


def make_config(quantization: str, file_format: str) -> tuple[dict[str, Any], Layout]:
    """The quantization_config of a directory in one of FORMATS, and the layout of its weights."""
    if file_format == "nanovllm":
        return {"quant_method": "nanovllm", "quantization": quantization}, LAYOUTS["nanovllm"]
    layout = _COMPRESSED_LAYOUTS[quantization]
    group = {
        "targets": ["Linear"],
        "weights": _written(_WEIGHTS),
        "input_activations": _written(_ACTIVATIONS) if quantization == "w8a8" else None,
        "output_activations": None,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    return config, LAYOUTS[layout]


def _read_config(found: dict[str, Any]) -> Scheme:
    method = found.get("quant_method")
    if method == "nanovllm":
        _need(found, "quantization", tuple(METHODS))
        return Scheme(((("Linear",), METHODS[found["quantization"]](LAYOUTS["nanovllm"])),))
    _need(found, "quant_method", FORMATS)
    for unsupported in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if found.get(unsupported):
            raise _refusal(unsupported, found[unsupported], "null")
    groups = []
    for name, group in (found.get("config_groups") or {}).items():
        where = f"config_groups.{name}."
        _need_all(group.get("weights") or {}, _WEIGHTS, f"{where}weights.")
        _need(group, "output_activations", (None,), where)
        inputs = group.get("input_activations")
        if inputs is not None:
            _need_all(inputs, _ACTIVATIONS, f"{where}input_activations.")
        quantization = "int8" if inputs is None else "w8a8"
        layout = group.get("format") or found.get("format")
        if layout != _COMPRESSED_LAYOUTS[quantization]:
            raise _refusal(f"{where}format", layout, f"{_COMPRESSED_LAYOUTS[quantization]!r} for {quantization}")
        groups.append((tuple(group.get("targets") or ()), METHODS[quantization](LAYOUTS[layout])))
    if not groups:
        raise _refusal("config_groups", found.get("config_groups"), "at least one group")
    return Scheme(tuple(groups), tuple(found.get("ignore") or ()))


def _fits(layer: str, patterns: tuple[str, ...]) -> bool:
    return any(re.match(p[3:], layer) if p.startswith("re:") else p == layer for p in patterns)


def _written(rules: dict[str, Any]) -> dict[str, Any]:
    return {name: rule[0] if isinstance(rule, tuple) else rule for name, rule in rules.items()}


def _need_all(found: dict[str, Any], rules: dict[str, Any], where: str) -> None:
    for name, rule in rules.items():
        _need(found, name, rule if isinstance(rule, tuple) else (rule,), where)


def _need(found: dict[str, Any], name: str, allowed: tuple, where: str = "") -> None:
    if found.get(name) not in allowed:
        raise _refusal(f"{where}{name}", found.get(name), " or ".join(map(repr, allowed)))


def _refusal(name: str, got: Any, allowed: str) -> ValueError:
    return ValueError(f"config.json: quantization_config with {name}={got!r} is not supported: only {allowed}")
