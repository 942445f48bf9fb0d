"""A sentence on whether the perturbation of a run has any effect."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.pages.render import number
from trimtab.runs.metric_catalog import metric
from trimtab.runs.reader import Run

_SIGMA, _CHANGED, _MOVED = "perturbation/sigma_mean", "perturbation/changed", "perturbation/dlogp"


@dataclass(frozen=True)
class Verdict:
    """`acts` is False when the method is in effect bypass; `text` says so with the numbers it rests on."""

    acts: bool
    text: str


def verdict(run: Run) -> Verdict | None:
    """From the last probe step; None when the run has no noise or no probe step yet.

    The noise is in effect a no-op when it moves no log-prob, or changes fewer entries than the healthy range of
    `perturbation/changed` asks for. Noise on the logits has no entries; there the log-probs alone decide.
    """
    steps, moved = run.series(_MOVED)
    if not len(steps):
        return None
    share = _at(run, _CHANGED, steps[-1])
    sigma = _at(run, _SIGMA, steps[-1])
    numbers = f"mean |Δ log p| {number(moved[-1])}"
    if share is not None:
        entries = f"{100 * share:.3g}% of the entries going into matrix products changed{_extremes(run, steps[-1])}"
        numbers = f"{entries}, {numbers}"
    where = f"At step {int(steps[-1])}: {numbers}."
    if moved[-1] >= _low(_MOVED) and (share is None or share >= _low(_CHANGED)):
        return Verdict(True, f"{_how_much(share)} {where}")
    why = (
        "σ is 0" if sigma == 0 else f"rounding undoes σ = {number(sigma)}; raise perturbation.std or see model.autocast"
    )
    return Verdict(False, f"The noise is in effect a no-op, so this run is bypass: {why}. {where}")


def _how_much(share: float | None) -> str:
    if share is None or share >= 0.5:
        return "The noise arrives."
    return (
        "The noise arrives in part: rounding before the matrix products undoes the rest, and part of |Δ log p| is "
        "rounding that falls differently."
    )


def _at(run: Run, key: str, step: float) -> float | None:
    steps, values = run.series(key)
    found = values[steps == step]
    return float(found[-1]) if len(found) else None


def _low(key: str) -> float:
    row = metric(key)
    assert row is not None
    assert row.low is not None
    return row.low


def _extremes(run: Run, step: float) -> str:
    """The layers where least and most arrives, if there are several."""
    shares = {key: _at(run, key, step) for key in run.keys if key.startswith(f"{_CHANGED}/")}
    ranked = sorted((share, key.rpartition("/")[2]) for key, share in shares.items() if share is not None)
    if len(ranked) < 2:
        return ""
    (least, where_least), (most, where_most) = ranked[0], ranked[-1]
    return f" (from {100 * least:.3g}% in layer {where_least} to {100 * most:.3g}% in layer {where_most})"
