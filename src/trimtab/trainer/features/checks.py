"""Features that end a run if engine and trainer disagree: the canary, and the check of invariant numerics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.trainer.features.feature import Feature, PolicyLearner, Sections, StepRecord
from trimtab.trainer.rollout.canary import Canary


class CanaryFeature(Feature):
    """Gives the canary (`[engine.canary]`) the log-probs that engines must have after each weight update."""

    def __init__(self, canary: Canary) -> None:
        self._canary = canary

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        return self._canary.metrics()

    def publish_options(self, model: nn.Module, version: int) -> Mapping[str, Any]:
        return {"expected": self._canary.predict(model, version)}

    def state(self) -> Mapping[str, Any]:
        return {"canary": self._canary.state()}

    def load_state(self, learner: PolicyLearner, saved: Mapping[str, Any], sections: Sections) -> None:
        self._canary.load_state(saved["canary"])


class BitwiseCheck(Feature):
    """Checks in every step that sampler and trainer computed equal log-probs under the same weights."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        """Returns the number of log-probs that were compared. Raises `TrimtabError` if one of them differs."""
        compared, unequal, worst = 0, 0, 0.0
        for row, logps in record.statistics.mismatch_logps.items():
            completion = record.trajectories[row].completion
            same = completion.sampled & (completion.policy_version == record.statistics.versions[row])
            compared += int(same.sum())
            differing = same & (completion.logp_behavior != logps)
            if differing.any():
                unequal += int(differing.sum())
                worst = max(worst, float(np.abs(completion.logp_behavior - logps)[differing].max()))
        if unequal:
            raise TrimtabError(
                f"{unequal} of {compared} log-probs are not the sampler's bit for bit (largest difference {worst:.3g}):"
                f' numerics = "invariant" does not hold here with {torch.get_num_threads()} threads; '
                "docs/bitwise.md says how to find the module, fewer `threads` may help"
            )
        if compared == 0 and record.step == 1:
            self._notify(
                "caution: no token of this batch was sampled under the weights it is trained with, so numerics = "
                '"invariant" was not confirmed (mismatch/confirmed)'
            )
        return {"mismatch/confirmed": compared}
