"""What the hooks do with a micro-batch: its loss, its metrics for the trainer's log, and its log-probs for a dump.

Tokens whose log-prob the sampler did not report are found and left out here, and counted.
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
"""Log-prob of the trainer from which a token that the sampler did not score is left out without its response."""


def per_response(objective: Objective, advantage: Tensor, mask: Tensor) -> Tensor:
    """Returns the advantages as the objective reads them: (batch, 1) where it judges whole responses.

    advantage: (batch, time). Raises `TrimtabError` where those of a response differ and the objective needs one.
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
    """Returns metrics of a micro-batch for a trainer that averages them: those of `METRICS`, named `trimtab/...`.

    A mean over nothing is 0, as in the trainers' own metrics: they reduce key by key over processes, and wait for ever
    where one of them has a key less.
    """
    kept = {key: metrics[key] for key in METRICS if key in metrics}
    return {f"trimtab/{key}": 0.0 if math.isnan(value) else value for key, value in kept.items()}


def turns_of(mask: Tensor) -> Tensor:
    """Returns (batch, time) the number of the run of trained tokens that each position is in or after, from 0.

    What lies between the turns of a model (observations, template) is untrained, so that runs of the mask are turns.
    """
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return ((mask & ~before).cumsum(1) - 1).clamp(min=0)


def missing_logps(mask: Tensor, behavior: Tensor) -> Tensor:
    """Returns (batch, time) bool: the trained tokens without a log-prob of the sampler."""
    return mask & ~torch.isfinite(nan_below_minimum(behavior))


def usable_tokens(mask: Tensor, behavior: Tensor, trainer: Tensor) -> Tensor:
    """Returns (batch, time) bool: the trained tokens whose log-prob the sampler reported, in responses that are usable.

    Some engines report none for a token of which they were certain. Where the trainer is too, only the token is left
    out: its ratio is close to 1, and its gradient close to 0. Any other token without a log-prob is an error of unknown
    size (an overflow, a token outside top-p): its response is left out whole.
    """
    missing = missing_logps(mask, behavior)
    unusable = missing & ~(trainer.detach() >= CERTAIN)
    return mask & ~missing & ~unusable.any(1, keepdim=True)


def dropped_shares(mask: Tensor, kept: Tensor) -> Metrics:
    """Returns the shares of trained tokens that `usable_tokens` left out, and of responses without any other token."""
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

    advantage: (batch, time). counts: the trainer's own, of tokens and sequences (`counted_state`); None where the batch
    is a whole update. Tokens whose log-prob the sampler did not report are left out and counted where the objective
    reads it; denominators stay. `dump` and `monitor` receive all tokens. step: the number of the update for `monitor`,
    where the trainer passes it. Turns are those of `turns_of`.
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

    advantage, step: as for `evaluate`. Raises `TrimtabError` without log-probs of the sampler.
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
    """Returns the state of an update of which only the trainer's own counts are known.

    tokens, sequences: trained tokens and sequences of the whole update, the denominators of the aggregation. With 1
    the loss is a sum over tokens, or over sequences of their means, to be divided by the trainer. like: a tensor on the
    device of the batch.
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
