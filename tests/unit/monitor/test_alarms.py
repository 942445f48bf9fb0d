"""The rules of the monitor on planted histories: each fires for its reason and is silent for its neighbors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from trimtab.monitor.alarms import WINDOW, History, Step, alarms
from trimtab.monitor.metrics_of_step import MeanRatio

NUMBERS = {"mismatch/ess_token": 0.99, "mismatch/tokens": 1000.0, "nonfinite": 0.0, "response/length": 100.0}


def ratio(mean: float = 1.0, spread: float = 0.1, responses: int = 100, tokens: int = 10) -> MeanRatio:
    """Responses of equal length, half of them above the mean and half below."""
    excess = [tokens * (mean - 1 + sign * spread) for sign in (1, -1)]
    half = responses / 2
    sums = {
        "excess": half * sum(excess),
        "tokens": responses * tokens,
        "excess_square": half * sum(one * one for one in excess),
        "excess_tokens": half * sum(one * tokens for one in excess),
        "tokens_square": responses * tokens**2,
        "responses": responses,
    }
    return MeanRatio(**{name: torch.tensor(float(value), dtype=torch.float64) for name, value in sums.items()})


def history(k3: Sequence[float] = (1e-4,) * 50, of: MeanRatio | None = None, **figures: Sequence[float]) -> list[Step]:
    columns = {name.replace("__", "/"): values for name, values in figures.items()}
    return [
        Step(
            number,
            {**NUMBERS, "mismatch/k3": value, **{name: values[number] for name, values in columns.items()}},
            of or ratio(),
        )
        for number, value in enumerate(k3)
    ]


def names(steps: Sequence[Step]) -> list[str]:
    return [one.name for one in alarms(steps)]


SLOW = [1e-3 * 1.05**step for step in range(60)]


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({}, []),
        ({"k3": [1e-12] * 50}, []),
        ({"k3": [1e-4]}, []),
        # One step, or a smaller jump, is noise; a step without k3 is no second step of a jump.
        ({"k3": [1e-4] * 10 + [1e-2, 1e-4], "age": [0.0] * 12}, []),
        ({"k3": [1e-4] * 9 + [2e-4, 7e-4, 7e-4], "age": [0.0] * 12}, []),
        ({"k3": [1e-4] * 10 + [5.0, math.nan], "age": [0.0] * 12}, []),
        ({"k3": [1e-4] * 8 + [math.nan, 1e-4, 1e-3, 3e-3], "age": [0.0] * 12}, ["undelivered"]),
        # Rounding of float32 is no reference.
        ({"k3": [1e-13] * 5 + [9e-13, 9e-13], "age": [0.0] * 7}, []),
        ({"k3": [1e-13] * 5 + [1e-5, 1e-5], "age": [0.0] * 7}, ["undelivered"]),
        ({"k3": SLOW}, ["k3-rising"]),
        ({"k3": [value / 100 for value in SLOW]}, []),  # below what dense models have
        ({"k3": [0.12] * 5}, ["k3-large"]),
        ({"k3": [0.12] * 4}, []),
        ({"k3": [0.08] * 5}, []),
        # A step has a standard error of .1 / 10, ten steps one of .01 / sqrt(10) = .0032: six of them are .019.
        ({"of": ratio(mean=0.975)}, ["mean-ratio"]),
        ({"of": ratio(mean=0.985)}, []),
        ({"of": ratio(mean=0.996, spread=1e-4)}, []),  # certain, and too small to matter
        ({"of": ratio(mean=0.975), "mismatch__ess_token": [0.4] * 50}, ["ess"]),  # an error of a mean says nothing
        ({"mismatch__ess_token": [0.4] * 50}, ["ess"]),
        ({"mismatch__ess_token": [0.6] * 50}, []),
        ({"grad_norm": [0.07] * 25 + [0.02] * 25}, ["gradient-norm"]),
        ({"grad_norm": [0.07] * 25 + [0.03] * 25}, []),
        ({"grad_norm": [0.07] * 49 + [math.nan]}, []),
        ({"grad_norm": [0.02] * 10 + [0.07] * 20 + [0.02] * 20}, ["gradient-norm"]),  # a sudden fall
        ({"k3": [1e-4] * 200, "grad_norm": list(np.linspace(0.07, 0.01, 200))}, []),  # a slow one
        ({"reward__mean": [0.6] * 30 + [0.29] * 20}, ["reward-collapse"]),
        ({"reward__mean": [0.6] * 30 + [0.31] * 20}, []),
        ({"k3": [1e-4] * 39, "reward__mean": [0.6] * 19 + [0.1] * 20}, []),
        # Means .6 and .25 of 20 steps with a spread of .8 have a standard error of .26 together.
        ({"reward__mean": [(0.6 if step < 30 else 0.25) + 0.8 * (-1) ** step for step in range(50)]}, []),
        ({"response__length": [100.0] * 45 + [201.0] * 5}, ["length"]),
        ({"response__length": [100.0] * 45 + [200.0] * 5}, []),
        ({"response__truncated": [0.02] * 45 + [0.25] * 5}, ["truncation"]),
        ({"response__truncated": [0.22] * 50}, []),
        ({"nonfinite": [2.0] * 50}, ["non-finite"]),
        ({"nonfinite": [1.0] * 50}, []),
    ],
)
def test_each_rule_fires_for_its_reason_and_is_silent_for_its_neighbors(
    figures: dict[str, Any], expected: list[str]
) -> None:
    assert names(history(**figures)) == expected


@pytest.mark.parametrize(
    ("ages", "name"), [([0.0] * 12, "undelivered"), ([0.0] * 10 + [1.0, 2.0], "stale"), ([math.nan] * 12, "k3-jump")]
)
def test_two_steps_far_above_all_before(ages: list[float], name: str) -> None:
    steps = history([1e-4] * 10 + [1e-3, 3e-3], age=ages)
    assert names(steps) == [name]
    assert alarms(steps)[0].step == 11
    assert names(steps[:-1]) == []


def shifted(distance: float, ages: Sequence[float], steps: int = 3) -> list[Step]:
    """k3 of logarithms 0 and .6 in turn, and steps above its mean by `distance`."""
    before = [1e-3, 1e-3 * math.exp(0.6)] * 20
    return history([*before, *[1e-3 * math.exp(0.3 + distance)] * steps], age=ages)


# The 37 values before have deviation .304, means of three of them (.2 or .4) .102, which is below .25 / sqrt(3) = .144.
# With sqrt(1 + 3 / 37) an error is .150.
@pytest.mark.parametrize(
    ("ages", "name"),
    [([0.0] * 43, "undelivered"), ([0.0] * 40 + [1.0, 2.0, 3.0], "stale"), ([math.nan] * 43, "k3-jump")],
)
def test_three_steps_beyond_the_spread_of_such_means_before(ages: list[float], name: str) -> None:
    steps = shifted(0.71, ages)
    assert [(one.name, one.status) for one in alarms(steps)] == [(name, "note")]
    assert names(shifted(0.67, ages)) == []
    assert names(steps[:-1]) == []
    assert names(steps[-22:]) == []  # 19 steps before them
    assert names(shifted(5.0, ages, steps=1)) == []  # one step counts as four deviations: a third of them is .405


def test_a_gradient_that_gets_smaller_because_prompts_are_learned() -> None:
    fall = [0.07] * 25 + [0.02] * 25
    noise = [0.05, -0.05] * 25
    # Means of 20 steps with a spread of .05 differ by .016 (one standard error): three are .048.
    for rise, expected in ((0.0, ["gradient-norm"]), (0.03, ["gradient-norm"]), (0.2, [])):
        rewards = [0.4 + spread + rise * (step >= 30) for step, spread in enumerate(noise)]
        assert names(history(grad_norm=fall, reward__mean=rewards)) == expected


def test_a_gradient_of_zero_is_noted() -> None:
    def zeros(last: float, count: int = 20) -> list[Step]:
        return history(grad_norm=[0.5] * (50 - count) + [0.0] * (count - 1) + [last])

    assert "gradient-zero" in names(zeros(0.0))
    assert "gradient-zero" not in names(zeros(0.0, count=19))
    assert "gradient-zero" not in names(zeros(1e-9))
    assert "gradient-zero" not in names(zeros(float("nan")))


def test_a_gradient_ten_times_that_of_the_first_steps_is_noted_unless_the_reward_rises() -> None:
    def explosion(after: float, rise: float = 0.0, before: int = 30) -> list[Step]:
        rewards = [0.4 + 0.05 * (-1) ** step + rise * (step >= before) for step in range(before + 20)]
        norms = [1.0] * before + [after] * 20
        return history([1e-4] * len(norms), grad_norm=norms, reward__mean=rewards)

    assert names(explosion(10.0)) == ["gradient-explosion"]
    assert names(explosion(9.9)) == []
    assert names(explosion(10.0, before=3)) == ["gradient-explosion"]
    assert names(explosion(10.0, before=2)) == []
    assert names(explosion(100.0, rise=0.3)) == []  # three standard errors are .05
    assert names(history(grad_norm=[0.0] * 30 + [1.0] * 20)) == []  # nothing was learned at first
    known, unknown = (alarms(steps)[0].detail for steps in (explosion(10.0), history(grad_norm=[1.0] * 30 + [50] * 20)))
    assert known == "the gradient norm rose from 1 to 10, medians of the first 20 and the last 20 steps"
    assert unknown.endswith("steps; whether the reward rose is not known")


def test_the_best_reward_is_remembered_where_it_falls_slowly() -> None:
    rewards = [0.1] * 30 + [0.9] * 20 + [0.9 * 0.99**step for step in range(100)]
    steps, kept = history([1e-4] * 150, reward__mean=rewards), History()
    for step in steps:
        kept.add(step)
    assert [step.number for step in kept.steps()] == [*range(20), *range(30, 50), *range(110, 150)]
    assert alarms(kept.steps())[0].detail == (  # .9 * .99^80 * (1 - .99^20) / .2
        "the reward fell from 0.9 to 0.367, means of the best 20 steps and the last"
    )


def test_the_standard_error_of_the_mean_ratio() -> None:
    values = ratio(mean=1.02, spread=0.1, responses=WINDOW).summary()
    assert float(values[""]) == pytest.approx(1.02)
    assert float(values["/error"]) == pytest.approx(0.1 / math.sqrt(WINDOW - 1))
