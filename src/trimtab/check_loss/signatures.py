"""Calls a loss function of any trainer with a batch, by the names of its parameters (signatures.toml).

    ours, verl's and most others'   tensors and the counts of the update, by name
    slime's and Miles' custom loss  (args, batch, logits, sum_of_sample_mean)
    prime-rl's custom loss          (inputs), one response at a time
    a method of a TRL trainer       (self, model, inputs)

What a function computes outside of its parameters (advantages, weights that the trainer passes) is not judged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from trimtab.check_loss import stand_ins
from trimtab.check_loss.probes import Batch, Loss, Update, of_lengths
from trimtab.errors import TrimtabError, did_you_mean

TENSORS, COUNTS = (stand_ins.TABLES[table] for table in ("tensors", "counts"))
FIELDS: dict[str, list[str]] = TENSORS | COUNTS
GIVEN = {"loss_agg_mode": "token-mean", "rollout_is_weights": None}
"""Values of parameters of verl's losses that have no default."""


def of_function(function: Callable[..., Any], arguments: Mapping[str, Any] | None = None, name: str = "") -> Loss:
    """Returns a function as a loss: also a class that is built without arguments, and the `forward` of a module.

    arguments: field or count -> the parameter that takes it; parameter -> its value; "config.key", "args.key" or a key
        of TRL's configuration -> the value in that object.
    Raises `TrimtabError` for a parameter of unknown meaning and for a function that cannot be called.
    """
    label = name or getattr(function, "__name__", "loss")
    built = function() if isinstance(function, type) else function
    # Losses apply `.float()` to log-probs in 16 bits; here it keeps float64.
    in_double = partial(patch.object, torch.Tensor, "float", torch.Tensor.double)
    with in_double():
        call, inputs = _call(getattr(built, "forward", built), dict(arguments or {}))

    def scalar(batch: Batch, update: Update) -> Tensor:
        with in_double():
            return _scalar(call(batch, update), label)

    return Loss(label, scalar, inputs)


def _call(function: Callable[..., Any], given: dict[str, Any]) -> tuple[stand_ins.Call, str]:
    """Returns how a function is called, in code and in words."""
    names = list(inspect.signature(function).parameters)
    if names[:1] == ["self"]:
        return stand_ins.trl(function, given), "log-probs on a stand-in of its TRL trainer"
    if {"args", "batch", "logits", "sum_of_sample_mean"} <= set(names):
        return stand_ins.slime(function, _of_object("args", given)), "a batch of slime or Miles"
    if "inputs" in names and not set(names) & {"current", *TENSORS["current"]}:
        return stand_ins.prime_rl(function, given), "the inputs of prime-rl"
    return _by_names(function, given)


def _of_object(key: str, given: dict[str, Any]) -> dict[str, Any]:
    """Takes the values of `key.name` out of the arguments."""
    names = [name for name in given if name.startswith(f"{key}.")]
    return {name.removeprefix(f"{key}."): given.pop(name) for name in names}


def _by_names(function: Callable[..., Any], given: dict[str, Any]) -> tuple[stand_ins.Call, str]:
    config = _of_object("config", given)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = {key: one for key, one in inspect.signature(function).parameters.items() if one.kind not in several}
    if config and "config" not in parameters:
        raise TrimtabError(f"--arguments config.{next(iter(config))}: the function has no parameter `config`")
    meanings, values = _meanings(parameters, given)
    optional = {name for name, parameter in parameters.items() if parameter.default is not parameter.empty}

    def call(batch: Batch, update: Update, form: tuple[torch.dtype, str]) -> Any:
        dtype, shape = form
        advantage = batch["advantage"][:, 0] if shape == "(batch,)" else batch["advantage"]
        fields = {
            **batch,
            "mask": batch["mask"].to(dtype),
            "advantage": advantage.expand_as(batch["mask"]).clone() if shape == "(batch, time)" else advantage,
            "tokens": update.tokens,
            "responses": update.responses,
            "trained_responses": update.batch["mask"].any(1).sum(),
            "parts": update.parts,
        }
        left = set() if update.counted else {name for name in optional if meanings.get(name) in COUNTS}
        own = {name: fields[field] for name, field in meanings.items() if name not in left}
        if "config" in parameters and "config" not in values:
            own["config"] = stand_ins.verl_config(config, update)
        return function(**values, **own)

    form = _form(call, function)
    shapes = {"mask": f" ({str(form[0]).removeprefix('torch.')})", "advantage": f" {form[1]}"}
    said = [f"{parameter} = {name}{shapes.get(name, '')}" for parameter, name in meanings.items()]
    left = [name for name in parameters if name in optional - {*meanings, *values}]
    said += [f"left at their defaults: {', '.join(left)}"] if left else []
    return partial(call, form=form), ", ".join(said)


