"""Gives an engine new weights, checks that they arrived, and gives them once more where they did not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trimtab.errors import RESUME, DivergedError, EngineDeadError, TrimtabError
from trimtab.trainer.engines.weight_transfer import checksum
from trimtab.trainer.rollout.canary import Canary, CanaryPrediction
from trimtab.trainer.rollout.responses import RolloutStats
from trimtab.types import Engine


def publish(
    engine: Engine,
    weights: Iterable[tuple[str, Tensor]],
    version: int,
    canary: Canary | None,
    expected: CanaryPrediction | None,
) -> RolloutStats:
    """Gives an engine weights, at most twice; returns statistics that say what was wrong the first time.

    weights: can be iterated several times. expected: see `Canary.check`; None: the canary does not check this version.
    Raises `TrimtabError` if they did not arrive the second time either.
    """
    stats = RolloutStats()
    while True:
        engine.update_weights(weights, version)
        try:
            _compare_checksums(engine, weights, version)
            if canary is not None and expected is not None:
                canary.check(engine, expected)
            return stats
        except TrimtabError as error:
            if stats.republished or isinstance(error, DivergedError | EngineDeadError):
                raise
            stats.republished.append(f"{error}; published the weights again")


def _compare_checksums(engine: Engine, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Raises `TrimtabError` if an engine says that it has others (`EmbeddedEngine.weight_checksums`)."""
    read = getattr(engine, "weight_checksums", None)
    used: dict[str, tuple[torch.dtype, int]] = read() if read else {}
    for name, weight in weights if used else ():
        if name in used and checksum(weight, used[name][0]) != used[name][1]:
            raise TrimtabError(
                f"the engine's weight {name!r} is not that of version {version}: the publication did not reach it; "
                f"start the engine again, then {RESUME}"
            )
