"""An objective: what its parts refuse, what it needs, and its denominators, state and metrics over one update."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from jaxtyping import config
from torch import Tensor
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
    mismatch,
    objective,
    objectives,
)

MASK = torch.tensor([[True, True, True, False], [True, False, False, False], [False] * 4])


def slopes(obj: Objective, behavior: Tensor | None = None, mask: Tensor = MASK) -> Tensor:
    """d(-loss)/d log pi of each token at ratio 1 with advantage 1: the factor 1/D."""
    proximal = torch.full(mask.shape, -1.0, dtype=torch.float64)
    current = proximal.clone().requires_grad_()
    behavior = proximal if behavior is None else behavior
    obj(PolicyLogps(current, behavior, mask, proximal), torch.ones(len(mask), 1)).loss.backward()
    return -current.grad


@pytest.mark.parametrize(
    ("kind", "original", "kept"),
    [
        ("token-mean", 1 / 4, 1 / 3),
        ("seq-mean-token-mean", 1 / 9, 1 / 6),
        ("seq-mean-token-sum", 1 / 3, 1 / 2),
        ("constant", 1 / 15, 1 / 10),
    ],
)
def test_rejected_tokens_stay_in_the_denominator_unless_asked(kind, original, kept):
    """The second of three rows is rejected; the third has nothing to train and is not."""
    behavior = torch.full(MASK.shape, -1.0, dtype=torch.float64)
    behavior[1] += 1.0
    length_max = 5 if kind == "constant" else None
    for denominator, value in (("original", original), ("kept", kept)):
        aggregation = Aggregation(kind, denominator, length_max)
        obj = replace(objective("geo-mask"), aggregation=aggregation)
        expected = torch.tensor([[value] * 3 + [0.0], [0.0] * 4, [0.0] * 4], dtype=torch.float64)
        assert_close(slopes(obj, behavior), expected)


def test_kept_lengths_shrink_with_token_rules():
    behavior = torch.full(MASK.shape, -1.0, dtype=torch.float64)
    behavior[0, 1] -= math.log(9.0)
    expected = torch.zeros(MASK.shape, dtype=torch.float64)
    expected[0, 0] = expected[0, 2] = 1 / 6
    expected[1, 0] = 1 / 3
    assert_close(slopes(objective("icepop", denominator="kept"), behavior), expected)


def test_weight_quantiles_are_those_of_the_weights_own_level():
    behavior = torch.full((2, 2), -1.0)
    proximal = behavior + torch.tensor([[math.log(1.5)] * 2, [math.log(3.0), 0.0]])
    logps = PolicyLogps(proximal, behavior, torch.ones(2, 2, dtype=torch.bool), proximal)
    result = objective("seq-tis")(logps, torch.ones(2, 1)).metrics.finalize()
    assert result["weight_raw/q50"] == pytest.approx((2.25 + 3.0) / 2, rel=0.005)
    assert result["weight/q50"] == pytest.approx(2.0, rel=0.005)
    assert result["weight/mean"] == pytest.approx(2.0)
    assert result["weight/changed"] == 1.0


def test_advantages_may_differ_by_token():
    proximal = torch.full((1, 3), -1.0, dtype=torch.float64)
    current = proximal.clone().requires_grad_()
    advantage = torch.tensor([[1.0, -2.0, float("nan")]])
    mask = torch.tensor([[True, True, False]])
    objective("dapo")(PolicyLogps(current, None, mask, proximal), advantage).loss.backward()
    assert current.grad.tolist() == [[-0.5, 1.0, 0.0]]


def test_what_prepare_must_be_given():
    assert objective("grpo").prepare_needs == frozenset()
    assert objective("token-tis").prepare_needs == frozenset()
    assert objective("geo-mask").prepare_needs == frozenset()
    assert objective("token-tis", normalize=True).prepare_needs == {"proximal"}
    assert objective("geo-mask", denominator="kept").prepare_needs == {"proximal"}
    assert objective("opsm").prepare_needs == frozenset()
    banded = replace(objective("token-tis", normalize=True), masks=(Band("token", 0.5, 2.0),))
    one, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with patch.object(Band, "keep", side_effect=AssertionError("nobody reads it")):
        state = banded.prepare(PolicyLogps(one, one - 1, mask, proximal=one), one)
    assert state.weight_total.item() == 2.0
    assert objective("opsm", denominator="kept").prepare_needs == {"current"}
    assert objective("m2po").prepare_needs == objective("m2po", form="mask").prepare_needs == {"current"}


def test_what_each_loss_reads():
    assert objective("grpo").needs == {"proximal"}
    assert objective("token-bypass").needs == objective("oapl").needs == objective("m2po").needs == {"behavior"}
    assert objective("token-tis").needs == objective("opsm").needs == {"proximal", "behavior"}
    assert objective("luffy").needs == {"proximal", "off_policy"}
    assert objective("grpo", kl="unbiased", kl_coef=0.1).needs == {"proximal", "behavior", "reference"}
    assert objective("soup", kl_coef=0.1, entropy_coef=0.1).needs == {"behavior", "reference", "entropy"}


def test_only_the_regression_needs_one_behavior_policy_per_response():
    assert {name for name in objectives() if objective(name).single_behavior} == {"oapl"}
    assert Objective("mine", Ratio("sequence", "behavior"), Regression(), advantage="optimal").single_behavior


def test_state_names_what_is_missing():
    mask = torch.ones(1, 1, dtype=torch.bool)
    for name, keywords, missing in (("m2po", {}, "current"), ("token-tis", {"normalize": True}, "proximal")):
        logps = PolicyLogps(None, torch.zeros(1, 1), mask)
        with pytest.raises(ValueError, match=f"needs {missing}, which is None"):
            objective(name, **keywords).prepare(logps, torch.ones(1, 1))


def test_losses_of_updates_average_and_micro_batches_add():
    proximal = torch.full((2, 2), -1.0)
    logps = PolicyLogps(proximal, None, torch.ones(2, 2, dtype=torch.bool), proximal)
    obj = objective("grpo")
    first, second = obj(logps, torch.full((2, 1), 1.0)).metrics, obj(logps, torch.full((2, 1), 3.0)).metrics
    assert (first + second).finalize()["loss/policy"] == pytest.approx(-2.0)


ONES = torch.ones(2, 2, dtype=torch.bool)
TRAINER = torch.tensor([[-1.0, -0.5], [-2.0, -1.5]])


@pytest.mark.parametrize("value", [-9999.0, -6e8, -math.inf, math.nan])
def test_mismatch_of_a_log_prob_that_no_token_has_is_nan(value: float) -> None:
    behavior = TRAINER.clone()
    behavior[1, 0] = value
    assert math.isnan(mismatch(TRAINER, behavior, ONES).finalize()["k3"])
    untrained = ONES.clone()
    untrained[1, 0] = False
    assert mismatch(TRAINER, behavior, untrained).finalize()["k3"] == 0


@pytest.mark.parametrize("name", ["token-tis", "seq-tis", "token-bypass", "icepop"])
def test_no_preset_trains_on_a_log_prob_that_no_token_has(name: str) -> None:
    behavior = TRAINER.clone()
    behavior[0, 1] = -9999.0
    logps = PolicyLogps(current=TRAINER, behavior=behavior, mask=ONES, proximal=TRAINER)
    assert objective(name)(logps, torch.ones(2, 1)).loss.isnan()
    behavior[0, 1] = -99.0
    assert objective(name)(logps, torch.ones(2, 1)).loss.isfinite()


SEQUENCE = Ratio("sequence", "behavior")
ROWS = Aggregation("trained-mean-token-sum")


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({"ratio": Ratio("token", "behavior"), "surrogate": Regression()}, 'use Ratio."sequence", "behavior".,'),
        ({"ratio": Ratio("geometric"), "surrogate": Regression()}, '"proximal"., not Ratio."geometric"'),
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
    return out.loss.item(), current.grad[0].tolist()


def test_the_regression_may_be_on_the_proximal_policy():
    """REBEL's form: the square of what was learned since pi_old, exact at the sequence's log-ratio log 1.5."""
    obj = Objective("mine", Ratio("sequence"), Regression(2.0), aggregation=ROWS)
    residual = 2.0 * math.log(1.5) - 1.0
    loss, slopes = run(obj)
    assert loss == pytest.approx(residual**2)
    assert slopes == pytest.approx([2 * 2.0 * residual] * 2)
    assert not obj.single_behavior


def test_logprob_may_be_weighted_and_masked():
    """REINFORCE on old data: the weight is all the correction it has, and the mask leaves the other token."""
    weighted = Objective("mine", Ratio(), LogProb(), Weight("token", "truncate", max=1.6))
    assert run(weighted)[1] == pytest.approx([-1.6 / 2, -1 / 2])
    masked = replace(weighted, weight=None, masks=(Band("token", 0.5, 1.9),))
    assert run(masked)[1] == pytest.approx([0.0, -1 / 2])


def test_a_weight_over_the_current_policy_stands_beside_a_clip_on_current_over_proximal():
    """current/behavior is 3 and current/proximal 1.5: the weight has no gradient, and outside the clip nothing has."""
    wide = Objective("mine", Ratio(), Clipped(0.2, 0.6), Weight("token", "truncate", max=10.0, over="current"))
    loss, slopes = run(wide)
    assert loss == pytest.approx(-(3 * 1.5 + 1) / 2)
    assert slopes == pytest.approx([-3 * 1.5 / 2, -1 / 2])
    loss, slopes = run(replace(wide, surrogate=Clipped(0.2, 0.2)))
    assert loss == pytest.approx(-(3 * 1.2 + 1) / 2)
    assert slopes == pytest.approx([0, -1 / 2])
    assert run(replace(wide, weight=Weight("token", "mask", 0.5, 2.0, over="current")))[1] == pytest.approx([0, -1 / 2])
    normalized = replace(wide, weight=Weight("sequence", max=10.0, normalize=True, over="current"))
    assert normalized.prepare_needs == {"current"}
    assert run(normalized)[1] == pytest.approx([-1.5 / 2, -1 / 2])  # one sequence: its weight is the mean


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
    assert_close(current.grad, torch.tensor([[0.0] * 2, [math.exp(-0.05) / 4] * 2], dtype=torch.float64))
    both = replace(obj, masks=(OPSM(0.1), Band("token", 0.5, 2.0)))
    assert both.needs == {"behavior", "proximal"}
    with pytest.raises(ValueError, match="mine needs proximal, which is None"):
        both(PolicyLogps(current, behavior, mask), torch.ones(2, 1))
