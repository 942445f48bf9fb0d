"""Presets of 2026 on three tokens worked out by hand: loss and slope of each token, before aggregation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from trimtab.corrections.divergences import binary_kl, probability_gap
from trimtab.objectives import Objective, PolicyLogps, PrefixBudget, Ratio, Unclipped, objective

MU, OLD, PI = (
    torch.tensor([[values]], dtype=torch.float64).log()[0]
    for values in ((0.50, 0.20, 0.80), (0.55, 0.18, 0.80), (0.75, 0.10, 0.84))
)
AGES = torch.tensor([[1, 2, 4]])


def tokens(
    name: str | Objective,
    advantage: float,
    *,
    current: Tensor = PI,
    behavior: Tensor = MU,
    proximal: Tensor = OLD,
    age: Tensor | None = AGES,
    **keywords: Any,
) -> tuple[list[float], list[float]]:
    """Losses and slopes by log pi of the tokens of one response, without the division by their number."""
    obj = objective(name, **keywords) if isinstance(name, str) else name
    count = current.shape[1]
    mask = torch.ones(1, count, dtype=torch.bool)
    leaf = current.clone().requires_grad_()

    def loss(given: Tensor) -> Tensor:
        return obj(PolicyLogps(leaf, behavior, mask, proximal, age=age), given.double()).loss

    constant = torch.full((1, 1), advantage)
    total = loss(constant)
    total.backward()
    values = [total.item()] * count  # a response whose tokens share one value
    if not obj.surrogate.per_response:
        alone = torch.eye(count, dtype=torch.bool)  # the loss of one token: the others have no advantage
        values = [count * loss(torch.where(place[None], constant, 0.0)).item() for place in alone]
    return values, (leaf.grad[0] * count).tolist()


@pytest.mark.parametrize(
    ("name", "keywords", "advantage", "loss", "slope"),
    [
        # The clip of TBPO: for A < 0 both sides, where the dual bound is the upper one.
        ("grpo", {"clip_dual": 1.2}, -1, (1.2, 0.8, 1.05), (0, 0, 1.05)),
        ("dppo", {}, 1, (0, 1.151293, 0.183071), (0, -0.5, -1.05)),
        ("dppo", {}, -1, None, (1.5, 0.5, 1.05)),
        ("dppo-kl", {}, 1, (0, 1.151293, 0.183071), (0, -0.5, -1.05)),
        ("dppo-kl", {}, -1, None, (1.5, 0.5, 1.05)),
        ("ipo", {"divergence_max": 0.1 + 1e-6}, -1, (0, 0.5, 1.05), (0, 0.5, 1.05)),
        ("ipo", {"divergence_max": 0.1 - 1e-6}, -1, (0, 0, 1.05), (0, 0, 1.05)),
        ("flash-reinforce", {"divergence_max": 0.1}, 1, (0.431523, 1.151293, 0.183071), (-1.5, -0.5, -1.05)),
        ("flash-reinforce", {}, 1, (0, 0, 0), (0, 0, 0)),
        ("trm", {}, 1, (0, 0, 0), (0, 0, 0)),
        ("trm", {"k2_max": 0.241, "k3_max": 0.0964}, 1, (-1.5, -0.5, -1.05), (-1.5, -0.5, -1.05)),
        ("trm", {"k2_max": 0.240, "k3_max": 0.0964}, 1, (0, 0, 0), (0, 0, 0)),
        ("trm", {"k2_max": 0.241, "k3_max": 0.0962}, 1, (0, 0, 0), (0, 0, 0)),
        ("ctpo", {}, 1, (-1.051271, -0.757576, -0.795455), (0, -0.757576, -0.795455)),
        ("ctpo", {}, -1, (1.051271, 0.965262, 0.957623), (0, 0, 0)),
        ("ctpo", {"clip_low": 9, "clip_high": 9, "clip_dual": None}, -1, None, (1.363636, 0.757576, 0.795455)),
        ("pnpo", {"clip_high": 0.4}, 1, (-1.363636, -0.870388, -0.926556), (-1.363636, -0.870388, -0.926556)),
        ("pnpo", {}, 1, (0, -0.870388, -0.926556), (0, -0.870388, -0.926556)),
        ("sapo", {}, 1, (-2.359682, -1.562730, -2.049990), (-1.319533, -0.528999, -1.049344)),
        ("sapo", {}, -1, (2.264044, 1.468211, 1.954750), (1.315120, 0.526374, 1.049277)),
        ("vespo", {}, 1, (0.337502, 2.701342, 0.204548), (-1.173178,) * 3),
        ("vespo", {}, -1, (-0.214902, -1.720056, -0.130244), (0.747011,) * 3),
        ("gmpo", {}, 1, (-0.926556,) * 3, (-0.926556,) * 3),
        ("gmpo", {}, -1, (0.986408,) * 3, (0.986408, 0, 0.986408)),
        ("a3po", {}, 1, (-1.2, -0.5, -1.05), (0, -0.5, -1.05)),
        ("a3po", {}, -1, (1.5, 0.64, 1.05), (1.5, 0, 1.05)),
        ("drpo", {}, 1, (-1.083333, -0.333333, -1.043333), (1.0, -0.833333, -0.77)),
        ("drpo", {}, -1, (1.916667, 0.666667, 1.056667), (4.0, 0.166667, 1.33)),
        ("drpo", {"epsilon": 12.5}, 1, None, (-1.47, -0.504, -1.04664)),
        ("drpo", {"epsilon": 12.5}, -1, None, (1.53, 0.496, 1.05336)),
        ("token-alp-bypass", {}, 1, (-1.28, -0.5, -1.05), (0, -0.5, -1.05)),
    ],
)
def test_values_and_slopes(name, keywords, advantage, loss, slope):
    values, slopes = tokens(name, advantage, **keywords)
    assert slopes == pytest.approx(slope, abs=1e-5)
    if loss is not None:
        assert values == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(
    ("token", "geometric", "slope"),
    [
        ((0.5, 2.0), (0.996, 1.001), (-1, -1, -1)),
        ((0.95, 2.0), (0.996, 1.001), (-1, 0, -1)),
        ((0.5, 1.05), (0.996, 1.001), (0, -1, -1)),
        ((0.5, 2.0), (0.997, 1.001), (0, 0, 0)),
    ],
)
def test_mis_po_is_the_gradient_of_log_pi_where_two_bands_keep(token, geometric, slope):
    """Step 3.5 Flash, arXiv 2602.10604 eq. 2. old/mu is 1.1, .9, 1, its geometric mean .99666; pi/mu has no effect."""
    masks = [
        {"kind": "band", "level": "token", "min": token[0], "max": token[1]},
        {"kind": "band", "level": "geometric", "min": geometric[0], "max": geometric[1]},
    ]
    values, slopes = tokens("reinforce", 1, mask=masks)
    assert slopes == pytest.approx(slope)
    assert values == pytest.approx(
        [-kept * loss for kept, loss in zip(slope, (-PI[0]).tolist(), strict=True)], abs=1e-6
    )


@pytest.mark.parametrize(("name", "expected"), [("grpo", 0.0660112), ("token-bypass", 0.0962973)])
def test_the_distance_of_the_update_is_from_the_policy_of_the_ratio(name, expected):
    mask = torch.ones(1, 3, dtype=torch.bool)
    out = objective(name)(PolicyLogps(PI, MU, mask, OLD), torch.ones(1, 1).double())
    assert out.metrics.finalize()["update/kl"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("largest", "advantage", "kept"),
    [(0.20, 1, (0, 1, 0)), (0.20, -1, (1, 0, 1)), (0.26, 1, (1, 1, 0)), (0.26, -1, (1, 0, 1))],
)
def test_the_prefix_budget(largest, advantage, kept):
    _, slopes = tokens("cppo", advantage, divergence_max=largest)
    ratio = (1.5, 0.5, 1.05)
    assert slopes == pytest.approx([-advantage * w * k for w, k in zip(ratio, kept, strict=True)], abs=1e-9)


def test_an_early_change_spends_the_budget_of_later_tokens():
    behavior = torch.full((1, 4), 0.45, dtype=torch.float64).log()
    current = torch.full((1, 4), 0.60, dtype=torch.float64).log()
    _, slopes = tokens("cppo", 1, current=current, behavior=behavior, proximal=behavior, age=None, divergence_max=0.2)
    assert slopes == pytest.approx([-0.6 / 0.45, 0, 0, 0])


def test_a_budget_without_weights_and_limit_is_dppo():
    generous = Objective(
        "mine", Ratio("token", "behavior"), Unclipped(), masks=(PrefixBudget(0.15, budget=1e9, weight_min=1.0),)
    )
    for advantage in (1, -1):
        assert tokens(generous, advantage)[1] == pytest.approx(tokens("dppo", advantage)[1])


def test_near_the_sampler_the_gate_of_flash_reinforce_stays_open():
    current = MU + torch.tensor([[0.01, -0.02, 0.005]])
    assert binary_kl(MU, current - MU).mean().item() == pytest.approx(5.02577e-5, rel=1e-5)
    values, slopes = tokens("flash-reinforce", 1, current=current)
    assert values == pytest.approx((0.690013, 1.597173, 0.219237), abs=1e-6)
    assert slopes == pytest.approx((-1.010050, -0.980199, -1.005013), abs=1e-6)


def test_a_token_of_age_zero_is_not_clipped():
    assert tokens("a3po", 1, age=torch.zeros(1, 3, dtype=torch.long))[1] == pytest.approx((-1.5, -0.5, -1.05))


def test_the_mean_of_the_decoupled_loss_without_its_proximal_forward():
    """A-3PO's own form, with the policy interpolated by age, has the gradient of the clip that widens with age."""
    for age in (1, 2, 3, 7):
        for advantage in (1.0, -1.0):
            leaf = PI.clone().requires_grad_()
            proximal = MU / age + (1 - 1 / age) * PI
            ratio = (leaf - proximal).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            (-(proximal - MU).exp() * surrogate).sum().backward()
            assert tokens("a3po", advantage, age=torch.full((1, 3), age))[1] == pytest.approx(leaf.grad[0].tolist())


