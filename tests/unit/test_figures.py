"""The mathematics behind the figures of the documents: closed forms, hand-computed numbers, limits. No pictures."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tests.support.trajectories import multi_turn

from trimtab.runs import trajectories

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


@pytest.fixture(scope="module", autouse=True)
def figures() -> Iterator[None]:
    """The scripts import each other from their own folder, as they do when they are run."""
    sys.path.insert(0, str(FIGURES))
    yield
    sys.path.remove(str(FIGURES))


@pytest.fixture(scope="module")
def toy(figures: None) -> ModuleType:  # noqa: ARG001
    return importlib.import_module("alp_toy")


@pytest.fixture(scope="module")
def bound(figures: None) -> ModuleType:  # noqa: ARG001
    return importlib.import_module("alp_bound")


@pytest.fixture(scope="module")
def one_iteration(figures: None) -> ModuleType:  # noqa: ARG001
    return importlib.import_module("alp_one_iteration")


def test_smoothing_in_closed_form_by_quadrature_and_by_sampling_agree(toy: ModuleType) -> None:
    bumps, x = toy.objective(seed=1, spikes=30), np.linspace(-2, 2, 21)
    exact = bumps.smoothed(0.2)(x)
    np.testing.assert_allclose(toy.expectation(bumps, x, 0.2), exact, atol=1e-12)
    # 20000 draws of values with a standard deviation of about 0.3: an error of 0.01 is five of its own.
    np.testing.assert_allclose(toy.sampled(bumps, x, 0.2, 20_000, seed=0), exact, atol=0.012)


def test_derivatives_of_the_toy_objective_are_its_differences(toy: ModuleType) -> None:
    bumps, x, h = toy.objective(seed=0, spikes=30), np.linspace(-2, 2, 41), 1e-5
    np.testing.assert_allclose(bumps.gradient(x), (bumps(x + h) - bumps(x - h)) / (2 * h), atol=1e-6)
    second = (bumps.gradient(x + h) - bumps.gradient(x - h)) / (2 * h)
    np.testing.assert_allclose(bumps.curvature(x), second, atol=1e-4)


def test_ascent_ends_higher_on_the_smoothed_objective_and_not_with_useless_noise(toy: ModuleType) -> None:
    bumps, start = toy.objective(seed=0, spikes=30), np.linspace(toy.LOW, toy.HIGH, 9)
    ends = {s: bumps(toy.ascend(bumps.smoothed(s).gradient, start, 3000, 5e-3)).mean() for s in (0.0, 0.01, 0.5)}
    assert ends[0.5] > ends[0.0] + 0.1
    assert ends[0.01] == pytest.approx(ends[0.0], abs=0.02)


def test_gradient_of_the_perturbed_policy_is_the_posterior_mean_of_the_noise(bound: ModuleType) -> None:
    """The paper's Lemma 2, sigma^2 grad ln pi~(a|x) = E[delta | a, x], with both sides by sampling and by Fourier."""
    rough, sigma = bound.Rough.random(0, 0.7), 0.03
    log_policy = rough.log_policy(rough._grid())
    tilde, slope = rough._perturbed(log_policy, sigma)
    i, j = 20, 77
    delta = sigma * np.random.default_rng(0).standard_normal((400_000, 2))
    policy = np.exp(rough.log_policy(np.array([i, j]) / rough.size + delta))
    np.testing.assert_allclose(policy.mean(0), tilde[i, j], atol=3e-3)
    posterior = (policy[:, :, None] * delta[:, None]).mean(0) / policy.mean(0)[:, None]
    np.testing.assert_allclose((posterior**2).sum(-1) / sigma**4, slope[i, j], rtol=0.05, atol=1.0)


def test_linear_constants_are_reached_far_out_and_nowhere_exceeded(bound: ModuleType) -> None:
    linear, sigma = bound.Linear.random(0), 0.4
    result = linear.terms(sigma, 0.3)
    angle = np.linspace(0, 2 * np.pi, 60, endpoint=False)
    x = np.concatenate([40 * np.stack([np.cos(angle), np.sin(angle)], -1), linear.prompts[:20]])
    log_ratio = np.log(linear.perturbed(x, sigma)) - linear.log_policy(x)
    assert log_ratio.max() <= result.minus_ln_alpha + 1e-6
    assert log_ratio.max() == pytest.approx(result.minus_ln_alpha, rel=1e-3)
    h = 1e-4
    steps = [np.log(linear.perturbed(x + h * e, sigma) / linear.perturbed(x - h * e, sigma)) for e in np.eye(2)]
    slope = (np.stack(steps) ** 2).sum(0) / (2 * h) ** 2
    assert slope.max() == pytest.approx(result.steepest, rel=1e-3)


def test_noise_never_brings_a_linear_softmax_closer_to_its_sampler(bound: ModuleType) -> None:
    """E ln mu(a) = ln pi(a) + a term without a: among all policies pi itself is the closest."""
    linear = bound.Linear.random(3)
    kl = [linear.terms(sigma, 0.5).kl for sigma in (0.0, 0.5, 2.0)]
    assert kl == sorted(kl)
    assert kl[-1] > 1.2 * kl[0]


