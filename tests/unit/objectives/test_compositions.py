"""Objectives from parts: what a part would ignore or misread is refused in one line, what is meaningful is trained."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from jaxtyping import config
from torch.testing import assert_close

from trimtab.errors import TrimtabError
from trimtab.objectives import (
    OPSM,
    Aggregation,
    Band,
    Clipped,
    LogProb,
    Objective,
    PolicyLogps,
    Ratio,
    Regression,
    Reinforce,
    SecondMoment,
    Shaped,
    Unclipped,
    Weight,
    objective,
)

SEQUENCE = Ratio("sequence", "behavior")
ROWS = Aggregation("trained-mean-token-sum")


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({"ratio": Ratio("token", "behavior"), "surrogate": Regression()}, 'token level: use Ratio."sequence", "behav'),
        ({"ratio": Ratio("geometric"), "surrogate": Regression()}, 'geometric level: use Ratio."sequence", "proximal"'),
        (
            {"ratio": SEQUENCE, "surrogate": Regression(), "aggregation": Aggregation("seq-mean-token-mean")},
            "divides a response's square by its length already",
        ),
        ({"ratio": Ratio("sequence"), "surrogate": LogProb()}, "LogProb has no ratio"),
        ({"ratio": Ratio("token", "behavior"), "surrogate": LogProb()}, "LogProb has no ratio"),
        ({"ratio": Ratio(), "surrogate": Shaped(), "weight": Weight()}, "tokens without a behavior policy"),
        ({"ratio": Ratio(), "surrogate": Shaped(), "masks": (Band("token", 0.5, 2.0),)}, "without a behavior policy"),
        ({"ratio": Ratio("token", "behavior"), "surrogate": Clipped(), "weight": Weight()}, "already contains"),
        ({"ratio": Ratio(), "surrogate": Clipped(), "advantage": "grop"}, "unknown advantage 'grop' .did you mean 'gr"),
    ],
)
def test_dead_and_contradictory_parts_are_refused(parts, line):
    with pytest.raises(TrimtabError, match=line) as error:
        Objective("mine", **parts)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({"surrogate": Clipped}, "surrogate = .*Clipped.* is not an instance of Surrogate"),
        ({"weight": 2.0}, "weight = 2.0 is not an instance of Weight"),
        ({"ratio": "token"}, "ratio = 'token' is not an instance of Ratio"),
        ({"masks": [OPSM(0.1)]}, "must be a tuple of rejection rules"),
        ({"masks": (Weight(),)}, "must be a tuple of rejection rules"),
    ],
)
def test_values_that_are_not_parts_are_refused_without_type_checking(monkeypatch, parts, line):
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    with pytest.raises(TrimtabError, match=line):
        Objective("mine", **{"ratio": Ratio(), "surrogate": Clipped(), **parts})


def test_a_rule_that_reads_what_there_is_not_is_refused():
    class Odd(Band):
        reads = frozenset({"curent"})

    with pytest.raises(TrimtabError, match=r"band_token reads 'curent' .did you mean 'current'"):
        Objective("mine", Ratio(), Clipped(), masks=(Odd("token", 0.5, 2.0),))


def run(obj: Objective, ratio: float = 1.5, rho: float = 2.0, advantage: float = 1.0):
    """Loss and slopes of two tokens: the first has these ratios current/proximal and proximal/behavior, the other 1."""
    behavior = torch.tensor([[-2.0, -2.0]], dtype=torch.float64)
    proximal = behavior + torch.tensor([[math.log(rho), 0.0]])
    current = (proximal + torch.tensor([[math.log(ratio), 0.0]])).requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    out = obj(PolicyLogps(current, behavior, mask, proximal), torch.tensor([[advantage]], dtype=torch.float64))
    out.loss.backward()
    assert current.grad is not None
    return out.loss.item(), current.grad[0].tolist()


def test_the_regression_may_be_on_the_proximal_policy():
    """REBEL's form: the square of what was learned since pi_old, exact at the sequence's log-ratio log 1.5."""
    obj = Objective("mine", Ratio("sequence"), Regression(2.0), aggregation=ROWS)
    residual = 2.0 * math.log(1.5) - 1.0
    loss, slopes = run(obj)
    assert loss == pytest.approx(residual**2)
    assert slopes == pytest.approx([2 * 2.0 * residual] * 2)
    assert not obj.single_behavior
    assert objective("oapl").single_behavior


def test_logprob_may_be_weighted_and_masked():
    """REINFORCE on old data: the weight is all the correction it has, and the mask leaves the other token."""
    weighted = Objective("mine", Ratio(), LogProb(), Weight("token", "truncate", max=1.6))
    assert run(weighted)[1] == pytest.approx([-1.6 / 2, -1 / 2])
    masked = replace(weighted, weight=None, masks=(Band("token", 0.5, 1.9),))
    assert run(masked)[1] == pytest.approx([0.0, -1 / 2])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_second_moment_is_judged_at_its_own_level(level):
    """One harmful log-ratio, log 3 at both tokens of a sequence and log 3 / 2 in its mean: all are beyond tau."""
    log = {"token": math.log(3.0), "sequence": math.log(3.0), "geometric": math.log(3.0) / 2}[level]
    obj = Objective("mine", Ratio(level, "behavior"), SecondMoment(log**2 * 1.01))
    loss, _ = run(obj)
    other = 1.0 if level == "token" else math.exp(log)
    assert loss == pytest.approx(-(math.exp(log) + other) / 2)
    assert -run(replace(obj, surrogate=SecondMoment(log**2 * 0.01)))[0] < -loss


def test_a_ceiling_bounds_the_ratio_of_a_whole_response():
    loss, slopes = run(Objective("mine", Ratio("sequence", "behavior"), Reinforce(2.5)))
    assert slopes == pytest.approx([-2.5 / 2] * 2)  # the product is 3
    assert math.isfinite(loss)


def test_a_mask_over_current_and_behavior_costs_no_proximal_pass():
    """OPSM on a bypass objective: `proximal` is neither needed nor looked at."""
    obj = Objective("mine", Ratio("token", "behavior"), Unclipped(), masks=(OPSM(0.1),))
    assert obj.needs == {"behavior"}
    assert obj.prepare_needs == frozenset()
    assert replace(obj, aggregation=Aggregation(denominator="kept")).prepare_needs == {"current"}
    mask, behavior = torch.ones(2, 2, dtype=torch.bool), torch.full((2, 2), -1.0, dtype=torch.float64)
    current = (behavior - torch.tensor([[0.2], [0.05]])).requires_grad_()
    out = obj(PolicyLogps(current, behavior, mask), torch.tensor([[-1.0], [-1.0]]))
    out.loss.backward()
    assert current.grad is not None
    assert_close(current.grad, torch.tensor([[0.0] * 2, [math.exp(-0.05) / 4] * 2], dtype=torch.float64))
    both = replace(obj, masks=(OPSM(0.1), Band("token", 0.5, 2.0)))
    assert both.needs == {"behavior", "proximal"}
    with pytest.raises(ValueError, match="mine needs proximal, which is None"):
        both(PolicyLogps(current, behavior, mask), torch.ones(2, 1))