def _meanings(
    parameters: Mapping[str, inspect.Parameter], given: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the fields and counts that parameters take, and the values of others.

    Raises `TrimtabError` for a parameter without default and meaning, and for arguments that name nothing.
    """
    known = {name: field for field, names in FIELDS.items() for name in (field, *names)}
    mapped, values = dict[str, str](), dict[str, Any]()
    for key, value in given.items():
        if key in FIELDS and isinstance(value, str) and value in parameters:
            mapped[value] = key
        elif key in parameters:
            values[key] = value
        else:
            near = did_you_mean(key, [*FIELDS, *parameters])
            raise TrimtabError(f"--arguments {key}={value}: no parameter has that name{near}")
    for name, parameter in parameters.items():
        if name in mapped or name in values:
            continue
        if name in known and known[name] not in mapped.values():
            mapped[name] = known[name]
        elif parameter.default is parameter.empty and name in GIVEN:
            values[name] = GIVEN[name]
        elif parameter.default is parameter.empty and name != "config":
            raise TrimtabError(
                f"the meaning of the parameter `{name}` is not known: give a value, --arguments {name}=0.2, or say "
                f"what it takes, --arguments FIELD={name} with a FIELD of {', '.join(FIELDS)}"
            )
    for field in ("current", "advantage"):
        if field not in mapped.values():
            raise TrimtabError(
                f"no parameter takes `{field}` (known names: {', '.join((field, *TENSORS[field]))}): say which one "
                f"does, --arguments {field}=NAME"
            )
    return mapped, values


def _form(call: Callable[..., Any], function: Callable[..., Any]) -> tuple[torch.dtype, str]:
    """Returns the dtype of the mask and the shape of advantages with which the function can be called.

    A wrong shape may broadcast: a response must then not depend on the advantages of others.
    """
    name = getattr(function, "__name__", "the function")
    forms = list(product((torch.bool, torch.float64), ("(batch, 1)", "(batch, time)", "(batch,)")))
    if "response_mask" in inspect.signature(function).parameters:  # verl's
        forms.insert(0, (torch.float64, "(batch, time)"))
    possible: list[tuple[torch.dtype, str]] = []
    errors: list[str] = []
    for form in forms:
        loss = Loss(name, lambda batch, update, form=form: _scalar(call(batch, update, form), name))
        batches = [of_lengths([5, 3, 4], width=6) for _ in range(2)]
        batches[1]["advantage"][1] = 2.0
        try:
            alone, other = (loss.read(batch).gradient[0] for batch in batches)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}")
            continue
        possible.append(form)
        if torch.equal(alone, other):
            return form
    if possible:
        return possible[0]
    raise TrimtabError(
        f"{name} cannot be called with tensors of (batch, time), a mask of bool or float, and advantages of (batch, "
        f"1), (batch, time) or (batch,): {errors[0]}"
    )


def _scalar(value: Any, name: str) -> Tensor:
    """Returns the loss of what a function returns: a scalar, the first of several values, or `loss` of an object."""
    if isinstance(value, tuple | list) and value and not hasattr(value, "loss"):
        value = value[0]
    elif isinstance(value, Mapping) and "loss" in value:
        value = value["loss"]
    value = getattr(value, "loss", value)
    if not isinstance(value, Tensor):
        raise TrimtabError(f"{name} returned {type(value).__name__}: a loss is a scalar tensor, alone or first")
    if value.numel() != 1:
        raise TrimtabError(f"{name} returned a tensor of shape {tuple(value.shape)}: reduce it to a scalar")
    if value.dtype != torch.float64:
        raise TrimtabError(
            f"{name} computes in {str(value.dtype).removeprefix('torch.')}, and is probed in float64: keep the dtype "
            "of its inputs"
        )
    return value.reshape(())
