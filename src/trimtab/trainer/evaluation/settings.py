"""The settings of an evaluation: models, tasks, sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from trimtab.errors import TrimtabError
from trimtab.trainer.environments import EnvironmentSpec
from trimtab.types import RewardSpec

DTYPES = ("bfloat16", "float32")
Mode = Literal["greedy", "sampled", "relay"]


@dataclass(frozen=True)
class TaskSpec:
    """A task with its options; `reward` and `max_tokens` replace the task's own, `environment` is of its episodes."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    reward: Sequence[RewardSpec] = ()
    max_tokens: int | None = None
    environment: EnvironmentSpec | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A model's name in tables, and a context manager that gives the folder or name for `models.load`."""

    label: str
    folder: Callable[[], AbstractContextManager[str]]

    @classmethod
    def of(cls, name: str) -> ModelSpec:
        return cls(name, lambda: nullcontext(name))


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation."""

    samples: int = 1  # responses to each problem
    greedy: bool = False  # measure one greedy response as well
    temperature: float | None = None  # default: greedy for one sample, 1 for several
    top_p: float = 1.0
    max_tokens: int | None = None
    problems: int | None = None  # limits each task to its first test problems
    seed: int = 0
    dtype: str = "bfloat16"  # of the engine's weights
    relay_ratio: float = 0.5  # share of its response that a relay model keeps

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise TrimtabError(f"unknown dtype {self.dtype!r}: use 'bfloat16' or 'float32'")
        if not 0 < self.top_p <= 1:
            raise TrimtabError(f"top_p = {self.top_p:g}: it must be above 0 and at most 1")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise TrimtabError(f"temperature = {self.temperature:g}: it must be a number of at least 0")

    @property
    def sampling_temperature(self) -> float:
        """The temperature of the samples."""
        return (0.0 if self.samples == 1 else 1.0) if self.temperature is None else self.temperature

    def modes(self, relay: bool) -> tuple[Mode, ...]:
        """Returns what is measured of every model and task.

        Raises `TrimtabError` for a relay of single or greedy responses.
        """
        if relay and (self.samples == 1 or self.sampling_temperature == 0):
            raise TrimtabError("a relay is compared over several sampled responses: set samples to 2 or more")
        if self.sampling_temperature == 0 and self.samples > 1:
            raise TrimtabError(
                f"samples = {self.samples} at temperature 0 are all the same; use 1 sample or a temperature above 0"
            )
        if self.sampling_temperature == 0:
            return ("greedy",)
        return (*(("greedy",) if self.greedy else ()), "sampled", *(("relay",) if relay else ()))