def test_the_bound_holds_where_its_conditions_hold_everywhere(bound: ModuleType) -> None:
    rough, linear = bound.Rough.random(0, 0.7), bound.Linear.random(0)
    for sigma in (0.0, 0.02):
        for s in (0.01, 0.3):
            now = rough.terms(sigma, s)
            assert 0 < now.kl <= now.bound
    for sigma in (0.0, 1.0):
        now = linear.terms(sigma, 0.5)
        assert 0 < now.kl <= now.bound


def test_the_bound_fails_where_its_conditions_hold_at_the_prompt_alone(bound: ModuleType) -> None:
    crest = bound.Rough.random(0, 0.7).at_crest(0.002, 0.02)
    assert crest.steepest < 1e-15
    assert crest.kl > 5 * crest.bound


def test_exact_divergence_agrees_with_sampling(bound: ModuleType) -> None:
    rough = bound.Rough.random(0, 0.7)
    drawn = bound.by_sampling(rough, np.zeros(2), 0.02, 0.02, 100_000, seed=1)
    assert drawn == pytest.approx(rough.at_crest(0.02, 0.02).kl, rel=0.02)


def test_outcome_of_one_iteration_by_hand(one_iteration: ModuleType) -> None:
    behavior = np.log([0.5, 0.5, 0.05, 0.05, 0.05])
    ratio = np.log([1.0, 2.0, 0.5, 1.0, 4.0])
    outcome = one_iteration.Outcome(behavior, ratio, clipped=0.0, noise=0.0, before=0.0, after=0.0)
    # r - 1 - ln r for r = 1, 2, 1/2, 1, 4, which sum to 3.5 - ln 4
    assert outcome.kl == pytest.approx((3.5 - np.log(4.0)) / 5)
    assert outcome.largest == pytest.approx(np.log(4.0))
    # Unlikely tokens -ln 2, 0, ln 4: the 2nd and 98th percentiles lie 0.04 of the way from either end to the middle.
    assert outcome.width(0.1) == pytest.approx(0.96 * np.log(4.0) + 0.96 * np.log(2.0))
    assert outcome.width(1.1) < outcome.width(0.1)


def test_arms_differ_in_what_they_are_meant_to_and_nothing_else(one_iteration: ModuleType) -> None:
    bypass = one_iteration.Arm("bypass").config("laboratory", "bfloat16", 3)
    noisy = one_iteration.Arm("noisy", std=0.01).config("laboratory", "bfloat16", 3)
    slow = one_iteration.Arm("slow", rate=0.5).config("laboratory", "bfloat16", 3)
    assert slow.optim.lr == bypass.optim.lr / 2
    assert slow.model_copy(update={"optim": bypass.optim}) == bypass
    assert (bypass.perturbation, noisy.perturbation.std) == (None, 0.01)
    changed = {"perturbation": None, "objective": bypass.objective}
    assert noisy.model_copy(update=changed) == bypass
    assert noisy.objective.keywords == bypass.objective.keywords


def test_different_rollouts_are_refused(one_iteration: ModuleType) -> None:
    ratio = np.zeros(2)
    a, b = (one_iteration.Outcome(np.array([-1.0, last]), ratio, 0, 0, 0.5, 0.5) for last in (-2.0, -2.1))
    one_iteration.check_same_rollouts({"a": a, "b": a})
    with pytest.raises(SystemExit, match="b: its rollouts"):
        one_iteration.check_same_rollouts({"a": a, "b": b})


def test_mismatch_of_calls_by_turn(tmp_path: Path) -> None:
    """Calls have three tokens; the last turn makes none and does not count. k3 of a ratio 1/2 is ln 2 - 1/2."""
    module, half = importlib.import_module("turns"), np.log(2)
    log_ratio = np.array([0, -half, half, np.nan, np.nan, -half, 0, 0, np.nan, half], dtype=np.float32)
    row = trajectories.Row(multi_turn(0, "12?..34?.=", logp=-1.0), logp_current=log_ratio - 1)
    trajectories.write(tmp_path / "trajectories" / "step-000001.parquet", [row], step=1)
    low, high = half - 0.5, 1 - half  # of the ratios 1/2 and 2
    expected = [
        [0, 0, 0, 0.5],
        [0, 1, low, 0.5],
        [0, 2, low + high, 1.5],
        [1, 0, low, 0.5],
        [1, 1, 0, 0.5],
        [1, 2, low, 1.5],
    ]
    np.testing.assert_allclose(module.tokens(tmp_path), expected, atol=1e-6)


def test_pairs_are_compared_seed_by_seed() -> None:
    values = {("a", 0): 0.5, ("a", 1): 0.75, ("a", 2): 0.1, ("b", 1): 0.5, ("b", 0): 0.5, ("c", 5): 0.5}
    rows = [{"regime": "r", "method": m, "seed": seed, "accuracy": value} for (m, seed), value in values.items()]
    lines = importlib.import_module("grid").pairs(rows, [("a", "b"), ("a", "c")]).splitlines()
    assert lines[2:] == ["| `a` over `b` | +0.125 [+0.000, +0.250] |", "| `a` over `c` | - |"]
