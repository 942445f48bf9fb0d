"""The numbers of one step, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.trajectories import multi_turn, trajectory

from trimtab.trainer.environments.episode import EpisodeCounts
from trimtab.trainer.packing import to_tensors
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.trainer.step_statistics import (
    StepStatistics,
    batch_metrics,
    rollout_metrics,
    speed_metrics,
    update_metrics,
)


def test_lengths_ages_and_entropies_count_sampled_tokens() -> None:
    rows = [multi_turn(0, "ab..c", reward=1.0, version=3), multi_turn(0, "d...efg", version=5)]
    result = batch_metrics(rows, version=7)
    assert (result["length/mean"], result["length/max"], result["length/episode"]) == (3.5, 4, 6.0)
    assert (result["lag/mean"], result["lag/max"]) == (pytest.approx((3 * 4 + 4 * 2) / 7), 4)
    assert result["entropy/rollout"] == 0.5
    assert "length/episode" not in batch_metrics([trajectory(0, [1, 2])], version=0)


def test_the_share_of_responses_that_reached_the_limit() -> None:
    rows = [trajectory(0, [1, 2], finish=finish) for finish in ("stop", "length", "stop", "stop")]
    assert batch_metrics(rows, version=0)["length/truncated"] == 0.25


def test_updates_above_the_bound_are_counted() -> None:
    stats = StepStatistics(grad_norms=[0.5, 2.0, 1.0, 6.5])
    result = update_metrics(stats, mismatch_policy="current", grad_clip=1.0)
    assert result["optim/grad_norm"] == pytest.approx(2.5)
    assert result["optim/grad_clipped"] == 0.5, "2 and 6.5; a norm equal to the bound stays as it is"
    assert "optim/grad_clipped" not in update_metrics(StepStatistics(), mismatch_policy="current", grad_clip=1.0)


def test_both_parts_of_the_drift_of_a_response_by_hand() -> None:
    """Three tokens of which two are trained, and an external trace. Log-ratios .1 and .3, then -.4 and -.2."""
    rows = [multi_turn(0, "a.b"), trajectory(1, [4])]
    rows[1] = replace(rows[1], off_policy=True)
    micro = to_tensors(rows, [0, 1], 0, torch.device("cpu"))
    shift = lambda *values: micro.behavior + torch.tensor([[*values], [5.0, 0, 0]])  # noqa: E731
    stats = StepStatistics()
    stats.add_drifts(micro.with_scores(proximal=shift(0.1, 9.0, 0.3)), shift(0.2, 9.0, 0.2))
    stats.to_cpu()
    assert stats.drifts[0].tolist() == pytest.approx([0.2, 0.0], abs=1e-6)
    stats.add_drifts(micro.with_scores(proximal=shift(0.1, 9.0, 0.3)), shift(-0.3, 7.0, 0.1))  # a later epoch
    stats.to_cpu()
    assert stats.drifts[0].tolist() == pytest.approx([0.2, -0.3], abs=1e-6)
    assert np.isnan(stats.drifts[1]).all()
    result = update_metrics(stats, mismatch_policy="proximal", grad_clip=1.0)
    assert (result["drift/mismatch_q05"], result["drift/staleness_q95"]) == pytest.approx((0.2, -0.3), abs=1e-6)
    stats.drifts[2] = np.array([0.4, -0.1])
    result = update_metrics(stats, mismatch_policy="proximal", grad_clip=1.0)
    assert (result["drift/mismatch_q05"], result["drift/mismatch_q50"]) == pytest.approx((0.21, 0.3), abs=1e-6)
    assert "drift/mismatch_q50" not in update_metrics(StepStatistics(), mismatch_policy="current", grad_clip=1.0)


def test_shares_of_episodes_and_of_calls() -> None:
    stats = RolloutStats(episodes=EpisodeCounts(episodes=8, calls=10, tool_errors=4, void=2, failed=1))
    result = rollout_metrics(stats, dropped=0)
    assert (result["episode/calls"], result["episode/tool_errors"], result["episode/void"]) == (1.25, 0.4, 0.25)
    assert result["episode/failed"] == 1


def test_tokens_per_second_and_memory_in_bytes() -> None:
    result = speed_metrics({"collect": 4.0, "update": 1.5, "proximal": 0.5}, rollout_tokens=100, train_tokens=60)
    assert (result["tokens_per_second/rollout"], result["tokens_per_second/train"]) == (25.0, 30.0)
    assert 50e6 < result["memory/rss"] < 50e9
