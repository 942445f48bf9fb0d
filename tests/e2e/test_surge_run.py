"""The surge schedule in real training: the rate follows the lengths, and a resumed run equals an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.run_results import Messages, untimed, weights

from trimtab.trainer.config import Config, load_config
from trimtab.trainer.run import train

pytestmark = pytest.mark.e2e


def recipe(steps: int, *changes: str) -> Config:
    small = (
        f"trainer.steps={steps}",
        "trainer.prompts=4",
        "trainer.samples=4",
        "trainer.minibatches=2",
        "optim.warmup=0",
        "optim.schedule=surge",
        "optim.surge.period=0.4",
        "eval.problems=4",
        "checkpoint.every=1",
        "checkpoint.keep=99",
        "log.trajectories_every=0",
    )
    return load_config("laboratory", [*small, *changes])


# Lengths of so few responses vary by a few percent from step to step: this factor is passed by chance, always alike.
DETECT = ("optim.surge.baseline=3", "optim.surge.window=2", "optim.surge.factor=1.001")


@pytest.mark.slow
def test_the_logged_rate_follows_the_surge_and_survives_resuming_at_any_step(tmp_path: Path) -> None:
    whole, messages = tmp_path / "whole", Messages()
    train(recipe(14, *DETECT), out=whole, observer=messages)
    expected = untimed(whole, "eval/")
    surge = next(row["optim/surge_step"] for row in expected if "optim/surge_step" in row)
    assert 3 < surge <= 8, "the run must pass through before, at and after the surge"
    assert [line for line in messages.lines if line.startswith("length surge")] != []
    lengths = [row["length/mean"] for row in expected]
    means = {step: (lengths[step - 2] + lengths[step - 1]) / 2 for step in range(4, 15)}
    assert surge == next(step for step, mean in means.items() if mean > 1.001 * sum(lengths[:3]) / 3)
    for row in expected:
        halvings = int((row["step"] - surge) / (0.4 * surge) + 1e-9) if row["step"] > surge else 0
        assert row["optim/lr"] == max(0.1, 0.5**halvings) * recipe(14).optim.lr
        assert ("optim/surge_step" in row) == (row["step"] >= surge)
    assert expected[-1]["optim/lr"] < expected[0]["optim/lr"]

    for stop in (2, surge - 1, surge):
        part = tmp_path / f"stopped-after-{stop}"
        train(recipe(stop, *DETECT), out=part)
        train(recipe(14, *DETECT), out=part, resume=True)
        assert untimed(part, "eval/") == expected
        resumed, uninterrupted = weights(part), weights(whole)
        assert all(torch.equal(resumed[name], uninterrupted[name]) for name in uninterrupted)


def test_a_fixed_step_and_another_schedule(tmp_path: Path) -> None:
    train(recipe(5, "optim.surge.at=2"), out=tmp_path / "fixed")
    lr = recipe(5).optim.lr
    # Period 0.4 x 2 = 0.8 steps: one halving in step 3 (1 / 0.8), two in 4 (2.5), three in 5 (3.75).
    assert [row["optim/lr"] for row in untimed(tmp_path / "fixed", "eval/")] == [lr, lr, lr / 2, lr / 4, lr / 8]
    constant = recipe(2).model_copy(update={"optim": load_config("laboratory", ["optim.warmup=0"]).optim})
    train(constant, out=tmp_path / "constant")
    assert all("optim/surge_step" not in row for row in untimed(tmp_path / "constant", "eval/"))
