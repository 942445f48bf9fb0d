"""The scalars that a run of any framework logged, under common names, judged by the rules of the monitor.

Scalars are means over all trained tokens of a step: they show that a mismatch grows or jumps, not in which tokens, and
so not why.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.resources
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from trimtab.errors import TrimtabError, require_extra
from trimtab.monitor.alarms import KEPT, WINDOW, Alarm, Step, alarms, median

Row = Mapping[str, float]
STEP = (
    *("step", "global_step", "training_step", "training/global_step", "train/global_step", "trainer/global_step"),
    *("system/global_step", "progress/batch", "train/step", "rollout/step", "_step", "Step"),
)
"""Names of the step counter, first found first."""


@dataclass(frozen=True)
class Scalar:
    """A row of `scalars.csv`: what a framework logs under a name; prefixes before it are ignored.

    quantity: the common name, one of `K3` and `METRICS` or ratio_mean, ratio_max, prob_difference, entropy, other.
    formula: with p and q, the log-probs of trainer and sampler, and d = p - q. note: what else a reader of the number
    must know. source: the file that computes it.
    """

    framework: str
    name: str
    quantity: str
    formula: str
    source: str
    note: str = ""


K3: Mapping[str, tuple[str, Callable[[float], float]]] = {
    "k3": ("", lambda value: value),
    "k1": ("the same expectation as k3, with more noise", abs),
    "k2": ("about k3 without a tail", lambda value: value),
    "abs_difference": ("k3 is about half of its square, and more with a tail", lambda value: value**2 / 2),
    "mult_prob_error": ("k3 is about half of the square of its distance from 1", lambda value: (value - 1) ** 2 / 2),
}
"""Quantities that measure the mismatch, the best first: what k3 is in relation to it, and k3 itself for small d."""
METRICS = {
    "ess_token": "mismatch/ess_token",
    "grad_norm": "grad_norm",
    "length": "response/length",
    "truncated": "response/truncated",
    "age": "age",
}
"""Names of other quantities in the rules of the monitor."""


@dataclass(frozen=True)
class Curve:
    """A scalar over the steps that have it. values: the finite ones; not_finite: the number of others."""

    scalar: Scalar
    logged_as: str
    values: tuple[float, ...]
    not_finite: int

    @property
    def first(self) -> float:
        """Median of the first steps."""
        return _median(self.values[:WINDOW])

    @property
    def last(self) -> float:
        """Median of the last steps."""
        return _median(self.values[-WINDOW:])


@dataclass(frozen=True)
class Restart:
    """A step counter that went back. before, after: k3 of the step before it and of the first one after it."""

    step: int
    before: float
    after: float


@dataclass(frozen=True)
class ScalarReport:
    """What the scalars of a run show. mismatch: the curve that k3 was taken from."""

    framework: str
    steps: int
    mismatch: Curve
    curves: tuple[Curve, ...]
    alarms: tuple[Alarm, ...]
    restarts: tuple[Restart, ...]


@cache
def known_scalars() -> tuple[Scalar, ...]:
    """Returns the rows of `scalars.csv`."""
    text = importlib.resources.files("trimtab.monitor").joinpath("scalars.csv").read_text(encoding="utf-8")
    return tuple(Scalar(**row) for row in csv.DictReader(text.splitlines()))


def read_scalars(path: Path) -> list[Row]:
    """Returns the numbers of each step in the order of the file, with its number as `step`.

    path: JSON lines, a CSV table (as W&B exports it), or a folder of TensorBoard events. Values of one step that were
    logged one after the other are one row. Raises `TrimtabError` for a file that is none of these.
    """
    if path.is_dir():
        return _merged(_events(path))
    try:
        with path.open(encoding="utf-8", newline="") as file:
            if path.suffix == ".csv":
                rows = [dict(row) for row in csv.DictReader(file)]
            else:
                rows = [json.loads(line) for line in file if line.strip()]
    except (OSError, ValueError) as error:
        raise TrimtabError(f"{path}: not readable as CSV or JSON lines of scalars ({error})") from None
    if not all(isinstance(row, dict) for row in rows):
        raise TrimtabError(f"{path}: each line must be a JSON object of scalars by name")
    return _merged(_numbers(row) for row in rows)


def judge(rows: Sequence[Row]) -> ScalarReport:
    """Returns the known scalars of a run and the alarms that `Monitor` would have raised.

    Raises `TrimtabError` where no scalar measures the mismatch.
    """
    framework, curves = curves_of(rows)
    mismatch = best_mismatch(curves)
    if mismatch is None:
        measuring = sorted({f"{s.name} ({s.framework})" for s in known_scalars() if s.quantity in K3})
        raise TrimtabError(f"no scalar measures the mismatch; known are {', '.join(measuring)}")
    measured = (row for row in rows if math.isfinite(row.get(mismatch.logged_as, math.nan)))
    steps = [step_of(row, mismatch, curves) for row in measured]
    raised: dict[str, Alarm] = {}
    for end in range(1, len(steps) + 1):
        for alarm in alarms(history(steps[:end])):
            raised.setdefault(alarm.name, alarm)
    restarts = tuple(
        Restart(after.number, before["mismatch/k3"], after["mismatch/k3"])
        for before, after in pairwise(steps)
        if after.number <= before.number
    )
    return ScalarReport(framework, len(steps), mismatch, curves, tuple(raised.values()), restarts)


def curves_of(rows: Sequence[Row]) -> tuple[str, tuple[Curve, ...]]:
    """Returns the framework that most names of a mismatch belong to, and the curves of all scalars it logs."""
    logged = list(dict.fromkeys(name for row in rows for name in row))
    found = Counter(
        scalar.framework for scalar in known_scalars() for name in logged if scalar.quantity in K3 and _is(scalar, name)
    )
    framework = found.most_common(1)[0][0] if found else ""
    curves = (
        _curve(scalar, name, [row[name] for row in rows if name in row])
        for scalar in known_scalars()
        for name in logged
        if scalar.framework == framework and _is(scalar, name)
    )
    return framework, tuple(curves)


def _curve(scalar: Scalar, name: str, values: Sequence[float]) -> Curve:
    finite = tuple(value for value in values if math.isfinite(value))
    return Curve(scalar, name, finite, len(values) - len(finite))


def best_mismatch(curves: Iterable[Curve]) -> Curve | None:
    """Returns the curve that k3 follows from best."""
    order = list(K3)
    measuring = (curve for curve in curves if curve.scalar.quantity in K3)
    return min(measuring, key=lambda curve: order.index(curve.scalar.quantity), default=None)


def history(steps: Sequence[Step]) -> list[Step]:
    """Returns the first and the last steps, each once, as `Monitor` keeps them."""
    return [*steps[: min(WINDOW, max(0, len(steps) - KEPT))], *steps[-KEPT:]]


def step_of(row: Row, mismatch: Curve, curves: Iterable[Curve]) -> Step:
    """Returns a row in the names of the monitor's rules."""
    k3 = K3[mismatch.scalar.quantity][1](row[mismatch.logged_as])
    others = {
        METRICS[curve.scalar.quantity]: row[curve.logged_as]
        for curve in curves
        if curve.scalar.quantity in METRICS and curve.logged_as in row
    }
    return Step(int(row["step"]), {"mismatch/k3": k3, **others}, None)


