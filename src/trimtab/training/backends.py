"""Factories of engines and scorer; a run on a Ray cluster has its own."""

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
    """Factories of engines and scorer; None builds them on this machine.

    `engines` takes the recipe, the trained model and the folder with its config and tokenizer. `scorer` takes the
    recipe, its rewards and its task.
    """

    engines: Callable[[Config, LoadedModel, Path], Sequence[Engine]] | None = None
    scorer: Callable[[Config, Sequence[RewardSpec], Task], Scorer] | None = None


LOCAL_BACKENDS = Backends()
