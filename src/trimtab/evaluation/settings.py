"""The settings of an evaluation: models, tasks, sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from trimtab.errors import TrimtabError
from trimtab.types import RewardSpec

DTYPES = ("bfloat16", "float32")
Mode = Literal["greedy", "sampled", "relay"]


@dataclass(frozen=True)
class TaskSpec:
    """A task with its options; `reward` and `max_tokens` replace what the task itself would use."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    reward: Sequence[RewardSpec] = ()
    max_tokens: int | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A model by the name the tables show, and the folder or name `models.load` takes while the context is open."""

    label: str
    folder: Callable[[], AbstractContextManager[str]]

    @classmethod
    def of(cls, name: str) -> ModelSpec:
        return cls(name, lambda: nullcontext(name))


@dataclass(frozen=True)
class Settings:
    """How to measure. `samples` responses to each problem at `temperature` (default: greedy for one sample, 1 for
    several), and with `greedy` one greedy response beside them. `problems` limits each task to its first so many test
    problems. `relay_ratio` is the share of its own response a relay model keeps. `dtype` is that of the engine.
    """

    samples: int = 1
    greedy: bool = False
    temperature: float | None = None
    top_p: float = 1.0
    max_tokens: int | None = None
    problems: int | None = None
    seed: int = 0
    dtype: str = "bfloat16"
    relay_ratio: float = 0.5

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise TrimtabError(f"unknown dtype {self.dtype!r}: use 'bfloat16' or 'float32'")
        if not 0 < self.top_p <= 1:
            raise TrimtabError(f"top_p = {self.top_p:g}: it must be above 0 and at most 1")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise TrimtabError(f"temperature = {self.temperature:g}: it must be a number from 0 on")

    @property
    def heat(self) -> float:
        """The temperature of the samples."""
        return (0.0 if self.samples == 1 else 1.0) if self.temperature is None else self.temperature

    def modes(self, relay: bool) -> tuple[Mode, ...]:
        """What is measured of every model and task. `TrimtabError` for a relay of single or greedy responses."""
        if relay and (self.samples == 1 or self.heat == 0):
            raise TrimtabError("a relay is compared over several sampled responses: set samples to 2 or more")
        if self.heat == 0 and self.samples > 1:
            raise TrimtabError(
                f"samples = {self.samples} at temperature 0 are all the same; use 1 sample or a temperature above 0"
            )
        if self.heat == 0:
            return ("greedy",)
        return (*(("greedy",) if self.greedy else ()), "sampled", *(("relay",) if relay else ()))
