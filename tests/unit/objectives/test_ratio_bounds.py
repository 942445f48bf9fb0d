"""M2PO's masking form: which tokens are left out, on ties, at the budget, and in any order or split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from trimtab.objectives import PolicyLogps, objective


def run(log: Tensor, advantage: Tensor, tau: float, mask: Tensor | None = None):
    """Loss, gradient (batch, time) and metrics of tokens whose log current/behavior is `log`."""
    behavior = torch.full_like(log, -1.0)
    current = (behavior + log).requires_grad_()
    mask = torch.ones_like(log, dtype=torch.bool) if mask is None else mask
    out = objective("m2po", form="mask", tau=tau)(PolicyLogps(current, behavior, mask), advantage)
    out.loss.backward()
    return out.loss.item(), current.grad, out.metrics.finalize()


def limit(values: list[float], tau: float) -> float:
    """The limit on |log-ratio| for these log-ratios of one row."""
    log = torch.tensor([values], dtype=torch.float64)
    logps = PolicyLogps(log, torch.zeros_like(log), torch.ones_like(log, dtype=torch.bool))
    state = objective("m2po", form="mask", tau=tau).prepare(logps, torch.ones(1, 1))
    return state.second_moment_limit(tau).item()


def kept_one_by_one(values: list[float], tau: float) -> list[bool]:
    """The rule as the paper words it: take the largest away until the mean of the rest is at most tau."""
    left = sorted({value**2 for value in values})
    while left:
        rest = [value**2 for value in values if value**2 <= left[-1]]
        if math.fsum(rest) <= tau * len(rest):
            return [value**2 <= left[-1] for value in values]
        left.pop()
    return [False] * len(values)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_are_left_out_and_stay_in_the_denominator(sign):
    # Squares .01 .04 .09 .25: their running means are .01 .025 .0467 .0975.
    log = torch.tensor([[0.1, 0.3], [-0.2, 0.5]], dtype=torch.float64)
    loss, grad, metrics = run(log, torch.full((2, 1), sign, dtype=torch.float64), tau=0.05)
    e = math.exp
    assert loss == pytest.approx(-sign * (e(0.1) + e(0.3) + e(-0.2)) / 4)
    expected = torch.tensor([[e(0.1), e(0.3)], [e(-0.2), 0.0]], dtype=torch.float64)
    assert_close(grad, -sign * expected / 4)
    assert metrics["clip/second_moment"] == 0.25


def test_reaching_tau_exactly_is_within_it():
    values = [0.5, -0.5, 1.0, 1.0]  # running means .25, .25, .5, .625: all exact in binary
    below = math.nextafter
    assert limit(values, 0.625) == 1.0
    assert limit(values, below(0.625, 0)) == 0.5
    assert limit(values, 0.25) == 0.5
    assert limit(values, below(0.25, 0)) < 0
    assert limit([0.5], 0.25) == 0.5
    assert limit([0.0, 0.0], 1e-9) == 0.0


values = st.lists(
    st.one_of(st.floats(-2, 2).map(lambda x: round(x, 3)), st.sampled_from([0.0, 0.25, -0.25, 0.5])),
    min_size=1,
    max_size=40,
)


@given(values=values, tau=st.sampled_from([0.003, 0.04, 0.3, 2.0]), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_rest_is_within_tau_and_no_more_fits(values, tau, seed):
    log = torch.tensor([values], dtype=torch.float64)
    bound = limit(values, tau)
    kept = log.abs() <= bound
    assert kept[0].tolist() == kept_one_by_one(values, tau)
    if kept.any():
        assert log[kept].square().mean() <= tau * (1 + 1e-12)
    if not kept.all():
        smallest_out = log.abs()[~kept].min()
        assert log[log.abs() <= smallest_out].square().mean() > tau
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    assert limit([values[i] for i in order], tau) == bound
