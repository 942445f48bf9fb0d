"""Checks a loss: against an objective, or which objective it is. The answer is text and values."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from trimtab.check_loss.differences import KINDS, Comparison, Difference
from trimtab.check_loss.identification import identify, reference
from trimtab.check_loss.probes import DRIFT, MISMATCH, Loss, Probe
from trimtab.check_loss.readings import SIGNS, Readings
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives import Objective

POINTS = 120  # of a curve
NOT_JUDGED = (
    "not judged: how advantages are computed, noise in the policy, and weights that the trainer passes to the loss"
)


@dataclass(frozen=True)
class Nearest:
    """An objective by the keys of `[objective]` in a recipe, and what is left of differences."""

    settings: Sequence[tuple[str, Any]]
    differences: Sequence[Difference]

    @property
    def lines(self) -> list[str]:
        return [f"{key} = {_toml(value)}" for key, value in self.settings]


@dataclass(frozen=True)
class Curve:
    """The weight of the gradient of a token, relative to that at a ratio of 1, of the loss and of the objective."""

    name: str
    positive: bool
    ratios: Sequence[float]
    mine: Sequence[float | None]
    theirs: Sequence[float | None]


@dataclass(frozen=True)
class Answer:
    """What was found.

    spec: the objective that was asked for, "" without one. objective: the name of that which was compared.
    nearest: where none was asked for, what the loss is or is nearest to. inputs: how the function was called. ignored:
    kinds of differences that were found and do not count; what they hide is not probed.
    """

    function: str
    spec: str
    objective: str
    differences: Sequence[Difference]
    nearest: Sequence[Nearest]
    inputs: str
    curves: Sequence[Curve]
    seconds: float
    ignored: Sequence[str] = ()

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def verdict(self) -> str:
        """One line."""
        name = self.spec or self.objective.replace("composed", "a composition of parts")
        if self.equal and self.ignored:
            return f"{self.function} is {name} but for what is ignored ({', '.join(self.ignored)}), which may hide more"
        if self.equal:
            return f"{self.function} is {name}: gradients are equal in all probes and on random batches"
        count = len(self.differences)
        listed = f"{count} difference{'s' if count > 1 else ''}{', the most harmful first' if count > 1 else ''}"
        return f"{self.function} is {'not' if self.spec else 'nearest to'} {name}: {listed}"

    @property
    def others(self) -> str:
        """What no probe can tell from the first of `nearest`; empty if nothing."""
        names = [str(dict(one.settings)["name"]) for one in self.nearest[1:] if not one.differences]
        if not names or self.differences:
            return ""
        return f"the same loss: {', '.join(names)}"

    def text(self) -> str:
        """Returns the answer as lines."""
        lines = [self.verdict]
        width = max((len(one.kind) for one in self.differences), default=0)
        lines += ["", *(f"  {one.kind:<{width}}  {one.text}" for one in self.differences)] if self.differences else []
        if self.nearest:
            lines += ["", f"in a recipe, [objective]: {', '.join(self.nearest[0].lines)}"]
            lines += [self.others] if self.others else []
        return "\n".join([*lines, "", f"called with {self.inputs}" if self.inputs else "", NOT_JUDGED])

    def as_dict(self) -> dict[str, Any]:
        """Returns the answer as values, without the curves."""
        values = {name: value for name, value in asdict(self).items() if name != "curves"}
        return {"equal": self.equal, "verdict": self.verdict, **values}


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else f"{value:.6g}"


def check(loss: Loss, objective: Objective | None = None, *, spec: str = "", ignore: Sequence[str] = ()) -> Answer:
    """Returns whether a loss is an objective, and what differs; without one, the nearest objectives.

    spec: the objective as it was asked for. ignore: kinds of differences (`differences.KINDS`) that do not count.
    Raises `TrimtabError` for an unknown one.
    """
    for kind in ignore:
        if kind not in KINDS:
            raise TrimtabError(f"there is no difference {kind!r} to ignore{did_you_mean(kind, KINDS)}")
    began = time.perf_counter()
    readings = Readings(loss)
    nearest: list[Nearest] = []
    with torch.random.fork_rng(devices=[]):
        if objective is None:
            candidates = identify(readings)
            whole = candidates[0].differences
            shown = [one for one in candidates if not _counted(one.differences, ignore)] or candidates[:1]
            nearest = [Nearest(one.settings, _counted(one.differences, ignore)) for one in shown]
            objective = candidates[0].objective
        else:
            whole = Comparison(readings, reference(objective), objective.name).differences()
        found = _counted(whole, ignore)
        theirs = reference(objective)
        curves = [_curve(readings, theirs, probe, positive) for probe in (DRIFT, MISMATCH) for positive in SIGNS]
    ignored = tuple(sorted({one.kind for one in whole} & set(ignore)))
    seconds = time.perf_counter() - began
    return Answer(loss.name, spec, objective.name, found, tuple(nearest), loss.inputs, tuple(curves), seconds, ignored)


def _counted(differences: Sequence[Difference], ignore: Sequence[str]) -> tuple[Difference, ...]:
    return tuple(one for one in differences if one.kind not in ignore)


def _curve(mine: Readings, theirs: Readings, probe: Probe, positive: bool) -> Curve:
    """Returns the weights of a token against its ratio, to a little beyond the outermost bound."""
    bends = [bend for one in (mine, theirs) for side in one.bends(probe).values() for bend in side]
    reach = min(3.0, max([math.log(2), *(1.2 * abs(bend.x) for bend in bends)]))
    shifts = torch.linspace(-reach, reach, POINTS).double()
    weights = [one.weights(probe, shifts, SIGNS[positive]).tolist() for one in (mine, theirs)]
    values = [[value if math.isfinite(value) else None for value in one] for one in weights]
    return Curve(probe.name, positive, shifts.exp().tolist(), *values)
