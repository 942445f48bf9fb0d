"""Modules, optimizers and random generators as named tensors plus JSON, restored bit for bit.

Checkpoints hold nothing that could run code when it is read, so everything stateful passes through here.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError, TrimtabWarning
from trimtab.models.sharding import is_sharded, shared_parameters
from trimtab.training.checkpoint.sharded_sections import described, fill
from trimtab.training.ranks import here

_TENSOR, _ARRAY, _TUPLE, _DICT = "$tensor", "$array", "$tuple", "$dict"


def pack(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Split nested dicts, lists, tuples, numbers, strings, tensors and numpy arrays into named tensors and JSON.

    Keeps what JSON alone loses: tuples, integer keys, dtypes. Anything else raises `TypeError` naming its place.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _pack(tree, "", tensors)


def unpack(tensors: Mapping[str, Tensor], data: Any) -> Any:
    """The inverse of `pack`. Tensors are not copied."""
    if isinstance(data, list):
        return [unpack(tensors, item) for item in data]
    if not isinstance(data, dict):
        return data
    if _TENSOR in data:
        return tensors[data[_TENSOR]]
    if _ARRAY in data:
        return tensors[data[_ARRAY]].numpy()
    if _TUPLE in data:
        return tuple(unpack(tensors, item) for item in data[_TUPLE])
    if _DICT in data:
        return {key: unpack(tensors, value) for key, value in data[_DICT]}
    return {key: unpack(tensors, value) for key, value in data.items()}


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones once, under their first name (as HF files have it)."""
    state: dict[str, Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    again = shared_parameters(model)
    for name, tensor in model.state_dict().items():
        if is_sharded(tensor):
            # A part may be empty on this rank, and all ranks must agree: memory does not tell what is tied.
            if name not in again:
                state[name] = tensor
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        state[name] = tensor
    return state


@torch.no_grad()
def load_model_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into `model` in place, ties kept. Names, shapes and dtypes must match exactly (`TrimtabError`).

    Either side may be sharded: a rank takes its part of what one process or any other number of ranks saved.
    """
    state = model_state(model)
    _same_names(set(state), set(tensors), "weights")
    for name, target in state.items():
        shape, dtype = described(tensors, name)
        if shape != target.shape or dtype != target.dtype:
            raise TrimtabError(
                f"weight {name!r} is {dtype} {tuple(shape)} in the checkpoint and {target.dtype} "
                f"{tuple(target.shape)} in the model: use the recipe the run was started with"
            )
    fill(state, tensors)


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], Any]:
    """`optimizer.state_dict()` with every parameter under its name in `model`, so that no order is trusted later."""
    names = _parameter_names(optimizer, model)
    plain = optimizer.state_dict()
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in plain["param_groups"]]
    return pack({"state": {names[i]: value for i, value in plain["state"].items()}, "param_groups": groups})


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], data: Any
) -> None:
    """The inverse of `optimizer_state`; the groups must hold the same parameters in the same order (`TrimtabError`)."""
    names = _parameter_names(optimizer, model)
    index_of = {name: index for index, name in names.items()}
    saved = unpack(_like_parameters(tensors, dict(model.named_parameters())), data)
    here = [[names[index] for index in group["params"]] for group in optimizer.state_dict()["param_groups"]]
    there = [group["params"] for group in saved["param_groups"]]
    _same_names({n for group in here for n in group}, {n for group in there for n in group}, "optimizer state")
    if here != there:
        raise TrimtabError("the checkpoint's optimizer groups its parameters differently: use the recipe of the run")
    groups = [{**group, "params": [index_of[name] for name in group["params"]]} for group in saved["param_groups"]]
    state = {index_of[name]: value for name, value in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def rng_state() -> dict[str, Any]:
    """The global random generators (python, numpy, torch, every CUDA device of this process) as a tree for `pack`."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - a user's reward may draw from the global generator
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in _cuda_devices()],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the global generators back. Another number of CUDA devices is a warning: their draws will differ."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    devices = _cuda_devices()
    if len(state["cuda"]) == len(devices):
        for device, generator in zip(devices, state["cuda"], strict=True):
            torch.cuda.set_rng_state(generator, device)
    else:
        warnings.warn(
            f"the checkpoint has the random state of {len(state['cuda'])} CUDA devices, here are {len(devices)}: "
            "the run continues, but not with the same random numbers",
            TrimtabWarning,
            stacklevel=2,
        )


def _cuda_devices() -> list[int]:
    """All of them, or of several ranks each its own: touching a device costs memory there."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.current_device()] if here().size > 1 else list(range(torch.cuda.device_count()))


def _pack(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor | np.ndarray):
        while place in tensors:  # {"a/b": x, "a": {"b": y}} or {1: x, "1": y}
            place += "'"
        tensors[place] = value.detach() if isinstance(value, Tensor) else torch.from_numpy(value.copy())
        return {_TENSOR if isinstance(value, Tensor) else _ARRAY: place}
    if isinstance(value, list | tuple):
        items = [_pack(item, f"{place}/{index}", tensors) for index, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        items = {key: _pack(item, f"{place}/{key}".lstrip("/"), tensors) for key, item in value.items()}
        if all(isinstance(key, str) and not key.startswith("$") for key in items):
            return items
        return {_DICT: [[key, item] for key, item in items.items()]}
    raise TypeError(f"cannot store {place or 'the value'}: {type(value).__name__} is neither data nor a tensor")


def _like_parameters(tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Copies of saved optimizer state, each shared among ranks as the parameter it belongs to.

    Loaded tensors are mapped from the checkpoint's files, which pruning may delete while the run goes on.
    """
    targets: dict[str, Tensor] = {}
    for name in tensors:
        shape, dtype = described(tensors, name)
        owner = parameters.get(name.removeprefix("state/").rpartition("/")[0])
        if owner is not None and is_sharded(owner) and owner.shape == shape:
            targets[name] = torch.empty_like(owner, dtype=dtype).detach()
        else:
            targets[name] = torch.empty(shape, dtype=dtype)
    fill(targets, tensors)
    return targets


def _parameter_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[int, str]:
    """Position in `optimizer.state_dict()` -> name in `model`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in names for parameter in ordered)
    if strangers:
        raise ValueError(f"{strangers} parameters of the optimizer do not belong to the model")
    return {index: names[id(parameter)] for index, parameter in enumerate(ordered)}


def _same_names(expected: set[str], found: set[str], what: str) -> None:
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    problems = [
        f"{len(names)} {word} (e.g. {names[0]!r})"
        for names, word in ((missing, "missing"), (unexpected, "unexpected"))
        if names
    ]
    if problems:
        raise TrimtabError(f"the checkpoint's {what} do not fit the model: {', '.join(problems)}; use the run's recipe")
