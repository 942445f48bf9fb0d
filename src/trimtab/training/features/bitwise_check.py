"""Checks in every step that `numerics = "invariant"` holds: log-probs of sampler and trainer are equal bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trimtab.errors import TrimtabError
from trimtab.training.step_statistics import StepStatistics
from trimtab.types import Trajectory

NOT_CONFIRMED_MESSAGE = (
    "caution: no token of this batch was sampled under the weights it is trained with, so numerics = "
    '"invariant" was not confirmed (mismatch/confirmed)'
)


def check_bitwise_equal(trajectories: Sequence[Trajectory], stats: StepStatistics) -> int:
    """Returns the number of log-probs that were sampled and trained under the same weights.

    Raises:
        TrimtabError: one of them differs between sampler and trainer.
    """
    compared, unequal, worst = 0, 0, 0.0
    for row, logps in stats.mismatch_logps.items():
        completion = trajectories[row].completion
        same = completion.policy_version == stats.versions[row]
        compared += int(same.sum())
        differing = same & (completion.logp_behavior != logps)
        if differing.any():
            unequal += int(differing.sum())
            worst = max(worst, float(np.abs(completion.logp_behavior - logps)[differing].max()))
    if unequal:
        raise TrimtabError(
            f"{unequal} of {compared} log-probs are not the sampler's bit for bit (largest difference {worst:.3g}): "
            f'numerics = "invariant" does not hold here with {torch.get_num_threads()} threads; '
            "`trimtab doctor --bitwise` names the operation, fewer `threads` may help"
        )
    return compared
