"""Features and trajectory rows of a step whose responses contain observations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.trajectories import multi_turn, trajectory

from trimtab.errors import TrimtabError
from trimtab.trainer.batch_preparation import Batch
from trimtab.trainer.features.feature import StepRecord
from trimtab.trainer.features.measurements import BitwiseCheck, LagMetrics
from trimtab.trainer.rollout.responses import RolloutStats
from trimtab.trainer.step_statistics import StepStatistics
from trimtab.types import Trajectory


def logps(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def record(rows: list[Trajectory], **statistics: Any) -> StepRecord:
    return StepRecord(1, 5, rows, RolloutStats(), StepStatistics(**statistics))


def test_equal_bits_are_asked_of_sampled_tokens_only() -> None:
    check = BitwiseCheck(print)
    rows = [multi_turn(0, "ab..c", version=3)]
    equal = record(rows, mismatch_logps={0: logps(-1, -1, -7, -8, -1)}, versions={0: 3})
    assert check.end_step(equal) == {"mismatch/confirmed": 3}
    unequal = record(rows, mismatch_logps={0: logps(-1, -1, -7, -8, -1.5)}, versions={0: 3})
    with pytest.raises(TrimtabError, match=r"1 of 3 log-probs .* \(largest difference 0.5\)"):
        check.end_step(unequal)


def test_the_age_of_an_observation_is_not_that_of_a_token() -> None:
    rows = [multi_turn(0, "ab..c", version=3), multi_turn(0, "d.e", version=5)]
    result = LagMetrics().end_step(record(rows))
    shares = {key: value for key, value in result.items() if key.startswith("lag/share/")}
    assert shares == {"lag/share/0": pytest.approx(2 / 5), "lag/share/2": pytest.approx(3 / 5)}


@pytest.mark.parametrize("policy", ["proximal", "current"])
def test_rows_of_the_trajectory_file_have_no_log_probs_at_observations(policy: str) -> None:
    batch = Batch([multi_turn(0, "a..b"), trajectory(0, [1, 2])], [], torch.zeros(2, 1), 0, 0.0)
    stats = StepStatistics(mismatch_logps={0: logps(-1, -2, -3, -4), 1: logps(-5, -6)}, versions={0: 1, 1: 1})
    first, second = batch.rows(stats, policy)
    written = first.logp_proximal if policy == "proximal" else first.logp_current
    assert written is not None
    assert np.isnan(written).tolist() == [False, True, True, False]
    assert written[[0, 3]].tolist() == [-1, -4]
    plain = second.logp_proximal if policy == "proximal" else second.logp_current
    assert plain is not None
    assert plain.tolist() == [-5, -6]
