"""From safetensors on disk to a model on its device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from nanovllm.config import read_json
from nanovllm.layers.linear import Linear

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_OLD_ROTARY_TABLE = "rotary_emb.inv_freq"


def build_model(construct: Callable[[], nn.Module], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The module that `construct` makes, uninitialised, on `device`: it is made without memory first, so that it
    never exists twice."""
    with torch.device("meta"):
        model = construct()
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            empty = torch.empty(param.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
    return model.to(device).eval()


def fill_with_noise(model: nn.Module, seed: int) -> None:
    """Random weights (load_format "dummy"): matrices N(0, 0.02), vectors ones."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for param in model.parameters():
        if param.dim() > 1:
            param.normal_(0.0, 0.02, generator=generator)
        else:
            param.fill_(1.0)


def checkpoint_targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """Where each tensor of a checkpoint goes: name to parameter, or to its rows of a packed one."""
    targets = {}
    for path, module in model.named_modules():
        for kind, param in module.named_parameters(recurse=False):
            if isinstance(module, Linear):
                parent = path.rpartition(".")[0]
                targets |= {f"{parent}.{part}.{kind}": module.part(param, part) for part in module.parts}
            else:
                targets[f"{path}.{kind}"] = param
    return targets


def load_weights(model: nn.Module, directory: str, unneeded: frozenset[str], show_progress: bool = False) -> None:
    """Copy a checkpoint into the model, tensor by tensor.

    Only the files that the index names are read (or model.safetensors where there is no index).

    Args:
        model: as `build_model` made it.
        directory: of the checkpoint.
        unneeded: names of tensors that a checkpoint may carry though the model has no place for them.
        show_progress: a bar on stderr.

    Raises:
        ValueError: no safetensors, a missing shard, missing or unexpected tensors, or a shape that does not fit;
            the message names them.
    """
    targets = checkpoint_targets(model)
    missing = set(targets)
    unexpected = []
    for file in tqdm(weight_files(Path(directory)), desc="Loading weights", disable=not show_progress):
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                if name in targets:
                    _copy(name, tensors.get_tensor(name), targets[name])
                    missing.discard(name)
                elif name not in unneeded and not name.endswith(_OLD_ROTARY_TABLE):
                    unexpected.append(name)
    if missing or unexpected:
        raise ValueError(
            f"the weights in {directory!r} do not fit {type(model).__name__}: "
            f"missing {_listed(missing)}; unexpected {_listed(unexpected)}"
        )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that make up a checkpoint, in a fixed order.

    Raises:
        ValueError: there are none, or the index names one that is not there.
    """
    if (directory / _INDEX).is_file():
        weight_map = read_json(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{_INDEX} in {str(directory)!r} has no weight_map")
        names = sorted(set(weight_map.values()))
        absent = [name for name in names if not (directory / name).is_file()]
        if absent:
            raise ValueError(f"{str(directory)!r} lacks {', '.join(absent)}, which {_INDEX} names")
        return [directory / name for name in names]
    if not (directory / _SINGLE).is_file():
        raise ValueError(f"{str(directory)!r} holds no weights: neither {_INDEX} nor {_SINGLE} is there")
    return [directory / _SINGLE]


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file.name} in {str(file.parent)!r} cannot be read: {error}") from None


def _copy(name: str, tensor: torch.Tensor, target: torch.Tensor) -> None:
    if tensor.shape != target.shape:
        raise ValueError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the model needs {tuple(target.shape)}")
    target.copy_(tensor)


def _listed(names: set[str] | list[str], most: int = 8) -> str:
    shown = sorted(names)[:most]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(shown) or "none") + more
