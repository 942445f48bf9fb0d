"""A Trimtab objective, or prime-rl's own loss with a monitor, as a custom loss. Checked against prime-rl 559b4477.

[trainer.loss]
type = "custom"
import_path = "trimtab.adapters.prime_rl.loss"

[trainer.loss.kwargs]
objective = "icepop"
aggregation = "token-mean"

Without `objective`, the loss is prime-rl's own. `type` and other keywords are those of prime-rl's configuration:

[trainer.loss.kwargs]
monitor = "out/monitor"
type = "default"
dppo_mask_high = 0.3
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.adapters.hooks import build, peer_module
from trimtab.adapters.micro_batch import averaged, evaluate, record
from trimtab.adapters.recording import MonitorChoice
from trimtab.errors import TrimtabError
from trimtab.objectives import Objective, PolicyLogps


class LossOutputs(NamedTuple):
    """The loss of one sequence and its metrics, as prime-rl reads them."""

    loss: Tensor
    metrics: dict[str, Tensor]


def loss(inputs: Any, *, objective: str | None = None, monitor: MonitorChoice = None, **keywords: Any) -> LossOutputs:
    """Returns the sum of the loss over one sequence, which prime-rl divides by the number of trained tokens.

    inputs: prime-rl's `LossInputs` of a sequence, tensors of (time,). monitor: true for the scalars and alarms of
    `trimtab.Monitor`, or a folder into which each process also writes its files. objective, keywords: as for
    `trimtab.objective`; the aggregation must be token-mean. Without an objective, the result is prime-rl's own loss,
    and the keywords are those of `trainer.loss`. A batch of prime-rl is one update, so the policy at its start is the
    current one. Raises `TrimtabError` for an objective that needs the whole update, and for token weights other than 1.
    """
    if objective is None:
        return _own_loss(inputs, monitor, keywords)
    if not isinstance(objective, str):
        raise TrimtabError(f"trainer.loss.kwargs.objective = {objective!r}: give the name of an objective")
    built = _built(objective, json.dumps(keywords))
    weights = inputs.loss_weights
    if weights is not None and not bool((weights[inputs.loss_mask] == 1).all()):
        raise TrimtabError("prime-rl's rl_weights other than 1 have no meaning in this loss: leave them out")
    current, reference = inputs.trainer_logprobs[None], inputs.ref_logprobs
    logps = PolicyLogps(
        current,
        inputs.inference_logprobs[None],
        inputs.loss_mask[None],
        proximal=current.detach(),
        reference=None if reference is None else reference[None],
    )
    value, metrics, _ = evaluate(built, logps, inputs.advantages[None], counts=(1, 1), monitor=monitor)
    return LossOutputs(value, _tensors(metrics))


def _own_loss(inputs: Any, monitor: MonitorChoice, keywords: dict[str, Any]) -> LossOutputs:
    current = inputs.trainer_logprobs[None].detach()
    logps = PolicyLogps(current, inputs.inference_logprobs[None], inputs.loss_mask[None], proximal=current)
    observed = record(logps, inputs.advantages[None], monitor=monitor)
    own = _own(json.dumps(keywords))(inputs)
    return LossOutputs(own.loss, own.metrics | _tensors(observed))


def _tensors(metrics: Mapping[str, float]) -> dict[str, Tensor]:
    return {key: torch.tensor(number) for key, number in averaged(metrics).items()}


@cache
def _own(keywords: str) -> Callable[[Any], Any]:
    """Returns prime-rl's own loss, as its trainer builds it from the section `trainer.loss`."""
    configs = peer_module("prime-rl", "prime_rl.configs.trainer")
    options = json.loads(keywords)
    kinds = {"default": configs.DefaultLossConfig, "ipo": configs.IPOLossConfig}
    kind = options.pop("type", "default")
    if kind not in kinds:
        raise TrimtabError(f"trainer.loss.kwargs.type = {kind!r}: prime-rl's own losses are {' and '.join(kinds)}")
    return peer_module("prime-rl", "prime_rl.trainer.rl.loss").setup_rl_loss_fn(kinds[kind](**options))


@cache
def _built(objective: str, keywords: str) -> Objective:
    """Returns the objective. keywords: as JSON, because lists and tables of TOML cannot be keys of a cache."""
    return build("prime-rl", objective, json.loads(keywords))
