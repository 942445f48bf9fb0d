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
        **__: Any,
    ) -> Tensor:
        row = {name: _row(input_data[name], logprobs) for name in ("logprobs", "advantages", "loss_mask")}
        mask = row["loss_mask"].bool()
        proximal, versions = input_data.get("prox_logp"), input_data.get("versions")
        age = None
        if "age" in built.needs:
            if versions is None or current_version is None:
                raise TrimtabError(f"{built.name} reads the age of tokens, and AReaL passes no versions here")
            age = (current_version - _row(versions, logprobs).long() + 1).clamp(min=1)
        current = _row(logprobs, logprobs)
        logps = PolicyLogps(
            current=current,
            behavior=row["logprobs"],
            mask=mask,
            proximal=current.detach() if proximal is None else _row(proximal, logprobs),
            sequence_ids=_sequence_ids(input_data.get("cu_seqlens"), logprobs),
            turn=turns_of(mask) if "turn" in built.needs else None,
            age=age,
        )
        return built(logps, row["advantages"]).loss

    return loss


def _row(values: Tensor, like: Tensor) -> Tensor:
    """Returns (batch, time): packed sequences are one row."""
    return values[None] if like.ndim == 1 else values


def _sequence_ids(borders: Tensor | None, like: Tensor) -> Tensor | None:
    """Returns (1, time) the number of the sequence of each token of a packed row."""
    if like.ndim != 1 or borders is None:
        return None
    positions = torch.arange(like.shape[0], device=like.device)
    return (torch.bucketize(positions, borders.to(positions), right=True) - 1)[None]
