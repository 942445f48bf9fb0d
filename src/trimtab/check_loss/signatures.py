"""Calls a loss function of any trainer with a batch, by the names of its parameters (signatures.toml).

    ours, verl's and most others'   tensors and the counts of the update, by name
    slime's and Miles' custom loss  (args, batch, logits, sum_of_sample_mean)
    prime-rl's custom loss          (inputs), one response at a time
    a method of a TRL trainer       (self, model, inputs)

What a function computes outside of its parameters (advantages, weights that the trainer passes) is not judged.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import inspect
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from trimtab.check_loss.probes import Batch, Loss, Update, of_lengths
from trimtab.errors import TrimtabError, did_you_mean

Call = Callable[[Batch, Update], Any]
TABLES = tomllib.loads((importlib.resources.files("trimtab.check_loss") / "signatures.toml").read_text("utf-8"))
TENSORS, COUNTS = (TABLES[table] for table in ("tensors", "counts"))
FIELDS: dict[str, list[str]] = TENSORS | COUNTS
GIVEN = {"loss_agg_mode": "token-mean", "rollout_is_weights": None}
"""Values for the parameters of verl's losses that have no default."""


def of_function(function: Callable[..., Any], arguments: Mapping[str, Any] | None = None, name: str = "") -> Loss:
    """Returns a function as a loss. It may also be a class that is built without arguments, or a module.

    arguments: field or count -> the parameter that takes it; parameter -> its value; "config.key", "args.key" or a key
        of TRL's configuration -> the value in that object.
    Raises `TrimtabError` if a parameter has no known meaning, and if the function cannot be called.
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


def _call(function: Callable[..., Any], given: dict[str, Any]) -> tuple[Call, str]:
    """Returns how a function is called: as code, and in words."""
    names = list(inspect.signature(function).parameters)
    if names[:1] == ["self"]:
        return _trl(function, given), "log-probs on a stand-in of its TRL trainer"
    if {"args", "batch", "logits", "sum_of_sample_mean"} <= set(names):
        return _slime(function, _of_object("args", given)), "a batch of slime or Miles"
    if "inputs" in names and not set(names) & {"current", *TENSORS["current"]}:
        return _prime_rl(function, given), "the inputs of prime-rl"
    return _by_names(function, given)


def _of_object(key: str, given: dict[str, Any]) -> dict[str, Any]:
    """Removes arguments that are named `key.NAME`, and returns them by NAME."""
    names = [name for name in given if name.startswith(f"{key}.")]
    return {name.removeprefix(f"{key}."): given.pop(name) for name in names}


def _by_names(function: Callable[..., Any], given: dict[str, Any]) -> tuple[Call, str]:
    config = _of_object("config", given)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    signature = inspect.signature(function).parameters
    parameters = {name: parameter for name, parameter in signature.items() if parameter.kind not in several}
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
            own["config"] = _verl_config(config, update)
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
    """Returns the fields and counts that parameters take, and the values of the other parameters.

    Raises `TrimtabError` if a parameter has neither a default nor a known meaning, or an argument names no parameter.
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
    """Returns a dtype of the mask and a shape of the advantages with which the function can be called.

    A wrong shape may broadcast. So a form is preferred in which no response depends on the advantages of others.
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
    """Returns the scalar loss in what a function returned: the value, the first of several, or its `loss`."""
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


class _Config(SimpleNamespace):
    """A configuration with values as attributes, and with `get`."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def _verl_config(given: Mapping[str, Any], update: Update) -> Any:
    """Returns verl's configuration of an actor with these values and, as verl sets them, the counts of the update."""
    counts = {"dp_size": 1, "batch_num_tokens": update.tokens, "global_batch_size": update.responses}
    counts |= {"loss_scale_factor": None}
    if "verl" not in sys.modules:
        return _Config(**{**TABLES["verl"], "global_batch_info": counts, "policy_loss": _Config(), **given})
    actor = importlib.import_module("verl.workers.config.actor")
    inner = {name.partition(".")[2]: value for name, value in given.items() if name.startswith("policy_loss.")}
    own = {name: value for name, value in given.items() if not name.startswith("policy_loss.")}
    if inner:
        own["policy_loss"] = actor.PolicyLossConfig(**inner)
    config = actor.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, optim=None, **own)
    config.global_batch_info.update(counts)
    return config


def _prime_rl(function: Callable[..., Any], given: Mapping[str, Any]) -> Call:
    """Returns a call for each response, whose sum is divided by the trained tokens of the update, as in prime-rl."""

    def call(batch: Batch, update: Update) -> Tensor:
        total = batch["current"].new_zeros(())
        for row, mask in enumerate(batch["mask"]):
            inputs = SimpleNamespace(
                trainer_logprobs=batch["current"][row],
                inference_logprobs=batch["behavior"][row],
                ref_logprobs=batch["reference"][row],
                teacher_logprobs=None,
                advantages=batch["advantage"][row].expand_as(mask),
                loss_mask=mask,
                loss_weights=None,
            )
            value = function(inputs, **given)
            total = total + getattr(value, "loss", value)
        return total / update.tokens

    return call


