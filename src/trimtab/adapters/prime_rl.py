"""A Trimtab objective as the custom loss of prime-rl. Checked against prime-rl 559b4477.

[trainer.loss]
type = "custom"
import_path = "trimtab.adapters.prime_rl.loss"

[trainer.loss.kwargs]
objective = "icepop"
aggregation = "token-mean"
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trimtab.adapters.hooks import averaged, build, counted_state, evaluate
from trimtab.adapters.monitoring import MonitorChoice, observations
from trimtab.errors import TrimtabError
from trimtab.objectives import Objective


class LossInputs(Protocol):
    """The fields of prime-rl's `LossInputs` that are read: one sequence, tensors of (time,)."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None


class LossOutputs(NamedTuple):
    """The loss of one sequence and its metrics, as prime-rl reads them."""

    loss: Tensor
    metrics: dict[str, Tensor]


def loss(inputs: LossInputs, *, objective: str = "ipo", monitor: MonitorChoice = None, **keywords: Any) -> LossOutputs:
    """Returns the sum of the loss over one sequence, which prime-rl divides by the number of trained tokens.

    monitor: true, or a folder for the files of each process: scalars and alarms of `trimtab.Monitor`. objective,
    keywords: as for `trimtab.objective`; the aggregation must be token-mean. A batch of prime-rl is one
    update, so that the policy at its start is the current one. Raises `TrimtabError` for an objective that needs the
    whole update, and for token weights other than 1.
    """
    if not isinstance(objective, str):
        raise TrimtabError(f"trainer.loss.kwargs.objective = {objective!r}: give the name of an objective")
    built = _built(objective, json.dumps(keywords))
    mask = inputs.loss_mask[None]
    weights = inputs.loss_weights
    if weights is not None and not bool((weights[None][mask] == 1).all()):
        raise TrimtabError("prime-rl's rl_weights other than 1 have no meaning in this loss: leave them out")
    current = inputs.trainer_logprobs[None]
    value, metrics, _ = evaluate(
        built,
        mask,
        inputs.advantages[None],
        current=current,
        behavior=inputs.inference_logprobs[None],
        proximal=current.detach(),
        reference=None if inputs.ref_logprobs is None else inputs.ref_logprobs[None],
        state=counted_state(1, 1, like=current),
        monitor=observations(monitor),
    )
    return LossOutputs(value, {key: torch.tensor(number) for key, number in averaged(metrics).items()})


@cache
def _built(objective: str, keywords: str) -> Objective:
    """Returns the objective of JSON keywords: TOML has lists and tables, which cannot be keys of a cache."""
    return build("prime-rl", objective, json.loads(keywords))
