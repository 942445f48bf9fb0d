"""`objective.calibrate = true`: takes the objective's bounds from the first batch and keeps them for the whole run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch

from trimtab.errors import TrimtabError
from trimtab.objectives import Objective, correct
from trimtab.objectives.calibrate import Observed, calibrated, from_section
from trimtab.training.batching import MicroBatch
from trimtab.training.learner import Learner, MiniBatch

LAG_MESSAGE = (
    "caution: this first batch is fresh, later ones are up to {} updates older and will be rejected far more often; "
    "take bounds from a run's own trajectories instead (trimtab diagnose)"
)


@dataclass(frozen=True)
class Calibration:
    """Calibrated bounds, the number of responses they come from, and the shares of tokens kept by them and by the
    published bounds."""

    bounds: Mapping[str, float]
    responses: int
    kept: float
    kept_published: float

    @property
    def line(self) -> str:
        bounds = ", ".join(f"{name} = {value:g}" for name, value in self.bounds.items())
        return (
            f"calibrated at step 0 on {self.responses} responses: {bounds} (keeps {self.kept:.1%} of their tokens; the "
            f"published bounds {self.kept_published:.1%})"
        )

    def metrics(self) -> dict[str, float]:
        return {"calibrate/kept": self.kept, "calibrate/kept_published": self.kept_published}


def set_bounds(learner: Learner, bounds: Mapping[str, float]) -> None:
    """Replace the bounds of the learner's objective."""
    learner.objective = from_section(learner.config.objective.model_dump(), bounds)
    learner.bounds = dict(bounds)


@torch.no_grad()
def calibrate(learner: Learner, batches: Sequence[MiniBatch]) -> Calibration:
    """Calibrate bounds on the first batch and set them. Raises `TrimtabError` if the batch is too small."""
    scored = list(_scored(learner, batches))
    if not scored:
        raise TrimtabError("calibrate: the first batch has no usable response to take bounds from")
    published = learner.objective
    observed = reduce(add, (Observed.of(proximal, m.behavior, m.on_policy) for m, proximal in scored))
    set_bounds(learner, calibrated(published.name, observed))
    assert learner.bounds is not None
    return Calibration(
        learner.bounds, len(observed.sequence), _kept_share(learner.objective, scored), _kept_share(published, scored)
    )


def _scored(learner: Learner, batches: Sequence[MiniBatch]) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
    """Yield micro-batches with their proximal log-probs.

    With one update per batch these are the current policy's, which is not updated yet.
    """
    for micro in (micro for batch in batches for micro in batch):
        yield micro, micro.proximal if micro.proximal is not None else learner.logp(micro)


def _kept_share(objective: Objective, scored: Sequence[tuple[MicroBatch, torch.Tensor]]) -> float:
    """Share of trained tokens that the objective's weight and masks keep before the first update."""
    metrics = reduce(
        add,
        (
            correct(
                proximal,
                micro.behavior,
                micro.on_policy,
                weight=objective.weight,
                masks=objective.masks,
                current=proximal,
                advantage=micro.advantage,
            ).metrics
            for micro, proximal in scored
        ),
    )
    return 1.0 - metrics.finalize()["reject/tokens"]
