"""From safetensors on disk to a model on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from nanovllm.config import read_json
from nanovllm.distributed import Place
from nanovllm.layers.linear import Linear
from nanovllm.layers.mamba import Stacked
from nanovllm.quantization.base import LinearMethod, Reader, copy_into
from nanovllm.quantization.formats import Scheme

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OLD_ROTARY_TABLE = "rotary_emb.inv_freq"


def build_model(
    construct: Callable[[], nn.Module], dtype: torch.dtype, device: torch.device, scheme: Scheme | None = None
) -> nn.Module:
    """The module that `construct` makes, uninitialised, on `device`: it is made without memory first, so that it
    never exists twice. `scheme` says which of its linear layers are quantized; None is none.

    Raises:
        ValueError: the scheme treats projections of one matrix differently.
    """
    with torch.device("meta"):
        model = construct()
        for path, module in model.named_modules():
            if isinstance(module, Linear) and module.parts and scheme is not None:
                module.use(scheme.method_of([_part_name(path, part) for part in module.parts]))
    for module in model.modules():
        fixed = getattr(module, "fixed_dtypes", {})  # of parameters that do not follow the model's
        for name, param in module.named_parameters(recurse=False):
            empty = torch.empty(param.shape, dtype=fixed.get(name, dtype), device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
    return model.to(device).eval()


def fill_with_noise(model: nn.Module, seed: int, dtype: torch.dtype) -> None:
    """Random weights (load_format "dummy"): matrices N(0, 0.02), vectors ones. Quantized layers get what they would
    have got without quantization, drawn in `dtype`, and a rank its part of what one rank would have got, so each is
    drawn whole, one layer at a time."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Linear):
            rows = [cut.total for cut in module.parts.values()]
            noise = torch.empty(sum(rows), module.inputs.total, dtype=dtype, device=device)
            noise.normal_(0.0, 0.02, generator=generator)
            for part, weight in zip(module.parts, noise.split(rows), strict=True):
                module.method.store(weight, module.places(part))
            if module.bias is not None:
                module.bias.fill_(1.0)
            continue
        for _, param in module.named_parameters(recurse=False):
            place = _place(module, param)
            if param.dim() == 1:
                param.fill_(1.0)
            elif place.shape == param.shape:
                param.normal_(0.0, 0.02, generator=generator)
            else:
                noise = torch.empty(place.shape, dtype=param.dtype, device=device)
                place.fill(noise.normal_(0.0, 0.02, generator=generator))


def linear_parts(model: nn.Module) -> Iterator[tuple[str, LinearMethod, dict[str, torch.Tensor]]]:
    """Each projection of each linear layer: its name in a checkpoint, its method, and its rows of each parameter."""
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            for part in module.parts:
                views = {kind: module.part(param, part) for kind, param in module.named_parameters(recurse=False)}
                yield _part_name(path, part), module.method, views


def kernel_paths(model: nn.Module, device: torch.device) -> dict[str, str]:
    """For each kind of quantized layer (such as "down_proj") the method, and the kernels that multiply on `device`."""
    paths = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear) and module.method.name is not None:
            paths[path.rpartition(".")[2]] = f"{module.method.name}, {module.method.kernel_path(device)}"
    return paths


def checkpoint_targets(model: nn.Module) -> dict[str, Reader]:
    """For each tensor of a checkpoint by name: what puts it where it belongs."""
    targets = {}
    for path, module in model.named_modules():
        for part in module.parts if isinstance(module, Linear) else ():
            places = module.places(part)
            readers = module.method.readers(places) | ({"bias": copy_into(places["bias"])} if "bias" in places else {})
            targets |= {f"{_part_name(path, part)}.{kind}": reader for kind, reader in readers.items()}
        for kind, param in module.named_parameters(recurse=False):
            if isinstance(module, Stacked):
                targets |= {
                    f"{_part_name(path, name)}.{kind}": copy_into(Place(module.part(param, name), (module.rows,)))
                    for name in module.parts
                }
            elif not isinstance(module, Linear):
                targets[f"{path}.{kind}"] = copy_into(_place(module, param))
    return targets


def _place(module: nn.Module, param: torch.Tensor) -> Place:
    return module.place(param) if hasattr(module, "place") else Place(param)


def load_weights(model: nn.Module, directory: str, unneeded: frozenset[str], show_progress: bool = False) -> None:
    """Copy a checkpoint into the model, tensor by tensor; what the model holds quantized is quantized on the way.

    Args:
        model: as `build_model` made it.
        directory: of the checkpoint.
        unneeded: names of tensors that a checkpoint may carry though the model has no place for them.
        show_progress: a bar on stderr.

    Raises:
        ValueError: as in `read_tensors`, or a shape or kind of number that does not fit; the message names them.
    """
    targets, label = checkpoint_targets(model), "Loading weights" if show_progress else None
    for name, tensor in read_tensors(directory, frozenset(targets), unneeded, label):
        targets[name](name, tensor)


def read_tensors(
    directory: str, needed: frozenset[str], unneeded: frozenset[str], label: str | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The `needed` tensors of a checkpoint by name, one at a time, with a bar called `label` if there is one.

    Only the files that the index names are read (or model.safetensors where there is no index).

    Raises:
        ValueError: no safetensors, a missing shard, and in the end missing tensors or unexpected ones, which are
            neither needed nor `unneeded`; the message names them.
    """
    missing, unexpected = set(needed), []
    with tqdm(total=len(needed), desc=label, unit="tensor", disable=label is None) as bar:
        for file in weight_files(Path(directory)):
            with _open(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    if name in needed:
                        yield name, tensors.get_tensor(name)
                        missing.discard(name)
                        bar.update()
                    elif name not in unneeded and not name.endswith(_OLD_ROTARY_TABLE):
                        unexpected.append(name)
    if missing or unexpected:
        raise ValueError(
            f"the weights in {directory!r} do not fit the model: "
            f"missing {_listed(missing)}; unexpected {_listed(unexpected)}"
        )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that make up a checkpoint, in a fixed order.

    Raises:
        ValueError: there are none, or the index names one that is not there.
    """
    if (directory / INDEX).is_file():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{INDEX} in {str(directory)!r} has no weight_map")
        names = sorted(set(weight_map.values()))
        absent = [name for name in names if not (directory / name).is_file()]
        if absent:
            raise ValueError(f"{str(directory)!r} lacks {', '.join(absent)}, which {INDEX} names")
        return [directory / name for name in names]
    if not (directory / SINGLE).is_file():
        raise ValueError(f"{str(directory)!r} holds no weights: neither {INDEX} nor {SINGLE} is there")
    return [directory / SINGLE]


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file.name} in {str(file.parent)!r} cannot be read: {error}") from None


def _part_name(path: str, part: str) -> str:
    return f"{path.rpartition('.')[0]}.{part}"


def _listed(names: set[str] | list[str], most: int = 8) -> str:
    shown = sorted(names)[:most]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(shown) or "none") + more
