"""`objective.calibrate = true`: takes the objective's bounds from the first batch and keeps them for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch

from trimtab.errors import TrimtabError
from trimtab.objectives import Objective, correct
from trimtab.objectives.calibrate import Observed, calibrated
from trimtab.objectives.lookup import from_section
from trimtab.trainer.config import Config
from trimtab.trainer.features.feature import Feature, PolicyLearner, Sections, StepRecord
from trimtab.trainer.packing import MicroBatch, MiniBatch


class Calibration(Feature):
    """Replaces the objective's bounds before the first update of a run. `bounds` are None until then."""

    def __init__(self, config: Config, notify: Callable[[str], None]) -> None:
        self._config, self._notify = config, notify
        self.bounds: Mapping[str, float] | None = None
        self._kept: dict[str, float] = {}  # shares of tokens, to log at the step of calibration

    @torch.no_grad()
    def before_updates(self, learner: PolicyLearner, batches: Sequence[MiniBatch], step: int) -> None:
        """Raises `TrimtabError` if the first batch is too small."""
        if self.bounds is not None:
            return
        # With one update per batch the proximal policy is the current policy, which is not updated yet.
        micros = [micro for batch in batches for micro in batch]
        scored = [(micro, learner.logp(micro) if micro.proximal is None else micro.proximal) for micro in micros]
        if not scored:
            raise TrimtabError("calibrate: the first batch has no usable response to take bounds from")
        published = learner.objective
        observed = reduce(add, (Observed.of(proximal, m.behavior, m.on_policy, turn=m.turn) for m, proximal in scored))
        bounds = calibrated(published.name, observed)
        self._set_bounds(learner, bounds)
        kept, kept_published = _kept_share(learner.objective, scored), _kept_share(published, scored)
        self._kept = {"calibrate/kept": kept, "calibrate/kept_published": kept_published}
        values = ", ".join(f"{name} = {value:g}" for name, value in bounds.items())
        self._notify(
            f"calibrated at step 0 on {len(observed.sequence)} responses: {values} (keeps {kept:.1%} of their tokens; "
            f"the published bounds {kept_published:.1%})"
        )
        trainer = self._config.trainer
        lag = max(trainer.max_lag or 0, (trainer.sync_every or 1) - trainer.updates_per_step)
        if lag > 0:
            self._notify(
                f"caution: this first batch is fresh, later ones are up to {lag} updates older and will be rejected "
                "far more often; take bounds from a run's own trajectories instead (trimtab diagnose)"
            )
        for line in learner.objective.equation(self._config.advantage.kind).splitlines():
            self._notify(line)

    def _set_bounds(self, learner: PolicyLearner, bounds: Mapping[str, float]) -> None:
        learner.objective = from_section(self._config.objective.model_dump(), bounds)
        self.bounds = dict(bounds)

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        kept, self._kept = self._kept, {}  # cleared here only: a step with full memory is repeated
        return {**{f"calibrate/{name}": bound for name, bound in (self.bounds or {}).items()}, **kept}

    def state(self) -> Mapping[str, Any]:
        return {} if self.bounds is None else {"bounds": self.bounds}

    def load_state(self, learner: PolicyLearner, saved: Mapping[str, Any], sections: Sections) -> None:
        if "bounds" in saved:
            self._set_bounds(learner, saved["bounds"])


def _kept_share(objective: Objective, scored: Sequence[tuple[MicroBatch, torch.Tensor]]) -> float:
    """Returns the share of trained tokens that the objective's weight and masks keep before the first update."""
    rules = {"weight": objective.weight, "masks": objective.masks}
    corrected = [
        correct(logp, m.behavior, m.on_policy, **rules, current=logp, advantage=m.advantage, turn=m.turn)
        for m, logp in scored
    ]
    return 1.0 - reduce(add, (part.metrics for part in corrected)).finalize()["reject/tokens"]
