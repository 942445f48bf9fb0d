"""A Trimtab objective as the actor loss of AReaL. Checked against AReaL 1.0.4 (4aef98d8).

import trimtab.adapters.areal
trimtab.adapters.areal.install("a3po")     # in the script that starts the trainer, before it is built
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.adapters.hooks import build, turns_of
from trimtab.errors import TrimtabError
from trimtab.objectives import Objective, PolicyLogps

MODULE, FUNCTION = "areal.trainer.ppo.actor", "grpo_loss_fn"


def install(objective: str | Objective, **keywords: Any) -> None:
    """Replaces AReaL's loss in this process; where workers train, call it in each of them. AReaL has no registry."""
    module = importlib.import_module(MODULE)
    if not hasattr(module, FUNCTION):
        raise TrimtabError(f"this version of AReaL has no {MODULE}.{FUNCTION}: use 1.0.4")
    setattr(module, FUNCTION, actor_loss(objective, **keywords))


def actor_loss(objective: str | Objective, **keywords: Any) -> Callable[..., Tensor]:
    """Returns a loss with the signature of AReaL's `grpo_loss_fn`.

    AReaL weighs micro-batches by their tokens, so that the loss is a mean over the tokens of one. Settings of its own
    loss (clip bounds and others) are ignored: they belong to the objective.
    """
    built = build("areal", objective, keywords)

    def loss(
        logprobs: Tensor,
        entropy: Tensor,  # noqa: ARG001 - of AReaL's signature
        input_data: Mapping[str, Any],
        *_: Any,
        current_version: int | None = None,
        use_decoupled_loss: bool = False,
        **__: Any,
    ) -> Tensor:
        if "behavior" in built.needs and not use_decoupled_loss:
            raise TrimtabError(
                f"{built.name} reads the sampler's log-probs, and AReaL passes one policy for both of them: set "
                "actor.use_decoupled_loss=true"
            )
        row = {name: _row(input_data[name], logprobs) for name in ("logprobs", "advantages", "loss_mask")}
        mask = row["loss_mask"].bool()
        proximal = input_data.get("prox_logp")
        if "proximal" in built.needs and proximal is None:
            raise TrimtabError(
                f"{built.name} reads the log-probs at the start of the update, and AReaL computes none: set "
                "actor.prox_logp_method=recompute"
            )
        age = None
        if "age" in built.needs:
            age = _ages(built, input_data.get("versions"), current_version, mask, like=logprobs)
        logps = PolicyLogps(
            current=_row(logprobs, logprobs),
            behavior=row["logprobs"],
            mask=mask,
            proximal=None if proximal is None else _row(proximal, logprobs),
            sequence_ids=_sequence_ids(input_data.get("cu_seqlens"), logprobs),
            turn=turns_of(mask) if "turn" in built.needs else None,
            age=age,
        )
        return built(logps, row["advantages"]).loss

    return loss


def _ages(objective: Objective, versions: Tensor | None, now: int | None, mask: Tensor, like: Tensor) -> Tensor:
    """Returns the age of each token, at least 1. AReaL moves log-probs and mask one position back, but not versions."""
    if versions is None or now is None:
        raise TrimtabError(f"{objective.name} reads the age of tokens, and AReaL passes no versions here")
    sampled = _row(versions, like).long().roll(-1, dims=-1)
    if bool((sampled[mask] < 0).any()):
        raise TrimtabError(f"{objective.name} reads the age of tokens, and trained tokens have no version")
    return (now - sampled + 1).clamp(min=1)


def _row(values: Tensor, like: Tensor) -> Tensor:
    """Returns (batch, time): packed sequences are one row."""
    return values[None] if like.ndim == 1 else values


def _sequence_ids(borders: Tensor | None, like: Tensor) -> Tensor | None:
    """Returns (1, time) the number of the sequence of each token of a packed row."""
    if like.ndim != 1 or borders is None:
        return None
    positions = torch.arange(like.shape[0], device=like.device)
    return (torch.bucketize(positions, borders.to(positions), right=True) - 1)[None]
