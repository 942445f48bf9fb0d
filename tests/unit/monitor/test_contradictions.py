"""Logged means that exclude each other are found; those of any real log-probs never do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.monitor.curves import INEQUALITIES, Inequality, contradictions, curves_of, known_scalars
from trimtab.monitor.scalars import judge, terminal_lines

FIGURES: Mapping[str, Callable[[np.ndarray], float]] = {
    "k3": lambda d: float((np.expm1(d) - d).mean()),
    "k1": lambda d: float(-d.mean()),
    "k2": lambda d: float(np.square(d).mean() / 2),
    "abs_difference": lambda d: float(np.abs(d).mean()),
    "mult_prob_error": lambda d: float(np.exp(np.abs(d)).mean()),
    "ratio_mean": lambda d: float(np.exp(d).mean()),
}
NEMO = {"k3": "gen_kl_error", "mult_prob_error": "token_mult_prob_error", "ratio_mean": "sampling_importance_ratio"}


@given(st.lists(st.floats(-20, 5), min_size=1, max_size=40), st.sampled_from([math.inf, 5.0, 1.0]))
def test_every_inequality_holds_for_any_log_ratios_and_for_truncated_weights(values: list[float], cap: float) -> None:
    d = np.array(values)
    figures = {name: of(d) for name, of in FIGURES.items()}
    figures["ratio_mean"] = float(np.minimum(np.exp(d), cap).mean())
    for rule in INEQUALITIES:
        assert figures[rule.figure] >= rule.least(figures[rule.other]) - 1e-9 * max(1.0, figures[rule.figure]), rule


@pytest.mark.parametrize("rule", INEQUALITIES, ids=lambda rule: rule.text)
def test_each_inequality_is_reached(rule: Inequality) -> None:
    """Log-ratios that are all equal leave nothing between both sides, so that no larger bound would hold."""
    equal = [np.full(3, value) for value in (-0.5, 0.0, 0.5)]
    assert min(abs(FIGURES[rule.figure](d) - rule.least(FIGURES[rule.other](d))) for d in equal) < 1e-12


def test_a_mean_ratio_that_counts_padding_is_a_finding() -> None:
    d = 0.05 * np.random.default_rng(0).normal(size=1000)
    right = {name: FIGURES[quantity](d) for quantity, name in NEMO.items()}
    rows = [{"step": step, **right} for step in range(50)]
    assert not judge(rows).contradictions
    assert any(line.startswith("ok") for line in terminal_lines(judge(rows), Path()))
    for row in rows[10:]:
        row["sampling_importance_ratio"] *= 0.06  # divided by all tokens, of which 6% are real
    report = judge(rows)
    found = {(one.figure, one.other): one for one in report.contradictions}
    one = found["gen_kl_error", "sampling_importance_ratio"]
    assert (one.step, one.count) == (10, 40)
    assert one.least == pytest.approx(0.06 - 1 - math.log(0.06), rel=0.01)  # 1.87
    assert not any(line.startswith("ok") for line in terminal_lines(report, Path()))


def test_two_decimals_are_no_contradiction() -> None:
    rng = np.random.default_rng(1)
    for spread in (0.003, 0.03, 0.1, 0.5):
        d = spread * rng.normal(size=500)
        row = {"step": 0.0} | {name: round(FIGURES[quantity](d), 2) for quantity, name in NEMO.items()}
        assert not list(contradictions([row], curves_of([row])[1]))


def test_means_over_other_tokens_are_not_compared() -> None:
    """TRL's ratio may be that of whole responses; a product of many tokens may be small where k3 is."""
    row = {"step": 0.0, "sampling/sampling_logp_difference/mean": 0.01, "sampling/importance_sampling_ratio/mean": 0.06}
    assert not list(contradictions([row], curves_of([row])[1]))
    assert {scalar.over for scalar in known_scalars()} == {"", "tokens", "responses"}


def test_a_bound_beyond_the_largest_float_is_a_finding() -> None:
    row = {"step": 0.0, "rollout_corr/kl": -1000.0, "rollout_corr/k3_kl": 0.01}
    (one,) = judge([row]).contradictions
    assert (one.other_value, one.least) == (-1000.0, math.exp(709))
