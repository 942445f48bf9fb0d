"""A Trimtab objective as AReaL's actor loss, or a monitor beside AReaL's own loss. Checked against 1.0.4 (4aef98d8).

AReaL has no registry of losses, and it trains in other processes. It passes them the name of its actor class, so a
subclass in a module beside the training script installs the loss there:

    from areal.engine import FSDPPPOActor
    from trimtab.adapters.areal import install

    class Actor(FSDPPPOActor):
        def __init__(self, config):
            install("a3po")  # in the process that trains
            super().__init__(config)

The script sets `areal.engine.FSDPPPOActor = Actor` before it builds the trainer.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trimtab.adapters.hooks import build, hook, peer_module
from trimtab.adapters.loss_settings import refuse_chosen
from trimtab.adapters.micro_batch import evaluate, per_response, record
from trimtab.adapters.recording import MonitorChoice
from trimtab.errors import TrimtabError
from trimtab.objectives import Objective, PolicyLogps

MODULE, FUNCTION = "areal.trainer.ppo.actor", "grpo_loss_fn"


def install(objective: str | Objective | None = None, *, monitor: MonitorChoice = None, **keywords: Any) -> None:
    """Replaces AReaL's loss in this process, which must be one that trains.

    Without an objective, the loss stays AReaL's own, bit for bit. monitor: True for the alarms of `trimtab.Monitor`, or
    a folder into which each process also writes its files. Raises `TrimtabError` in the script that starts the
    training: unless AREAL_SPMD_MODE is set, AReaL trains in other processes, which would keep AReaL's own loss.
    """
    module = peer_module("AReaL", MODULE)
    if not hasattr(module, FUNCTION):
        raise TrimtabError(f"this version of AReaL has no {MODULE}.{FUNCTION}: use 1.0.4")
    if objective is None and not keywords:
        loss = recorded_loss(getattr(module, FUNCTION), monitor=monitor)
    else:
        loss = actor_loss(objective, monitor=monitor, **keywords)
    controls = peer_module("AReaL", "areal.utils.environ").is_single_controller()
    # AReaL sets the rank of each training process before it creates the engine there.
    if controls and "WORLD_SIZE" not in os.environ:
        raise TrimtabError(
            "this process only starts those that train, so that install has no effect here: call it in the "
            "constructor of an actor (docs/reference-adapters.md)"
        )
    setattr(module, FUNCTION, loss)


def recorded_loss(own: Callable[..., Tensor], *, monitor: MonitorChoice = None) -> Callable[..., Tensor]:
    """Returns AReaL's own `grpo_loss_fn`, wrapped so that a monitor sees its log-probs."""

    @functools.wraps(own)
    def loss(logprobs: Tensor, entropy: Tensor, input_data: Mapping[str, Any], *rest: Any, **options: Any) -> Tensor:
        if monitor:
            if not options.get("use_decoupled_loss", False):
                raise hook("areal").absent("monitor", "behavior")
            version = options.get("current_version")
            logps, advantage = _read("monitor", logprobs.detach(), input_data, version)
            record(logps, advantage, monitor=monitor, step=version)
        return own(logprobs, entropy, input_data, *rest, **options)

    return loss


def actor_loss(
    objective: str | Objective | None, *, monitor: MonitorChoice = None, **keywords: Any
) -> Callable[..., Tensor]:
    """Returns a loss with the signature of AReaL's `grpo_loss_fn`.

    AReaL weights each micro-batch by its number of tokens, so the loss is the mean over the tokens of a micro-batch.
    Raises `TrimtabError` for settings that only AReaL's own loss reads (`eps_clip`, ...), and if AReaL does not pass
    what the objective reads.
    """
    built = build("areal", objective, keywords)

    def loss(
        logprobs: Tensor,
        entropy: Tensor,  # noqa: ARG001 - of AReaL's signature
        input_data: Mapping[str, Any],
        *_: Any,
        current_version: int | None = None,
        use_decoupled_loss: bool = False,
        **settings: Any,
    ) -> Tensor:
        refuse_chosen("AReaL", "AREAL", settings, "In install")
        _check_policies(built, input_data, use_decoupled_loss, bool(monitor))
        if logprobs.ndim == 1 and input_data.get("cu_seqlens") is None:
            raise TrimtabError(
                "AReaL passes no borders of sequences (cu_seqlens): set actor.enable_tree_training=false"
            )
        reader = built.name if "age" in built.needs else "monitor" if monitor else ""
        logps, advantage = _read(reader, logprobs, input_data, current_version)
        if "age" in built.needs and logps.age is None:
            raise TrimtabError(f"{built.name} reads the age of tokens, and AReaL passes no versions here")
        try:
            advantage = per_response(built, advantage, logps.mask)
        except TrimtabError as error:
            raise TrimtabError(f"{error}: set actor.kl_ctl=0 (AReaL's default, 0.1, adds KL to each token)") from None
        return evaluate(built, logps, advantage, monitor=monitor, step=current_version)[0]

    return loss


def _read(reader: str, current: Tensor, data: Mapping[str, Any], version: int | None) -> tuple[PolicyLogps, Tensor]:
    """Returns the log-probs and the advantages of a batch; a packed row is split into one row per sequence.

    reader: name of the objective or monitor that reads the age of each token's policy, or empty. Without versions from
    AReaL, the age is None.
    """
    cumulative = data.get("cu_seqlens")
    borders = [len(current)] if cumulative is None else cumulative.diff().tolist()

    def rows(values: Tensor) -> Tensor:
        return pad_sequence(list(torch.split(values, borders)), batch_first=True) if values.ndim == 1 else values

    mask, age, versions = rows(data["loss_mask"]).bool(), None, data.get("versions")
    if reader and versions is not None and version is not None:
        # AReaL shifts log-probs and mask one position to the left, but not versions.
        sampled = rows(versions.long().roll(-1, dims=-1))
        if bool((sampled[mask] < 0).any()):
            raise TrimtabError(f"trained tokens have no version: train without {reader}, which reads it")
        age = (version - sampled + 1).clamp(min=1)
    proximal = data.get("prox_logp")
    proximal = None if proximal is None else rows(proximal)
    logps = PolicyLogps(rows(current), rows(data["logprobs"]), mask, proximal=proximal, age=age)
    return logps, rows(data["advantages"])


def _check_policies(objective: Objective, data: Mapping[str, Any], decoupled: bool, monitor: bool) -> None:
    if not decoupled and ("behavior" in objective.needs or monitor):
        raise hook("areal").absent(objective.name if "behavior" in objective.needs else "monitor", "behavior")
    if "proximal" in objective.needs and data.get("prox_logp") is None:
        raise hook("areal").absent(objective.name, "proximal")
    if data.get("teacher_logp") is not None:
        raise TrimtabError("distillation from a teacher is a term of AReaL's own loss, which is replaced: turn it off")
