"""The `length` reward: whether the number of tokens is within bounds."""

from __future__ import annotations

from pydantic import Field, model_validator

from trimtab.rewards.base import Built, RewardOptions
from trimtab.rewards.response import Response
from trimtab.types import Problem, Task


class Options(RewardOptions):
    min: int = Field(0, ge=0, description="fewest tokens that are allowed")
    max: int = Field(ge=1, description="most tokens that are allowed")

    @model_validator(mode="after")
    def _ordered(self) -> Options:
        if self.min > self.max:
            raise ValueError(f"min = {self.min} is above max = {self.max}; swap them")
        return self


def build(options: Options, task: Task) -> Built:  # noqa: ARG001
    """1 inside [min, max], else 0."""

    def length(response: Response, problem: Problem) -> float:  # noqa: ARG001
        return float(options.min <= response.tokens <= options.max)

    return Built(length, isolated=False)
