"""Checks in every step that `numerics = "invariant"` holds: log-probs of sampler and trainer are equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from trimtab.errors import TrimtabError
from trimtab.trainer.features.feature import Feature, StepRecord

NOT_CONFIRMED_MESSAGE = (
    "caution: no token of this batch was sampled under the weights it is trained with, so numerics = "
    '"invariant" was not confirmed (mismatch/confirmed)'
)


class BitwiseCheck(Feature):
    """Compares the log-probs that were sampled and trained under the same weights, in every step."""

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
                "tools/first_difference.py of the repository names the module, fewer `threads` may help"
            )
        if compared == 0 and record.step == 1:
            self._notify(NOT_CONFIRMED_MESSAGE)
        return {"mismatch/confirmed": compared}
