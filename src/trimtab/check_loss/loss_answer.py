"""The answer of a check, as text and as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

NOT_JUDGED = (
    "not judged: how advantages are computed, noise in the policy, and weights that the trainer passes to the loss"
)
FAMILIES = {
    frozenset({"grpo", "dapo", "dr-grpo"}): "grpo, dapo and dr-grpo differ in bounds, denominator and advantages",
    frozenset({"token-alp", "token-alp-bypass", "token-bypass", "soup"}): (
        "token-alp has noise in π, and soup a μ of several policies, which are outside of the loss"
    ),
    frozenset({"seq-alp", "seq-bypass"}): "seq-alp has noise in π, which is outside of the loss",
}
"""Presets with the same loss at the same bounds -> what tells them apart."""


@dataclass(frozen=True)
class Difference:
    """kind: a key of `differences.KINDS`. text: a sentence with figures and what to change."""

    kind: str
    text: str


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
    nearest: where none was asked for, what the loss is or is nearest to. inputs: how the function was called.
    """

    function: str
    spec: str
    objective: str
    differences: Sequence[Difference]
    nearest: Sequence[Nearest]
    inputs: str
    curves: Sequence[Curve]
    seconds: float

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def verdict(self) -> str:
        """One line."""
        name = self.spec or self.objective.replace("composed", "a composition of parts")
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
        family = next((words for family, words in FAMILIES.items() if {self.objective, *names} <= family), "")
        return f"the same loss: {', '.join(names)}{f' ({family})' if family else ''}"

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
