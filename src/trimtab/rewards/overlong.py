"""DAPO's soft penalty for long responses (Yu et al. 2025, section 3.4; the formula of verl's dapo reward manager)."""

from __future__ import annotations

from pydantic import Field, model_validator

from trimtab.rewards.base import Built, RewardOptions
from trimtab.rewards.response import Response
from trimtab.types import Problem, Task


class Options(RewardOptions):
    max_tokens: int | None = Field(None, ge=1, description="L_max; default: the task's max_tokens")
    cache: int = Field(ge=1, description="L_cache: the tokens over which the penalty grows")
    factor: float = Field(1.0, gt=0, description="penalty at L_max")

    @model_validator(mode="after")
    def _fits(self) -> Options:
        if self.max_tokens is not None and self.cache > self.max_tokens:
            raise ValueError(f"cache = {self.cache} is longer than max_tokens = {self.max_tokens}; lower it")
        return self


def build(options: Options, task: Task) -> Built:
    """min(-(|y| - (L_max - L_cache)) / L_cache * factor, 0): never positive, -factor at |y| = L_max."""
    free = (options.max_tokens or task.max_tokens) - options.cache

    def overlong(response: Response, problem: Problem) -> float:  # noqa: ARG001
        return min(-(response.tokens - free) / options.cache * options.factor, 0.0)

    return Built(overlong, isolated=False)
