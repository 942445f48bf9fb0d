"""A Trimtab objective as the actor loss of AReaL. Checked against AReaL 1.0.4 (4aef98d8).

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

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trimtab.adapters.hooks import build, evaluate, peer_module, per_response
from trimtab.adapters.loss_settings import AREAL, chosen, refuse
from trimtab.adapters.monitoring import MonitorChoice, observations
from trimtab.corrections import Band, Divergence
from trimtab.errors import TrimtabError
from trimtab.objectives import Objective

MODULE, FUNCTION = "areal.trainer.ppo.actor", "grpo_loss_fn"


def install(objective: str | Objective, *, monitor: MonitorChoice = None, **keywords: Any) -> None:
    """Replaces AReaL's loss in this process, which must be one that trains.

    monitor: True, or a folder for the files of each process: the alarms of `trimtab.Monitor`.
    Raises `TrimtabError` in the script that starts the training: unless AREAL_SPMD_MODE is set, AReaL trains in
    processes that the script starts, and AReaL's own loss would train there.
    """
    loss = actor_loss(objective, monitor=monitor, **keywords)
    module = peer_module("AReaL", MODULE)
    if not hasattr(module, FUNCTION):
        raise TrimtabError(f"this version of AReaL has no {MODULE}.{FUNCTION}: use 1.0.4")
    controls = peer_module("AReaL", "areal.utils.environ").is_single_controller()
    # AReaL gives each process that trains its rank before it makes the engine there.
    if controls and "WORLD_SIZE" not in os.environ:
        raise TrimtabError(
            "this process only starts those that train, so that install has no effect here: call it in the "
            "constructor of an actor (docs/adapters.md)"
        )
    setattr(module, FUNCTION, loss)


def actor_loss(objective: str | Objective, *, monitor: MonitorChoice = None, **keywords: Any) -> Callable[..., Tensor]:
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

        def rows(values: Tensor) -> Tensor:
            """Returns (batch, time): each sequence of a packed row is a row."""
            return values if borders is None else pad_sequence(list(torch.split(values, borders)), batch_first=True)

        mask, age = rows(input_data["loss_mask"]).bool(), None
        versions = input_data.get("versions")
        if "age" in built.needs or (monitor and versions is not None):
            if versions is None or current_version is None:
                raise TrimtabError(f"{built.name} reads the age of tokens, and AReaL passes no versions here")
            # AReaL moves log-probs and mask one position back, but not versions.
            sampled = rows(versions.long().roll(-1, dims=-1))
            if bool((sampled[mask] < 0).any()):
                raise TrimtabError(f"trained tokens have no version, which {built.name} or monitor reads")
            age = (current_version - sampled + 1).clamp(min=1)
        return evaluate(
            built,
            mask,
            _advantage(built, rows(input_data["advantages"]), mask),
            current=rows(logprobs),
            behavior=rows(input_data["logprobs"]),
            proximal=None if proximal is None else rows(proximal),
            age=age,
            monitor=observations(monitor),
            step=None if current_version is None else current_version + 1,  # AReaL counts an update at its end.
        )[0]

    return loss


def _check_policies(objective: Objective, data: Mapping[str, Any], decoupled: bool, monitor: bool) -> None:
    if ("behavior" in objective.needs or monitor) and not decoupled:
        reader = objective.name if "behavior" in objective.needs else "monitor"
        raise TrimtabError(
            f"{reader} reads the sampler's log-probs, and AReaL passes one policy for both of them: set "
            "actor.use_decoupled_loss=true"
        )
    if "proximal" in objective.needs and data.get("prox_logp") is None:
        raise TrimtabError(
            f"{objective.name} reads the log-probs at the start of the update, and AReaL computes none: set "
            "actor.prox_logp_method=recompute"
        )
    if data.get("teacher_logp") is not None:
        raise TrimtabError("distillation from a teacher is a term of AReaL's own loss, which is replaced: turn it off")


def _advantage(objective: Objective, advantage: Tensor, mask: Tensor) -> Tensor:
    try:
        return per_response(objective, advantage, mask)
    except TrimtabError as error:
        raise TrimtabError(f"{error}: set actor.kl_ctl=0 (AReaL's default, 0.1, adds KL to each token)") from None


def _borders(objective: Objective, logprobs: Tensor, cumulative: Tensor | None) -> list[int] | None:
    """Returns the length of each sequence of a packed row; None for padded rows."""
    if logprobs.ndim != 1:
        return None
    if cumulative is not None:
        return cumulative.diff().tolist()
    if not _reads_tokens_only(objective):
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
