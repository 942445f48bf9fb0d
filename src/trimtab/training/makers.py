"""The parts of a run that may live in other places, and who makes them. A placement brings makers of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab import rewards
from trimtab.config import Config
from trimtab.models.load import Loaded
from trimtab.rewards import Scorer
from trimtab.training.engines import build_engines
from trimtab.types import Engine, RewardSpec, Task


def _scorer(config: Config, specs: Sequence[RewardSpec], task: Task) -> Scorer:  # noqa: ARG001
    return rewards.build(specs, task)


@dataclass(frozen=True, slots=True)
class Makers:
    """`engines` takes the recipe, the trained model and the folder of its config and tokenizer; `scorer` the recipe,
    its rewards and its task. By default everything lives on this machine."""

    engines: Callable[[Config, Loaded, Path], Sequence[Engine]] = build_engines
    scorer: Callable[[Config, Sequence[RewardSpec], Task], Scorer] = _scorer


LOCAL = Makers()
