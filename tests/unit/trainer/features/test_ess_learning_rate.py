"""The learning rate that follows the effective sample size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.trajectories import trajectory

from trimtab.api import train
from trimtab.runs.reader import read_run
from trimtab.trainer.batching import to_tensors
from trimtab.trainer.config import EssConfig
from trimtab.trainer.features.ess_learning_rate import SampleSizeRate, relative_sample_size
from trimtab.trainer.features.feature import ForwardPass
from trimtab.trainer.models.logprobs import TokenScores
from trimtab.trainer.ranks import current_ranks


def test_hand_numbers() -> None:
    log = torch.tensor([0.0, 0.5, -1.0, 2.0])
    assert relative_sample_size(log) == pytest.approx(0.46310702)
    assert relative_sample_size(log + 700) == pytest.approx(0.46310702)
    assert relative_sample_size(torch.zeros(5)) == 1.0
    assert relative_sample_size(torch.tensor([90.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert relative_sample_size(torch.zeros(0)) == 1.0


@pytest.mark.parametrize(
    ("base", "rule", "expected"),
    [(1.0, "sqrt", 0.68051967), (1.0, "linear", 0.46310702), (0.4, "sqrt", 1.0), (0.8, "linear", 0.57888378)],
)
def test_the_factor_of_an_update(base: float, rule: str, expected: float) -> None:
    """Log-weights 0, .5, -1 and 2 of four responses, in two micro-batches."""
    feature = SampleSizeRate(EssConfig(base=base, rule=rule), current_ranks())
    rows = [trajectory(0, [1] * (n + 1)) for n in range(4)]
    for _ in range(2):  # nothing is left over from the update before
        for chosen, logs in (((0, 1, 2), (0.0, 0.5, -1.0)), ((3,), (2.0,))):
            micro = to_tensors(rows, chosen, 0, torch.device("cpu"))
            share = torch.tensor(logs)[:, None] / micro.mask.sum(1, keepdim=True)
            logp = torch.where(micro.mask, micro.behavior + share, float("nan"))
            feature.after_score(ForwardPass(micro, "train"), TokenScores(logp, None))
            feature.after_score(ForwardPass(micro, "probe"), TokenScores(logp + 9, None))
        assert feature.learning_rate_factor() == pytest.approx(expected, rel=1e-5)


@pytest.mark.e2e
def test_a_stale_run_lowers_its_rate(tmp_path: Path) -> None:
    overrides = ["trainer.steps=2", "trainer.minibatches=4", "optim.warmup=0", "optim.lr=0.01", "optim.ess.base=1.0"]
    train("laboratory", overrides=overrides, out=tmp_path / "run")
    run = read_run(tmp_path / "run")
    rates, factors = run.series("optim/lr")[1], run.series("optim/ess_factor")[1]
    assert all(0 < factor < 1 for factor in factors)
    assert all(0 < rate < 0.01 for rate in rates)