def test_binary_divergences_do_not_cancel():
    """In float32, for policies 1e-5 nats apart, the textbook form is negative."""
    log_q, log = torch.tensor(-1.0), torch.tensor(-0.99999) - torch.tensor(-1.0)
    exact = binary_kl(log_q.double(), log.double()).item()
    assert exact == pytest.approx(2.92e-11, rel=0.02)
    assert binary_kl(log_q, log).item() == pytest.approx(exact, rel=0.02)
    assert probability_gap(torch.tensor(-100.0), torch.tensor(100.0)).item() == pytest.approx(1.0)
    assert binary_kl(MU, PI - MU)[0].tolist() == pytest.approx((0.14384104, 0.04440301, 0.00559658), abs=1e-8)


def test_a_prefix_ends_as_the_response_and_does_not_see_what_follows():
    log = torch.tensor([[0.3, 9.0, -0.5, 0.1], [0.2, 0.4, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True, True], [True, True, False, False]])
    proximal = torch.full_like(log, -1.0)
    for level, whole in (("prefix", "sequence"), ("prefix_geometric", "geometric")):
        values = {}
        for name in (level, whole):
            leaf = (proximal + log).requires_grad_()
            out = Objective("mine", Ratio(name), Unclipped())(PolicyLogps(leaf, None, mask, proximal), torch.ones(2, 1))
            out.loss.backward()
            values[name] = -leaf.grad * 5  # r at each token
        sums = torch.tensor([0.3, -0.2, -0.1]) / (torch.arange(1, 4) if level == "prefix_geometric" else 1)
        assert_close(values[level][0][mask[0]], sums.double().exp(), rtol=1e-6, atol=0)
        assert_close(values[level][:, 3][:1], values[whole][:, 3][:1])
        assert_close(values[level][1, 1], values[whole][1, 1])
