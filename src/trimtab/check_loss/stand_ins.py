"""What losses of other trainers read beside tensors: stand-ins of configurations, trainers and batches."""

from __future__ import annotations

import dataclasses
import importlib.resources
import inspect
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trimtab.check_loss.probes import Batch, Update
from trimtab.errors import TrimtabError, did_you_mean

Call = Callable[[Batch, Update], Any]
TABLES = tomllib.loads((importlib.resources.files("trimtab.check_loss") / "signatures.toml").read_text("utf-8"))


class _Config(SimpleNamespace):
    """A configuration whose values are attributes, with `get`."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def verl_config(given: Mapping[str, Any], update: Update) -> Any:
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


def prime_rl(function: Callable[..., Any], given: Mapping[str, Any]) -> Call:
    """Calls it for one response at a time and divides the sum by the trained tokens of the update, as prime-rl does."""

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


def slime(function: Callable[..., Any], given: Mapping[str, Any]) -> Call:
    """Calls it with flat logits of two ids, and divides by the count of the update, as slime and Miles do.

    The first id has the log-prob of the batch, so that log_softmax returns it, with its gradient.
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


def trl(method: Callable[..., Any], given: dict[str, Any]) -> Call:
    """Calls a method of a TRL trainer, of which only what a loss reads is made, with TRL's defaults and `given`."""
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
    """Returns the trainer that a method belongs to, and its configuration: GRPOTrainer and GRPOConfig."""
    trainer = getattr(sys.modules[method.__module__], method.__qualname__.partition(".")[0], None)
    for kind in trainer.__mro__ if isinstance(trainer, type) else ():
        if kind.__module__.partition(".")[0] == "trl" and kind.__name__.endswith("Trainer"):
            name = kind.__name__.removesuffix("Trainer") + "Config"
            places = [sys.modules[kind.__module__], importlib.import_module("trl")]
            return trainer, next(getattr(place, name) for place in places if hasattr(place, name))
    raise TrimtabError(f"{method.__qualname__} is not a method of a TRL trainer: name a function of its tensors")


def _trl_attributes(config: Mapping[str, Any], batch: Batch, update: Update) -> dict[str, Any]:
    """Returns what a trainer's `__init__` sets and its `_compute_loss` reads."""
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