def _slime(function: Callable[..., Any], given: Mapping[str, Any]) -> Call:
    """Returns a call with flat logits of two ids, divided by the count of the update, as in slime and Miles.

    The first id has the log-prob of the batch: log_softmax returns it, with its gradient.
    """
    args = SimpleNamespace(**{**TABLES["slime"], "eps_clip_c": None, **given})

    def call(batch: Batch, update: Update) -> Tensor:
        mask = batch["mask"]
        rows, width = mask.shape
        padded = torch.nn.functional.pad(batch["current"], (0, 1), value=-0.5)  # logits of an id predict the next one
        logits = torch.stack([padded, torch.log(-torch.expm1(padded))], -1).flatten(0, 1)[None]
        given_batch = {
            "log_probs": list(batch["proximal"]),
            "rollout_log_probs": list(batch["behavior"]),
            "ref_log_probs": list(batch["reference"]),
            "advantages": list(batch["advantage"].expand_as(mask).clone()),
            "loss_masks": list(mask.double()),
            "response_lengths": [width] * rows,
            "total_lengths": [width + 1] * rows,
            "unconcat_tokens": [torch.zeros(width + 1, dtype=torch.long)] * rows,
        }

        def sum_of_sample_mean(values: Tensor) -> Tensor:
            sums = torch.where(mask, values.reshape(mask.shape), 0.0).sum(1)
            return (sums if args.calculate_per_token_loss else sums / mask.sum(1).clamp(min=1)).sum()

        value = function(args, given_batch, logits, sum_of_sample_mean)
        value = value[0] if isinstance(value, tuple) else value
        return value / (update.tokens if args.calculate_per_token_loss else update.responses)

    return call


def _trl(method: Callable[..., Any], given: dict[str, Any]) -> Call:
    """Returns a call of a TRL trainer's method, on a stand-in with what a loss reads: TRL's defaults and `given`."""
    trainer, settings = _trl_class(method)
    known = {item.name: item.default for item in dataclasses.fields(settings)}
    for name in given:
        if name not in known:
            raise TrimtabError(f"--arguments {name}: {settings.__name__} has no such value{did_you_mean(name, known)}")
    config = {**known, **given}
    source = inspect.getsource(method)
    takes_columns = "advantages.dim() == 1" in source  # as TRL's newer losses
    divides = "current_gradient_accumulation_steps" in source  # the older ones leave it to the Trainer

    def call(batch: Batch, update: Update) -> Tensor:
        own = object.__new__(trainer)
        vars(own).update(_trl_attributes(config, batch, update))
        mask, proximal = batch["mask"].double(), batch["proximal"].detach()
        inputs = {
            "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
            "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
            "completion_mask": mask,
            "advantages": batch["advantage"] if takes_columns else batch["advantage"][:, 0],
            "old_per_token_logps": proximal,
            "old_logps": (proximal * mask).sum(1),
            "ref_per_token_logps": batch["reference"],
            "num_items_in_batch": update.tokens.double(),
        }
        if config.get("off_policy_mask_threshold") is not None:
            inputs["sampling_per_token_logps"] = batch["behavior"].detach()
        value = method(own, own.model, inputs)
        return value if divides else value / update.parts

    return call


def _trl_class(method: Callable[..., Any]) -> tuple[Any, Any]:
    """Returns the class of a method's trainer and the class of its configuration: GRPOTrainer and GRPOConfig."""
    trainer = getattr(sys.modules[method.__module__], method.__qualname__.partition(".")[0], None)
    for kind in trainer.__mro__ if isinstance(trainer, type) else ():
        if kind.__module__.partition(".")[0] == "trl" and kind.__name__.endswith("Trainer"):
            name = kind.__name__.removesuffix("Trainer") + "Config"
            places = [sys.modules[kind.__module__], importlib.import_module("trl")]
            return trainer, next(getattr(place, name) for place in places if hasattr(place, name))
    raise TrimtabError(f"{method.__qualname__} is not a method of a TRL trainer: name a function of its tensors")


def _trl_attributes(config: Mapping[str, Any], batch: Batch, update: Update) -> dict[str, Any]:
    """Returns the attributes that `__init__` of a trainer sets and `_compute_loss` reads."""
    high, one_rank = config.get("epsilon_high"), {"gather": lambda x: x, "reduce": lambda x, **_: x}
    return {
        **config,
        **TABLES["trl"],
        "args": SimpleNamespace(**{**config, "steps_per_generation": update.parts}),
        "accelerator": SimpleNamespace(num_processes=1, sync_gradients=True, **one_rank),
        "model": SimpleNamespace(training=True),
        "epsilon_low": config["epsilon"],
        "epsilon_high": config["epsilon"] if high is None else high,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (batch["current"], batch["entropy"], None),
        "current_gradient_accumulation_steps": update.parts,
        "max_completion_length": config.get("max_completion_length") or 1024,
        "_entropy_bonus_enabled": config.get("entropy_coef", 0.0) != 0,
        "_metrics": {"train": defaultdict(list)},
    }
