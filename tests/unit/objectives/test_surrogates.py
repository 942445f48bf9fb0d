"""Every surrogate on single tokens worked out by hand; and one of one's own that returns something else is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from trimtab.errors import TrimtabError
from trimtab.objectives import (
    Band,
    Clipped,
    Objective,
    PolicyLogps,
    Ratio,
    RuleInputs,
    State,
    Surrogate,
    Terms,
    objective,
)


def one_token(name: str, ratio: float, advantage: float, *, logp: float = -1.0, **keywords):
    """(-loss, d(-loss)/d log pi) of a single token whose ratio is given; without mismatch, so that weights are 1."""
    current = torch.tensor([[logp]], dtype=torch.float64, requires_grad=True)
    base = torch.tensor([[logp - math.log(ratio)]], dtype=torch.float64)
    policies = {"behavior": base, "proximal": base, "off_policy": torch.zeros(1, 1, dtype=torch.bool)}
    logps = PolicyLogps(current=current, mask=torch.ones(1, 1, dtype=torch.bool), **policies)
    out = objective(name, **keywords)(logps, torch.tensor([[advantage]], dtype=torch.float64))
    out.loss.backward()
    return -out.loss.item(), -current.grad.item(), out.metrics.finalize()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope", "hit"),
    [
        (1.1, 2.0, 2.2, 2.2, None),
        (1.5, 2.0, 2.56, 0.0, "clip/high"),  # 1.28 * 2
        (0.5, 2.0, 1.0, 1.0, None),  # good token, too rare: no clip
        (0.9, -2.0, -1.8, -1.8, None),
        (0.5, -2.0, -1.6, 0.0, "clip/low"),  # 0.8 * -2
        (1.5, -2.0, -3.0, -3.0, None),  # bad token, too likely: no clip
        (1.5, 0.0, 0.0, 0.0, None),
        (0.5, 0.5, 0.25, 0.25, None),  # the same for advantages below 1
        (1.5, -0.5, -0.75, -0.75, None),
    ],
)
def test_clipped(ratio, advantage, value, slope, hit):
    statistics = one_token("dapo", ratio, advantage)
    assert statistics[:2] == pytest.approx((value, slope), abs=1e-12)
    for key in ("clip/low", "clip/high"):
        assert statistics[2][key] == (key == hit)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (5.0, -1.0, -3.0, 0.0),
        (2.0, -1.0, -2.0, -2.0),
        (5.0, 1.0, 1.2, 0.0),
        (5.0, 0.5, 0.6, 0.0),
        (0.1, -1.0, -0.8, 0.0),
    ],
)
def test_dual_clip_acts_on_bad_tokens_alone(ratio, advantage, value, slope):
    statistics = one_token("grpo", ratio, advantage, clip_dual=3.0)
    assert statistics[:2] == pytest.approx((value, slope), abs=1e-12)
    assert statistics[2]["clip/dual"] == (ratio == 5.0 and advantage < 0)


def test_a_dual_clip_inside_the_clip_range_is_noted():
    assert [bool(Clipped(0.2, 0.28, dual).notes()) for dual in (1.2, 1.28, 1.3, 2.1)] == [True, True, False, False]


@pytest.mark.parametrize(("advantage", "clipped"), [(0.5, "clip/high"), (-0.5, "clip/low")])
def test_m2po_counts_what_its_cap_clips(advantage, clipped):
    """Of two tokens as far from the sampler on either side, the one that moved with its advantage is clipped."""
    behavior = torch.full((1, 2), -3.0, dtype=torch.float64)
    current = behavior + torch.tensor([[2.0, -2.0]], dtype=torch.float64)
    logps = PolicyLogps(current, behavior, torch.ones(1, 2, dtype=torch.bool))
    metrics = objective("m2po")(logps, torch.full((1, 1), advantage, dtype=torch.float64)).metrics.finalize()
    assert {key: metrics[key] for key in ("clip/low", "clip/high")} == {
        key: 0.5 * (key == clipped) for key in ("clip/low", "clip/high")
    }


def test_sequence_ratio_is_the_product_at_every_token():
    log = torch.tensor([[0.5, 0.6, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    current = (log - 1).requires_grad_()
    out = objective("seq-bypass")(PolicyLogps(current, torch.full_like(log, -1.0), mask), torch.ones(1, 1))
    assert out.loss.item() == pytest.approx(-math.exp(1.1))
    out.loss.backward()
    assert_close(current.grad, torch.tensor([[-math.exp(1.1) / 2] * 2 + [0.0]], dtype=torch.float64))
    current = (log * 2 - 1).detach().requires_grad_()  # product e^2.2 > 4: every token is clipped together
    objective("seq-bypass")(PolicyLogps(current, torch.full_like(log, -1.0), mask), torch.ones(1, 1)).loss.backward()
    assert (current.grad == 0).all()


def test_oapl_is_the_square_and_its_slope():
    beta, behavior = 0.1, torch.tensor([[-1.0, -2.0, 5.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    current = (behavior + torch.tensor([[0.5, 1.5, 7.0], [1.0, 1.0, 1.0]])).requires_grad_()
    advantage = torch.tensor([[0.6], [9.0]], dtype=torch.float64)
    out = objective("oapl", beta=beta)(PolicyLogps(current, behavior, mask), advantage)
    assert out.loss.item() == pytest.approx((0.1 * 2.0 - 0.6) ** 2)  # one row with mask: the mean is over it alone
    out.loss.backward()
    slope = 2 * 0.1 * (0.2 - 0.6)
    assert_close(current.grad, torch.tensor([[slope, slope, 0.0], [0.0] * 3], dtype=torch.float64))


def test_luffy_shapes_external_tokens_and_never_reads_their_behavior():
    nan = float("nan")
    current = torch.tensor([[math.log(0.1), math.log(0.4)]], dtype=torch.float64, requires_grad=True)
    before = torch.tensor([[nan, math.log(0.2)]], dtype=torch.float64)
    policies = {"behavior": torch.full_like(before, nan), "proximal": before}
    logps = PolicyLogps(
        current,
        mask=torch.ones(1, 2, dtype=torch.bool),
        off_policy=torch.tensor([[True, False]]),
        reference=torch.zeros(1, 2, dtype=torch.float64),
        **policies,
    )
    out = objective("luffy", aggregation="seq-mean-token-sum")(logps, torch.tensor([[2.0]]))
    assert out.loss.item() == pytest.approx(-(0.5 * 2 + 2.0 * 2))  # f(.1) = .5, ratio 2
    out.loss.backward()
    assert_close(current.grad, torch.tensor([[-0.25 * 2, -2.0 * 2]], dtype=torch.float64))  # gamma pi / (pi + gamma)^2
    assert out.metrics.finalize()["ratio/q99"] == pytest.approx(2, rel=0.005)  # external tokens have no ratio
    current.grad = None
    unbiased = objective("luffy", kl="unbiased", kl_coef=1.0, aggregation="seq-mean-token-sum")
    unbiased(replace(logps, behavior=before), torch.tensor([[0.0]])).loss.backward()
    # q log(pi/pi_ref), with q = 1 at the external token and 2 at the other; pi_ref = 1.
    assert_close(current.grad, torch.tensor([[math.log(0.1), 2 * math.log(0.4)]], dtype=torch.float64))


def brute_force_cap(harmful: list[float], tau: float) -> float:
    """The official solver, written plainly: the last observed value before the budget is spent."""
    squares = sorted(value**2 for value in harmful)
    budget = tau * len(squares)
    if sum(squares) <= budget:
        return math.inf
    best = 0.0
    for cap in squares:
        if sum(min(value, cap) for value in squares) >= budget:
            break
        best = cap
    return math.sqrt(best)


@pytest.mark.parametrize("tau", [0.001, 0.04, 0.3, 5.0])
@pytest.mark.parametrize("seed", range(4))
def test_m2po_caps_harmful_tokens_like_the_brute_force_solver(seed, tau):
    make = torch.Generator().manual_seed(seed)
    behavior = -torch.rand(3, 20, generator=make, dtype=torch.float64)
    log = 0.5 * torch.randn(3, 20, generator=make, dtype=torch.float64)
    mask = torch.rand(3, 20, generator=make) < 0.8
    advantage = torch.tensor([[1.0], [-1.0], [0.0]], dtype=torch.float64)
    current = (behavior + log).requires_grad_()
    obj = objective("m2po", tau=tau)
    logps = PolicyLogps(current, behavior, mask)
    harmful = mask & (log * advantage > 0)
    cap = brute_force_cap(log[harmful].abs().tolist(), tau)
    assert obj.prepare(logps, advantage).second_moment_cap(tau).item() == pytest.approx(cap, abs=1e-12)
    obj(logps, advantage).loss.backward()
    expected = torch.where(harmful & (log.abs() > cap + 1e-9), 0.0, -advantage * log.exp()) * mask / mask.sum()
    assert_close(current.grad, expected)


def test_m2po_within_its_budget_clips_nothing():
    statistics = one_token("m2po", 1.2, 1.0)  # log 1.2 squared is .033
    assert statistics[:2] == pytest.approx((1.2, 1.2))
    assert one_token("m2po", 1.3, 1.0)[:2] == pytest.approx((1.0, 0.0))  # .069 > .04, nothing smaller to fall back to
    assert one_token("m2po", 9.0, -1.0)[:2] == pytest.approx((-9.0, -9.0))  # harmless direction
    assert one_token("m2po", 9.0, 1e-13)[1] == pytest.approx(9e-13, rel=1e-6, abs=0)  # neither good nor bad


@pytest.mark.parametrize("ratio", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("advantage", [2.0, -3.0])
def test_reinforce_does_not_read_the_ratio(ratio, advantage):
    assert one_token("reinforce", ratio, advantage, logp=-1.5)[:2] == pytest.approx((-1.5 * advantage, advantage))


Returned = Callable[[Terms], Any]


@dataclass(frozen=True)
class Own(Surrogate):
    returned: Returned

    def __call__(self, terms: Terms, state: State) -> Any:  # noqa: ARG002
        return self.returned(terms)

    def equation(self, ratio: str) -> str:
        return ratio


@dataclass(frozen=True)
class OwnMask(Band):
    kind: torch.dtype | None = torch.float32

    def keep(self, inputs: RuleInputs) -> Any:
        kept = super().keep(inputs)
        return kept.tolist() if self.kind is None else kept.to(self.kind)


LOGPS = PolicyLogps(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("returned", "line"),
    [
        (lambda terms: terms.ratio, "Own returned Tensor, expected two: the value, and metrics or {}"),
        (lambda terms: (terms.ratio.mean(), {}), "Own returned torch.float32 (), expected a number for each token: "),
        (lambda terms: (terms.ratio[:, :1], {}), "floats (2, 3)"),
        (lambda terms: (terms.ratio > 1, {}), "Own returned torch.bool (2, 3), expected a number"),
        (lambda _: (1.0, {}), "Own returned float, expected a number for each token: floats (2, 3)"),
        (lambda terms: (terms.ratio, None), "expected two"),
        (
            lambda terms: (terms.ratio, terms.share("own", terms.ratio)),
            "metric 'own': the share of tokens needs a mask",
        ),
    ],
)
def test_a_surrogate_that_returns_something_else_is_named(returned: Returned, line: str) -> None:
    own = Objective("own", Ratio("token", "behavior"), Own(returned))
    with pytest.raises(TrimtabError, match=r"^(Own|metric)") as error:
        own(LOGPS, torch.ones(2, 1))
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_a_surrogate_that_returns_a_detached_value_is_named() -> None:
    own = Objective("own", Ratio("token", "behavior"), Own(lambda terms: (terms.ratio.detach() * terms.advantage, {})))
    learned = replace(LOGPS, current=torch.zeros(2, 3, requires_grad=True))
    line = "^Own returned a value without gradient, which trains nothing: do not detach it$"
    with pytest.raises(TrimtabError, match=line):
        own(learned, torch.ones(2, 1))
    with torch.no_grad():  # an evaluation needs none
        assert own(learned, torch.ones(2, 1)).loss.item() == -1
    assert own(LOGPS, torch.ones(2, 1)).loss.item() == -1


@pytest.mark.parametrize(("kind", "what"), [(torch.float32, "torch.float32"), (None, "list")])
def test_a_mask_that_keeps_no_bools_is_named(kind: torch.dtype | None, what: str) -> None:
    own = objective("grpo", mask=[OwnMask("token", 0.5, 2.0, kind=kind)])
    with pytest.raises(TrimtabError, match=f"OwnMask.keep returned {what}, expected bools: True at tokens it keeps"):
        own(LOGPS, torch.ones(2, 1))