def _is(scalar: Scalar, logged: str) -> bool:
    """Returns whether a logged name is that of the scalar; loggers, users and the CSV files of W&B add prefixes."""
    return logged == scalar.name or logged.endswith((f"/{scalar.name}", f" - {scalar.name}"))


def _numbers(row: Mapping[str, object]) -> Row:
    """Returns the numbers of a row; texts of a CSV table are converted, nested names joined by `/`."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= {f"{name}/{inner}": number for inner, number in _numbers(value).items()}
        elif isinstance(value, int | float | str) and not isinstance(value, bool):
            with contextlib.suppress(ValueError):  # a text is not a scalar
                found[name] = float(value)
    return found


def _merged(rows: Iterable[Row]) -> list[Row]:
    """Joins neighbors with the same step; rows without a step are numbered."""
    merged: list[dict[str, float]] = []
    for row in rows:
        counter = next((name for name in STEP if name in row), None)
        step = row[counter] if counter else len(merged)
        if merged and merged[-1]["step"] == step:
            merged[-1].update(row)
        else:
            merged.append({**row, "step": step})
    return list(merged)


def _events(folder: Path) -> list[Row]:
    """Returns the scalars of all TensorBoard event files in a folder, by step."""
    require_extra("tensorboard", f"reading {folder}", "or name a file of JSON lines or CSV")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    rows: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            rows.setdefault(event.step, {"step": event.step})[name] = event.value
    return [_numbers(rows[step]) for step in sorted(rows)]


def _median(values: Sequence[float]) -> float:
    return median([Step(0, {"": value}, None) for value in values], "") if values else math.nan
