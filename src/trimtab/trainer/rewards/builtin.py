"""Rewards that need nothing but the text: `exact`, `numeric`, `format`, `overlong`; `by-task`, which adds up others."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from trimtab.errors import TrimtabError
from trimtab.trainer import rewards
from trimtab.trainer.rewards.reward import Built, Response, Reward
from trimtab.types import Problem, RewardSpec, Task


class Exact(Reward):
    """1 if the text before the stop string equals the answer (surrounding blanks aside), else 0."""

    require_stop: bool = Field(True, description="0 for a response cut by the length limit, however it begins")

    def build(self, task: Task) -> Built:
        stops = task.stop

        def exact(response: Response, problem: Problem) -> float:
            if self.require_stop and response.finish != "stop":
                return 0.0
            expected = problem.answer
            for stop in stops:
                expected = expected.removesuffix(stop)
            return float(response.body(stops) == expected.strip())

        return Built(exact, isolated=False)


class Format(Reward):
    """1 if the text before the stop string matches a regular expression, else 0."""

    pattern: str = Field(description="regular expression; a dot matches line breaks too")
    whole: bool = Field(True, description="it must match the whole text; false: somewhere in it")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"not a regular expression ({error})") from None
        return pattern

    def build(self, task: Task) -> Built:
        compiled = re.compile(self.pattern, re.DOTALL)
        stops = task.stop
        match = compiled.fullmatch if self.whole else compiled.search

        def form(response: Response, problem: Problem) -> float:
            return float(match(response.body(stops)) is not None)

        return Built(form, isolated=True)  # a pattern can backtrack for hours


class Overlong(Reward):
    """DAPO's soft penalty for long responses (Yu et al. 2025, section 3.4; the formula of verl's dapo reward manager).

    min(-(|y| - (L_max - L_cache)) / L_cache * factor, 0): never positive, -factor at |y| = L_max.
    """

    max_tokens: int | None = Field(None, ge=1, description="L_max; default: the run's max_tokens")
    cache: int = Field(ge=1, description="L_cache: the tokens over which the penalty grows")
    factor: float = Field(1.0, gt=0, description="penalty at L_max")

    def build(self, task: Task) -> Built:
        longest = self.max_tokens or task.max_tokens
        if self.cache > longest:
            raise TrimtabError(f"overlong: cache = {self.cache} is longer than max_tokens = {longest}; lower it")
        free = longest - self.cache

        def overlong(response: Response, problem: Problem) -> float:
            return min(-(response.tokens - free) / self.cache * self.factor, 0.0)

        return Built(overlong, isolated=False)


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


class RewardPart(BaseModel):
    """One reward of a task, with its own keywords."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    weight: float = 1.0


class ByTask(Reward):
    """The weighted sum of the rewards of the problem's task, in a mixture."""

    rewards: dict[str, list[RewardPart]] = Field(
        min_length=1,
        description="for each label of a task a list of tables: `name`, `weight`, and the reward's keywords",
    )

    def build(self, task: Task) -> Built:
        specs = {
            label: [RewardSpec(part.name, part.weight, options=part.model_extra or {}) for part in parts]
            for label, parts in self.rewards.items()
        }
        entries = {label: rewards.weighted(of_task, task) for label, of_task in specs.items()}

        def by_task(response: Response, problem: Problem) -> float:
            label = problem.extra.get("task")
            if label not in entries:
                raise ValueError(f"by-task has no rewards for problems of {label!r}, only for {', '.join(entries)}")
            return sum(entry.weight * entry.built.function(response, problem) for entry in entries[label])

        isolated = any(entry.built.isolated for of_task in entries.values() for entry in of_task)
        return Built(by_task, isolated=isolated)
