"""The `numeric` reward: the right number in any notation (1,200 and $1200.00 are 1200, 1/2 is 0.5)."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

from pydantic import Field

from trimtab.trainer.rewards.reward import Built, Response, Reward
from trimtab.types import Problem, Task

# A number does not begin inside a word or another number. Digits are bounded: nothing here may take long.
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?\$?(?P<whole>\d{1,3}(?:,\d{3}){1,20}(?!,?\d)|\d{1,60}(?!\d))?(?P<part>\.\d{1,60})?"
    r"(?P<power>[eE][-+]?\d{1,2}(?!\w))?(?:\s?/\s?(?P<below>\d{1,60}))?"
)


class Numeric(Reward):
    """1 if the chosen number of the answer equals the gold number, else 0; a gold answer must be one number."""

    which: Literal["first", "last", "only"] = Field("last", description="which number counts if there are several")
    tolerance: float = Field(1e-4, ge=0, lt=1, description="relative; whole numbers must be exact")
    require_stop: bool = Field(True, description="0 for a response cut by the length limit")

    def build(self, task: Task) -> Built:
        stops = task.stop

        def numeric(response: Response, problem: Problem) -> float:
            gold = numbers(problem.answer)
            if len(gold) != 1:
                raise ValueError(f"the right answer {problem.answer[:40]!r} is not one number; use another reward")
            if self.require_stop and response.finish != "stop":
                return 0.0
            values = numbers(response.body(stops))
            if not values or (self.which == "only" and len(values) > 1):
                return 0.0
            return float(close(values[0 if self.which == "first" else -1], gold[0], self.tolerance))

        return Built(numeric, isolated=False)


def numbers(text: str) -> list[Fraction]:
    """Returns every number in `text` exactly, in order."""
    values = (_value(match) for match in _NUMBER.finditer(text.replace("−", "-")))
    return [value for value in values if value is not None]


def close(value: Fraction, gold: Fraction, tolerance: float) -> bool:
    """Whether the numbers are equal, within `tolerance` if `gold` is not whole (data sets round 10/3 to 3.33333)."""
    if gold.denominator == 1:
        return value == gold
    return abs(value - gold) <= Fraction(tolerance) * abs(gold)


def _value(match: re.Match[str]) -> Fraction | None:
    whole, part, below = match["whole"], match["part"], match["below"]
    if whole is None and part is None:
        return None
    value = Fraction((whole or "0").replace(",", "") + (part or "") + (match["power"] or ""))
    if below is not None:
        if int(below) == 0:
            return None
        value /= int(below)
    return -value if match[0].startswith("-") else value
