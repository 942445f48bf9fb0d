"""Modules, optimizers and random generators as named tensors and JSON, restored bit for bit.

Checkpoints contain no pickles, which could run code on loading, so all state is converted here.
"""

from __future__ import annotations

import random
import warnings
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError, TrimtabWarning
from trimtab.trainer.checkpoint.sharded_sections import copy_into, shape_and_dtype
from trimtab.trainer.models.sharding import is_sharded
from trimtab.trainer.ranks import current_ranks


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers by name, tied ones once by the first name, as in Hugging Face files."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():  # keep_vars: tied names share one object
        first.setdefault(id(tensor), (name, tensor.detach()))
    return dict(first.values())


@torch.no_grad()
def load_model_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` into `model` in place; tied tensors stay tied.

    Either side may be sharded, over any number of ranks. Raises `TrimtabError` unless names, shapes and dtypes match.
    """
    state = model_state(model)
    _check_names(set(state), set(tensors), "weights")
    for name, target in state.items():
        shape, dtype = shape_and_dtype(tensors, name)
        if shape != target.shape or dtype != target.dtype:
            raise TrimtabError(
                f"weight {name!r} is {dtype} {tuple(shape)} in the checkpoint and {target.dtype} "
                f"{tuple(target.shape)} in the model: use the recipe the run was started with"
            )
    copy_into(state, tensors)


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], Any]:
    """Returns an optimizer's tensors, named `<parameter>/<kind>`, and its groups, with parameters by name, as JSON.

    torch's `get_optimizer_state_dict` is not a substitute: it steps an optimizer that has no state yet, which changes
    all later updates.
    """
    grouped = _names_by_group(optimizer, model)
    names, plain = list(chain.from_iterable(grouped)), optimizer.state_dict()
    groups = [{**group, "params": params} for group, params in zip(plain["param_groups"], grouped, strict=True)]
    return {f"{names[i]}/{kind}": value for i, of in plain["state"].items() for kind, value in of.items()}, groups


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], groups: Any
) -> None:
    """Restores an `optimizer_state`. Raises `TrimtabError` unless groups hold the same parameters in the same order."""
    current, stored = _names_by_group(optimizer, model), [group["params"] for group in groups]
    _check_names(set(chain.from_iterable(current)), set(chain.from_iterable(stored)), "optimizer state")
    if current != stored:
        raise TrimtabError("the checkpoint's optimizer groups its parameters differently: use the recipe of the run")
    state: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in _sharded_like_parameters(tensors, model).items():
        parameter, _, kind = name.rpartition("/")
        state[parameter][kind] = tensor
    groups = [{**group, "betas": tuple(group["betas"])} for group in groups]
    # The optimizer matches saved parameters to its own by their order in the groups, whether they are numbers or names.
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def rng_state() -> dict[str, Any]:
    """Returns the states of the global random generators as JSON: python, numpy, torch, this process's CUDA devices."""
    global_state: Any = np.random.get_state()  # noqa: NPY002 - a user's reward may draw from the global generator
    kind, words, *rest = global_state
    return {
        "python": random.getstate(),
        "numpy": [kind, words.tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [torch.cuda.get_rng_state(device).tolist() for device in _cuda_devices()],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restores the global random generators. Warns if the number of CUDA devices differs: their draws change."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    devices = _cuda_devices()
    if len(state["cuda"]) == len(devices):
        for device, generator in zip(devices, state["cuda"], strict=True):
            torch.cuda.set_rng_state(torch.tensor(generator, dtype=torch.uint8), device)
    else:
        warnings.warn(
            f"the checkpoint has the random state of {len(state['cuda'])} CUDA devices, here are {len(devices)}: "
            "the run continues, but not with the same random numbers",
            TrimtabWarning,
            stacklevel=2,
        )


def _cuda_devices() -> list[int]:
    """Returns all CUDA devices; with several ranks this rank's only, because using a device allocates memory on it."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.current_device()] if current_ranks().size > 1 else list(range(torch.cuda.device_count()))


def _sharded_like_parameters(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of saved optimizer state, each sharded like the parameter it belongs to.

    Copies, because loaded tensors are memory-mapped from files that `store.delete_old` may delete later in the run.
    """
    parameters, targets = dict(model.named_parameters()), dict[str, Tensor]()
    for name in tensors:
        shape, dtype = shape_and_dtype(tensors, name)
        owner = parameters.get(name.rpartition("/")[0])
        if owner is not None and is_sharded(owner) and owner.shape == shape:
            targets[name] = torch.empty_like(owner, dtype=dtype).detach()
        else:
            targets[name] = torch.empty(shape, dtype=dtype)
    copy_into(targets, tensors)
    return targets


def _names_by_group(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Returns parameter names of each group, in the order in which `optimizer.state_dict()` numbers parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    if unknown := list(chain.from_iterable(groups)).count(""):
        raise ValueError(f"{unknown} parameters of the optimizer do not belong to the model")
    return groups


def _check_names(expected: set[str], stored: set[str], what: str) -> None:
    """Raises `TrimtabError` with the numbers of missing and unexpected names, if there are any."""
    missing, unexpected = sorted(expected - stored), sorted(stored - expected)
    problems = [
        f"{len(names)} {word} (e.g. {names[0]!r})"
        for names, word in ((missing, "missing"), (unexpected, "unexpected"))
        if names
    ]
    if problems:
        raise TrimtabError(f"the checkpoint's {what} do not fit the model: {', '.join(problems)}; use the run's recipe")
