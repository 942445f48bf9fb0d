"""States whether the perturbation (ALP noise) of a run has any effect."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.pages.render import number
from trimtab.runs.metric_catalog import metric
from trimtab.runs.reader import Run

_SIGMA, _CHANGED, _DLOGP = "perturbation/sigma_mean", "perturbation/changed", "perturbation/dlogp"


@dataclass(frozen=True)
class PerturbationVerdict:
    """Whether the noise has an effect, and a sentence with the numbers; without effect the method equals bypass."""

    acts: bool
    text: str


def perturbation_verdict(run: Run) -> PerturbationVerdict | None:
    """Returns the verdict at the last probe step; None if the run has no noise or no probe step yet.

    The noise has no effect if the log-probs or the entries change less than the healthy ranges of `perturbation/dlogp`
    and `perturbation/changed`. Noise on the logits has no entries; there only the log-probs are judged.
    """
    steps, dlogp = run.series(_DLOGP)
    if not len(steps):
        return None
    share = _value_at(run, _CHANGED, steps[-1])
    sigma = _value_at(run, _SIGMA, steps[-1])
    numbers = f"mean |Δ log p| {number(dlogp[-1])}"
    if share is not None:
        entries = f"{100 * share:.3g}% of the entries going into matrix products changed{_extremes(run, steps[-1])}"
        numbers = f"{entries}, {numbers}"
    where = f"At step {int(steps[-1])}: {numbers}."
    if dlogp[-1] >= _healthy_low(_DLOGP) and (share is None or share >= _healthy_low(_CHANGED)):
        return PerturbationVerdict(True, f"{_effect_text(share)} {where}")
    why = (
        "σ is 0" if sigma == 0 else f"rounding undoes σ = {number(sigma)}; raise perturbation.std or see model.autocast"
    )
    return PerturbationVerdict(False, f"The noise is in effect a no-op, so this run is bypass: {why}. {where}")


def _effect_text(share: float | None) -> str:
    if share is None or share >= 0.5:
        return "The noise arrives."
    return (
        "The noise arrives in part: rounding before the matrix products undoes the rest, and part of |Δ log p| is "
        "rounding that falls differently."
    )


def _value_at(run: Run, key: str, step: float) -> float | None:
    steps, values = run.series(key)
    matches = values[steps == step]
    return float(matches[-1]) if len(matches) else None


def _healthy_low(key: str) -> float:
    row = metric(key)
    assert row is not None
    assert row.low is not None
    return row.low


def _extremes(run: Run, step: float) -> str:
    """Returns the layers with the smallest and the largest changed share; empty if there is only one."""
    shares = {key: _value_at(run, key, step) for key in run.keys if key.startswith(f"{_CHANGED}/")}
    ranked = sorted((share, key.rpartition("/")[2]) for key, share in shares.items() if share is not None)
    if len(ranked) < 2:
        return ""
    (smallest, smallest_layer), (largest, largest_layer) = ranked[0], ranked[-1]
    return f" (from {100 * smallest:.3g}% in layer {smallest_layer} to {100 * largest:.3g}% in layer {largest_layer})"
