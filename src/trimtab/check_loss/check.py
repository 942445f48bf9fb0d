"""Checks a loss: against an objective, or which objective it is. The answer is text and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from trimtab.check_loss.differences import KINDS, NOTES, Comparison, Difference
from trimtab.check_loss.identification import Candidate, identify, reference
from trimtab.check_loss.probes import Loss
from trimtab.check_loss.readings import Readings
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives import Objective

NOT_JUDGED = (
    "not judged: how advantages are computed, noise in the policy, and weights that the trainer passes to the loss"
)


@dataclass(frozen=True)
class Answer:
    """What was found.

    spec: the objective that was asked for, "" without one. nearest: where none was asked for, what the loss is or is
    nearest to. differences: from the objective, or from the first of `nearest`. notes: what differs and may in a right
    loss. inputs: how the function was called. ignored: kinds of differences that were found and do not count; what they
    hide is not probed.
    """

    function: str
    spec: str
    differences: Sequence[Difference]
    nearest: Sequence[Candidate]
    notes: Sequence[Difference]
    inputs: str
    ignored: Sequence[str]

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def verdict(self) -> str:
        """One line."""
        name = self.spec or self.nearest[0].name.replace("composed", "a composition of parts")
        if self.equal and self.ignored:
            return f"{self.function} is {name} but for what is ignored ({', '.join(self.ignored)}), which may hide more"
        if self.equal:
            noted = ", except as noted" if self.notes else ""
            return f"{self.function} is {name}{noted}: gradients are equal in all probes and on random batches"
        count = len(self.differences)
        listed = f"{count} differences, the most harmful first" if count > 1 else "1 difference"
        return f"{self.function} is {'not' if self.spec else 'nearest to'} {name}: {listed}"

    @property
    def others(self) -> str:
        """What no probe can tell from the first of `nearest`; empty if nothing."""
        names = [one.name for one in self.nearest[1:]]
        return f"the same loss: {', '.join(names)}" if names else ""

    def text(self) -> str:
        """Returns the answer as lines."""
        lines = [self.verdict]
        width = max((len(one.kind) for one in self.differences), default=0)
        lines += ["", *(f"  {one.kind:<{width}}  {one.text}" for one in self.differences)] if self.differences else []
        lines += ["", *(f"  note: {one.kind}  {one.text}" for one in self.notes)] if self.notes else []
        if self.nearest:
            lines += ["", f"in a recipe, [objective]: {', '.join(self.nearest[0].lines)}"]
            lines += [self.others] if self.others else []
        return "\n".join([*lines, "", f"called with {self.inputs}" if self.inputs else "", NOT_JUDGED])

    def as_dict(self) -> dict[str, Any]:
        """Returns the answer as values."""
        return {"equal": self.equal, "verdict": self.verdict, **asdict(self)}


def check(loss: Loss, objective: Objective | None = None, *, spec: str = "", ignore: Sequence[str] = ()) -> Answer:
    """Returns whether a loss is an objective, and what differs; without one, the nearest objectives.

    spec: the objective as it was asked for. ignore: kinds of differences (`differences.KINDS`) that do not count.
    Raises `TrimtabError` for an unknown one.
    """
    for kind in ignore:
        if kind not in KINDS:
            raise TrimtabError(f"there is no difference {kind!r} to ignore{did_you_mean(kind, KINDS)}")
    readings = Readings(loss)
    with torch.random.fork_rng(devices=[]):
        if objective is None:
            found = identify(readings)
        else:
            differences = Comparison(readings, reference(objective), objective.name).differences()
            found = [Candidate((("name", objective.name),), tuple(differences))]
    ignored = tuple(sorted({one.kind for one in found[0].differences} & set(ignore)))
    notes = [one for one in found[0].differences if one.kind in NOTES and one.kind not in ignore]
    left_out = {*ignore, *NOTES}
    found = [replace(one, differences=tuple(d for d in one.differences if d.kind not in left_out)) for one in found]
    nearest = [one for one in found if not one.differences] or found[:1]
    shown, spec = (nearest, "") if objective is None else ([], spec or objective.name)
    return Answer(loss.name, spec, nearest[0].differences, shown, notes, loss.inputs, ignored)
