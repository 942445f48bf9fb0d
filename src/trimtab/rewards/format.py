"""The `format` reward: whether a response matches a regular expression."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from trimtab.rewards.base import Built, RewardOptions
from trimtab.rewards.response import Response
from trimtab.types import Problem, Task


class Options(RewardOptions):
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


def build(options: Options, task: Task) -> Built:
    """1 if the text before the stop string matches, else 0. In a worker: a pattern can backtrack for hours."""
    compiled = re.compile(options.pattern, re.DOTALL)
    stops = task.stop
    match = compiled.fullmatch if options.whole else compiled.search

    def form(response: Response, problem: Problem) -> float:  # noqa: ARG001
        return float(match(response.body(stops)) is not None)

    return Built(form, isolated=True)
