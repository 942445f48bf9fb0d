"""Factories for engines and scorer; a cluster run replaces them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.config import Config
from trimtab.models.load import LoadedModel
from trimtab.rewards import Scorer
from trimtab.types import Engine, RewardSpec, Task


@dataclass(frozen=True, slots=True)
class Backends:
    """Each makes what its name says; None: the run makes it on this machine.

    `engines` takes the recipe, the trained model and the folder of its config and tokenizer; `scorer` the recipe, its
    rewards and its task.
    """

    engines: Callable[[Config, LoadedModel, Path], Sequence[Engine]] | None = None
    scorer: Callable[[Config, Sequence[RewardSpec], Task], Scorer] | None = None


LOCAL_BACKENDS = Backends()
