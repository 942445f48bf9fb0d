"""`objective.calibrate = true`: bounds from the first batch, kept for the whole run."""

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


@dataclass(frozen=True)
class Calibration:
    """The bounds found, on how many responses, and the share of tokens kept with them and with the published ones."""

    bounds: Mapping[str, float]
    responses: int
    kept: float
    kept_published: float

    @property
    def line(self) -> str:
        found = ", ".join(f"{name} = {value:g}" for name, value in self.bounds.items())
        return (
            f"calibrated at step 0 on {self.responses} responses: {found} (keeps {self.kept:.1%} of their tokens; the "
            f"published bounds {self.kept_published:.1%})"
        )

    def metrics(self) -> dict[str, float]:
        return {"calibrate/kept": self.kept, "calibrate/kept_published": self.kept_published}


def adopt(learner: Learner, bounds: Mapping[str, float]) -> None:
    """From now on the learner trains with these bounds."""
    learner.objective = from_section(learner.config.objective.model_dump(), bounds)
    learner.bounds = dict(bounds)


@torch.no_grad()
def calibrate(learner: Learner, batches: Sequence[MiniBatch]) -> Calibration:
    """Find the bounds on the first batch and adopt them. `TrimtabError` when the batch is too small to say."""
    scored = list(_scored(learner, batches))
    if not scored:
        raise TrimtabError("calibrate: the first batch has no usable response to take bounds from")
    published = learner.objective
    observed = reduce(add, (Observed.of(proximal, m.behavior, m.on_policy) for m, proximal in scored))
    adopt(learner, calibrated(published.name, observed))
    assert learner.bounds is not None
    return Calibration(
        learner.bounds, len(observed.sequence), _kept(learner.objective, scored), _kept(published, scored)
    )


def _scored(learner: Learner, batches: Sequence[MiniBatch]) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
    """With one update a batch there is no proximal pass: the current policy, not yet updated, is the proximal one."""
    for micro in (micro for batch in batches for micro in batch):
        yield micro, micro.proximal if micro.proximal is not None else learner.logp(micro)


def _kept(built: Objective, scored: Sequence[tuple[MicroBatch, torch.Tensor]]) -> float:
    """Share of trained tokens that the objective's weight and masks leave in, at the first look at the batch."""
    metrics = reduce(
        add,
        (
            correct(
                proximal,
                micro.behavior,
                micro.on_policy,
                weight=built.weight,
                masks=built.masks,
                current=proximal,
                advantage=micro.advantage,
            ).metrics
            for micro, proximal in scored
        ),
    )
    return 1.0 - metrics.finalize()["reject/tokens"]
