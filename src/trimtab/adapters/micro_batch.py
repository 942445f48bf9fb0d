"""What every hook does with a micro-batch: computes its loss and its metrics, and records its log-probs.

Trained tokens for which the sampler reported no log-prob are left out of the loss here, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from trimtab.adapters.recording import OBSERVED, Dump, MonitorChoice, Observations, observations
from trimtab.corrections.reduce import nan_below_minimum
from trimtab.corrections.statistics import Mean
from trimtab.errors import TrimtabError
from trimtab.objectives import Metrics, Objective, PolicyLogps, State

METRICS = (
    *("clip/low", "clip/high", "clip/dual", "clip/turned", "clip/weight", "kl/mean", "weight/mean", "weight/changed"),
    *("reject/tokens", "reject/sequences", "ratio/bounded", "update/kl", "unscored", "unscored_tokens", *OBSERVED),
)
"""Shares and means that keep their meaning when a trainer averages them over micro-batches."""

CERTAIN = math.log(0.99)
"""If the trainer's log-prob is at least this, a token without a sampler log-prob is left out, but not its response."""


def per_response(objective: Objective, advantage: Tensor, mask: Tensor) -> Tensor:
    """Returns the advantages as the objective reads them: (batch, 1) if it needs one per response, else unchanged.

    advantage: (batch, time). Raises `TrimtabError` if it needs one and the trained tokens of a response differ.
    """
    if not objective.one_advantage_per_response:
        return advantage
    if advantage.shape[1] == 0:
        return advantage.new_zeros(len(advantage), 1)
    lowest = torch.where(mask, advantage, math.inf).amin(1, keepdim=True)
    highest = torch.where(mask, advantage, -math.inf).amax(1, keepdim=True)
    trained = mask.any(1, keepdim=True)
    # Rounding of a scaled advantage is not a difference.
    if (trained & (highest - lowest > 1e-4 * highest.abs().clamp(min=1e-30))).any():
        raise TrimtabError(f"{objective.name} needs one advantage a response, and those of its tokens differ")
    return torch.where(trained, highest, 0.0)


def prefixed_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of an update as `trimtab/KEY`, without NaN."""
    return {f"trimtab/{key}": value for key, value in metrics.items() if not math.isnan(value)}


def averaged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics that `METRICS` lists, as `trimtab/KEY`, for a trainer that averages over micro-batches.

    A mean over nothing is 0 and not left out: trainers reduce key by key over processes, and would hang if one process
    lacked a key.
    """
    kept = {key: metrics[key] for key in METRICS if key in metrics}
    return {f"trimtab/{key}": 0.0 if math.isnan(value) else value for key, value in kept.items()}


def turns_of(mask: Tensor) -> Tensor:
    """Returns (batch, time) the index, from 0, of the latest turn at each position; 0 also before the first turn.

    Tokens between the turns of a model (observations, template) are not trained, so each run of True is a turn.
    """
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return ((mask & ~before).cumsum(1) - 1).clamp(min=0)


def missing_logps(mask: Tensor, behavior: Tensor) -> Tensor:
    """Returns (batch, time) bool: the trained tokens without a log-prob of the sampler."""
    return mask & ~torch.isfinite(nan_below_minimum(behavior))


def usable_tokens(mask: Tensor, behavior: Tensor, trainer: Tensor) -> Tensor:
    """Returns (batch, time) bool: the trained tokens whose log-prob the sampler reported, in responses that are usable.

    Some engines report no log-prob for a token they were certain of. If the trainer is certain too (`CERTAIN`), only
    the token is left out: its ratio is close to 1, and its gradient close to 0. Any other missing log-prob is an error
    of unknown size (an overflow, a token outside top-p), and the whole response is left out.
    """
    missing = missing_logps(mask, behavior)
    unusable = missing & ~(trainer.detach() >= CERTAIN)
    return mask & ~missing & ~unusable.any(1, keepdim=True)


def dropped_shares(mask: Tensor, kept: Tensor) -> Metrics:
    """Returns the shares of trained tokens, and of whole responses, that `usable_tokens` left out."""
    responses = mask.any(1)
    return Metrics(
        {"unscored": Mean.of(responses & ~kept.any(1), responses), "unscored_tokens": Mean.of(mask & ~kept, mask)}
    )


def evaluate(
    objective: Objective,
    logps: PolicyLogps,
    advantage: Tensor,
    *,
    counts: tuple[Tensor | float, Tensor | float] | None = None,
    dump: Dump | None = None,
    monitor: MonitorChoice | Observations = None,
    step: int | None = None,
) -> tuple[Tensor, dict[str, float], PolicyLogps]:
    """Returns the loss of a micro-batch, its metrics, and the log-probs as the objective read them.

    advantage: (batch, time). counts: the trainer's numbers of tokens and sequences (`counted_state`); None if the batch
    is a whole update. step: number of the update for `monitor`, if the trainer passes it. If the objective reads the
    sampler's log-probs, tokens without one are left out and counted; denominators do not change. `dump` and `monitor`
    receive all tokens. Turns are those of `turns_of`.
    """
    observed = record(logps, advantage, dump=dump, monitor=monitor, step=step)
    mask = kept = logps.mask
    if logps.behavior is not None and "behavior" in objective.needs:
        trainer = logps.current if logps.proximal is None else logps.proximal
        assert trainer is not None
        kept = usable_tokens(mask, logps.behavior, trainer)
    logps = replace(logps, mask=kept, turn=turns_of(mask))
    state = None if counts is None else counted_state(*counts, like=advantage)
    output = objective(logps, per_response(objective, advantage, mask), state=state)
    metrics = output.metrics + dropped_shares(mask, kept)
    return output.loss, metrics.finalize() | observed, logps


def record(
    logps: PolicyLogps,
    advantage: Tensor,
    *,
    dump: Dump | None = None,
    monitor: MonitorChoice | Observations = None,
    step: int | None = None,
) -> dict[str, float]:
    """Writes the log-probs of a micro-batch, shows them to a monitor, and returns its scalars; no loss is computed.

    advantage, step: as for `evaluate`. Raises `TrimtabError` if a dump or monitor would get no sampler log-probs.
    """
    watched, used = observations(monitor), "dump" if dump is not None else "monitor"
    if logps.behavior is None and (dump is not None or watched is not None):
        raise TrimtabError(
            f"{used}: this trainer passes no log-probs of the sampler: turn them on as for an objective that reads "
            f"them (docs/adapters.md), or leave {used} out"
        )
    if dump is not None:
        dump.write_call(logps, advantage)
    return {} if watched is None else watched.show(logps, step)


def counted_state(tokens: Tensor | float, sequences: Tensor | float, like: Tensor) -> State:
    """Returns the state of an update from the trainer's own counts, if nothing else is known of the update.

    tokens, sequences: numbers of trained tokens and of sequences in the whole update, the denominators of the
    aggregation. If they are 1, the loss is a sum over tokens, or a sum of the means of sequences, and the trainer must
    divide it. like: a tensor on the device of the batch.
    """
    tokens, sequences = (
        torch.as_tensor(value, dtype=torch.float64, device=like.device) for value in (tokens, sequences)
    )
    zero = torch.zeros_like(tokens)
    return State(
        tokens=tokens,
        sequences=sequences,
        sequences_trained=sequences,
        tokens_kept=tokens,
        sequences_rejected=zero,
        weight_total=zero,
        weight_count=zero,
        magnitudes=zero.new_zeros(0),
    )
