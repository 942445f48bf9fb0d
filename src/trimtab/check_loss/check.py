"""Compares a loss with an objective, or finds which objective it is. The answer is text and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trimtab.check_loss.differences import KINDS, NOTES, Comparison, Difference
from trimtab.check_loss.identification import ComparedObjective, identify, reference
from trimtab.check_loss.probes import Loss
from trimtab.check_loss.readings import Readings
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives import Objective

NOT_JUDGED = (
    "not judged: how advantages are computed, noise in the policy, and weights that the trainer passes to the loss"
)


@dataclass(frozen=True)
class Answer:
    """The answer of a check."""

    function: str
    spec: str  # the objective that was asked for, "" if none was
    differences: Sequence[Difference]  # from that objective, or from the first of `nearest`
    nearest: Sequence[ComparedObjective]  # if no objective was asked for: those that the loss is, or else is nearest to
    notes: Sequence[Difference]  # differences that a right loss may have
    inputs: str  # how the function was called
    ignored: Sequence[str]  # kinds that were found and do not count; what they hide was not probed

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def verdict(self) -> str:
        """The answer in one line."""
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
        """Objectives that no probe can tell from the first of `nearest`; "" if there are none."""
        names = [candidate.name for candidate in self.nearest[1:]]
        return f"the same loss: {', '.join(names)}" if names else ""

    def text(self) -> str:
        """Returns the answer as lines."""
        lines = [self.verdict]
        width = max((len(found.kind) for found in self.differences), default=0)
        listed = [f"  {found.kind:<{width}}  {found.text}" for found in self.differences]
        lines += ["", *listed] if listed else []
        lines += ["", *(f"  note: {note.kind}  {note.text}" for note in self.notes)] if self.notes else []
        if self.nearest:
            lines += ["", f"in a recipe, [objective]: {', '.join(self.nearest[0].lines)}"]
            lines += [self.others] if self.others else []
        return "\n".join([*lines, "", f"called with {self.inputs}" if self.inputs else "", NOT_JUDGED])

    def as_dict(self) -> dict[str, Any]:
        """Returns the answer as values."""
        return {"equal": self.equal, "verdict": self.verdict, **asdict(self)}


def check(loss: Loss, objective: Objective | None = None, *, spec: str = "", ignore: Sequence[str] = ()) -> Answer:
    """Returns what differs between a loss and an objective or, without objective, the nearest objectives.

    spec: the objective as it was asked for. ignore: kinds of differences that do not count.
    Raises `TrimtabError` if `ignore` has a kind that is not in `differences.KINDS`.
    """
    for kind in ignore:
        if kind not in KINDS:
            raise TrimtabError(f"there is no difference {kind!r} to ignore{did_you_mean(kind, KINDS)}")
    readings = Readings(loss)
    if objective is None:
        found = identify(readings)
    else:
        differences = Comparison(readings, reference(objective), objective.name).differences()
        found = [ComparedObjective((("name", objective.name),), tuple(differences))]
    ignored = tuple(sorted({d.kind for d in found[0].differences} & set(ignore)))
    notes = [d for d in found[0].differences if d.kind in NOTES and d.kind not in ignore]
    left_out = {*ignore, *NOTES}
    found = [replace(c, differences=tuple(d for d in c.differences if d.kind not in left_out)) for c in found]
    nearest = [candidate for candidate in found if not candidate.differences] or found[:1]
    shown, spec = (nearest, "") if objective is None else ([], spec or objective.name)
    return Answer(loss.name, spec, nearest[0].differences, shown, notes, loss.inputs, ignored)
