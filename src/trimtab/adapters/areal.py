"""A Trimtab objective as the actor loss of AReaL, or a monitor beside its own. Checked against 1.0.4 (4aef98d8).

AReaL has no registry of losses, and its trainer starts other processes. It names the class of its actor to them,
so that a subclass in a module beside the training script brings the loss there:

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
from trimtab.adapters.loss_settings import AREAL, chosen, refuse
from trimtab.adapters.micro_batch import evaluate, per_response, record
from trimtab.adapters.monitoring import MonitorChoice, observations
from trimtab.corrections import Band, Divergence
from trimtab.errors import TrimtabError
from trimtab.objectives import Objective, PolicyLogps

MODULE, FUNCTION = "areal.trainer.ppo.actor", "grpo_loss_fn"


def install(objective: str | Objective | None = None, *, monitor: MonitorChoice = None, **keywords: Any) -> None:
    """Replaces AReaL's loss in this process, which must be one that trains.

    Without an objective the loss is AReaL's own, bit for bit. monitor: True, or a folder for the files of each process:
    the alarms of `trimtab.Monitor`.
    Raises `TrimtabError` in the script that starts the training: unless AREAL_SPMD_MODE is set, AReaL trains in
    processes that the script starts, and AReaL's own loss would train there.
    """
    module = peer_module("AReaL", MODULE)
    if not hasattr(module, FUNCTION):
        raise TrimtabError(f"this version of AReaL has no {MODULE}.{FUNCTION}: use 1.0.4")
    if objective is None and not keywords:
        loss = recorded_loss(getattr(module, FUNCTION), monitor=monitor)
    else:
        loss = actor_loss(objective, monitor=monitor, **keywords)
    controls = peer_module("AReaL", "areal.utils.environ").is_single_controller()
    # AReaL gives each process that trains its rank before it makes the engine there.
    if controls and "WORLD_SIZE" not in os.environ:
        raise TrimtabError(
            "this process only starts those that train, so that install has no effect here: call it in the "
            "constructor of an actor (docs/adapters.md)"
        )
    setattr(module, FUNCTION, loss)


def recorded_loss(own: Callable[..., Tensor], *, monitor: MonitorChoice = None) -> Callable[..., Tensor]:
    """Returns AReaL's own `grpo_loss_fn`, which shows its log-probs to a monitor."""

    @functools.wraps(own)
    def loss(logprobs: Tensor, entropy: Tensor, input_data: Mapping[str, Any], *rest: Any, **options: Any) -> Tensor:
        if monitor:
            if not options.get("use_decoupled_loss", False):
                raise hook("areal").absent("monitor", "behavior")
            borders, version = _borders(None, logprobs, input_data.get("cu_seqlens")), options.get("current_version")
            mask, proximal = _rows(input_data["loss_mask"], borders).bool(), input_data.get("prox_logp")
            logps = PolicyLogps(
                _rows(logprobs.detach(), borders),
                _rows(input_data["logprobs"], borders),
                mask,
                proximal=None if proximal is None else _rows(proximal, borders),
                age=_age("monitor", input_data, mask, borders, version),
            )
            record(logps, _rows(input_data["advantages"], borders), monitor=observations(monitor), step=version)
        return own(logprobs, entropy, input_data, *rest, **options)

    return loss


def actor_loss(
    objective: str | Objective | None, *, monitor: MonitorChoice = None, **keywords: Any
) -> Callable[..., Tensor]:
    """Returns a loss with the signature of AReaL's `grpo_loss_fn`.

    AReaL weighs micro-batches by their tokens, so that the loss is a mean over the tokens of one. Raises `TrimtabError`
    for settings that only AReaL's own loss reads (`eps_clip`, ...), and where AReaL does not pass what the objective
    reads.
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
        refuse("AReaL", AREAL, chosen(AREAL, settings), "In install")
        proximal = input_data.get("prox_logp")
        _check_policies(built, input_data, use_decoupled_loss, bool(monitor))
        borders = _borders(built, logprobs, input_data.get("cu_seqlens"))
        mask, age = _rows(input_data["loss_mask"], borders).bool(), None
        if "age" in built.needs or monitor:
            age = _age(built.name, input_data, mask, borders, current_version)
        if "age" in built.needs and age is None:
            raise TrimtabError(f"{built.name} reads the age of tokens, and AReaL passes no versions here")
        return evaluate(
            built,
            mask,
            _advantage(built, _rows(input_data["advantages"], borders), mask),
            current=_rows(logprobs, borders),
            behavior=_rows(input_data["logprobs"], borders),
            proximal=None if proximal is None else _rows(proximal, borders),
            age=age,
            monitor=observations(monitor),
            step=current_version,
        )[0]

    return loss


def _rows(values: Tensor, borders: list[int] | None) -> Tensor:
    """Returns (batch, time): each sequence of a packed row is a row."""
    return values if borders is None else pad_sequence(list(torch.split(values, borders)), batch_first=True)


def _age(
    reader: str, data: Mapping[str, Any], mask: Tensor, borders: list[int] | None, current_version: int | None
) -> Tensor | None:
    """Returns (batch, time) the age of the policy of each token, from 1; None where AReaL passes no versions."""
    versions = data.get("versions")
    if versions is None or current_version is None:
        return None
    # AReaL moves log-probs and mask one position back, but not versions.
    sampled = _rows(versions.long().roll(-1, dims=-1), borders)
    if bool((sampled[mask] < 0).any()):
        raise TrimtabError(f"trained tokens have no version: train without {reader} and monitor, which read it")
    return (current_version - sampled + 1).clamp(min=1)


def _check_policies(objective: Objective, data: Mapping[str, Any], decoupled: bool, monitor: bool) -> None:
    if not decoupled and ("behavior" in objective.needs or monitor):
        raise hook("areal").absent(objective.name if "behavior" in objective.needs else "monitor", "behavior")
    if "proximal" in objective.needs and data.get("prox_logp") is None:
        raise hook("areal").absent(objective.name, "proximal")
    if data.get("teacher_logp") is not None:
        raise TrimtabError("distillation from a teacher is a term of AReaL's own loss, which is replaced: turn it off")


def _advantage(objective: Objective, advantage: Tensor, mask: Tensor) -> Tensor:
    try:
        return per_response(objective, advantage, mask)
    except TrimtabError as error:
        raise TrimtabError(f"{error}: set actor.kl_ctl=0 (AReaL's default, 0.1, adds KL to each token)") from None


def _borders(objective: Objective | None, logprobs: Tensor, cumulative: Tensor | None) -> list[int] | None:
    """Returns the length of each sequence of a packed row; None for padded rows."""
    if logprobs.ndim != 1:
        return None
    if cumulative is not None:
        return cumulative.diff().tolist()
    if objective is not None and not _reads_tokens_only(objective):
        raise TrimtabError(
            f"{objective.name} reads whole sequences, and AReaL passes no borders of sequences (cu_seqlens): set "
            "actor.enable_tree_training=false"
        )
    return [len(logprobs)]


def _reads_tokens_only(objective: Objective) -> bool:
    """Returns whether the loss of a token is the same in whichever sequence it stands."""
    return (
        objective.ratio.level == "token"
        and (objective.weight is None or objective.weight.level == "token")
        and not objective.surrogate.per_response
        and all(
            (isinstance(rule, Band) and rule.level == "token")
            or (isinstance(rule, Divergence) and rule.reduce == "token")
            for rule in objective.masks
        )
    )
