"""Advantages against hand numbers; what must be exactly zero."""

from __future__ import annotations

import math
from uuid import UUID

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from trimtab.errors import TrimtabError
from trimtab.objectives import PolicyLogps, advantages, objective
from trimtab.objectives.advantages import ADVANTAGE_KINDS, distillation_advantages, optimal_token_advantages
from trimtab.types import MAX_REWARD

KINDS = sorted(ADVANTAGE_KINDS)


def of(kind, rewards, groups, **keywords) -> list[float]:
    result = advantages(kind, torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), **keywords)
    assert result.shape == (len(rewards), 1)
    return result[:, 0].tolist()


def test_hand_numbers_with_interleaved_groups():
    rewards, groups = [1.0, 5.0, 0.0, 9.0, 2.0], [3, 8, 3, 8, 3]
    # Group 3: 1, 0, 2 (mean 1, std 1 with n - 1). Group 8: 5, 9 (mean 7, std sqrt 8).
    assert of("grpo", rewards, groups) == pytest.approx([0, -2 / math.sqrt(8), -1, 2 / math.sqrt(8), 1], abs=2e-6)
    assert of("grpo", rewards, groups)[4] == pytest.approx(1 / (1 + 1e-6), rel=1e-12)
    assert of("dr-grpo", rewards, groups) == [0, -2, -1, 2, 1]
    assert of("rloo", rewards, groups) == pytest.approx([0, -4, -1.5, 4, 1.5])


def test_the_batch_mean_ignores_groups():
    """Mean 3.4 of all five rewards. Centered by group it would be 0, -2, -1, 2, 1."""
    rewards, groups = [1.0, 5.0, 0.0, 9.0, 2.0], [3, 8, 3, 8, 3]
    assert of("batch-mean", rewards, groups) == pytest.approx([-2.4, 1.6, -3.4, 5.6, -1.4])
    alone = of("batch-mean", [1.0, 0.0, 0.0, 0.0], [0, 1, 2, 3])  # no response has another one of its prompt
    assert alone == [0.75, -0.25, -0.25, -0.25]
    assert of("dr-grpo", [1.0, 0.0, 0.0, 0.0], [0, 1, 2, 3]) == [0.0] * 4


def test_optimal_is_reward_minus_the_soft_value():
    assert of("optimal", [1.0, 0.0], [0, 0]) == pytest.approx([1 - 0.620115, -0.620115], abs=1e-6)
    assert of("optimal", [1.0, 0.0], [0, 0], value_beta=1e-3)[0] == pytest.approx(math.log(2) * 1e-3)  # V -> max
    assert of("optimal", [1.0, 0.0], [0, 0], value_beta=1e4) == pytest.approx([0.5, -0.5], abs=1e-4)  # V -> mean
    assert of("optimal", [2000.0, 0.0], [0, 0]) == pytest.approx([math.log(2), math.log(2) - 2000])


@given(kind=st.sampled_from(KINDS), reward=st.floats(-1e6, 1e6), size=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_equal_rewards_give_exactly_zero(kind, reward, size):
    assert of(kind, [reward] * size, [7] * size) == [0.0] * size


@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 99), shift=st.floats(-100, 100))
@settings(max_examples=20, deadline=None)
def test_a_constant_added_to_rewards_changes_nothing(kind, seed, shift):
    rewards = torch.rand(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    assert_close(advantages(kind, rewards + shift, groups), advantages(kind, rewards, groups), atol=1e-6, rtol=1e-6)


def test_float32_rewards_are_centred_in_float64():
    rewards = torch.tensor([0.1] * 3 + [16777216.0, 16777217.0], dtype=torch.float32)
    result = advantages("grpo", rewards, torch.tensor([0, 0, 0, 1, 1]))
    assert result.dtype == torch.float32
    assert result[:3, 0].tolist() == [0.0] * 3


@pytest.mark.parametrize(
    "groups",
    [
        ["a", "b", "a", "b"],
        np.array(["a", "b", "a", "b"]),
        np.array(["a", "b", "a", "b"], dtype=object),
        np.array([7, 2, 7, 2], dtype=object),
        np.array([7, 2, 7, 2], dtype=np.uint16),
        [torch.tensor(7), torch.tensor(2), 7, 2],
        [UUID(int=1), UUID(int=2), UUID(int=1), UUID(int=2)],
        torch.tensor([7.5, 2.0, 7.5, 2.0]),
        torch.tensor([True, False, True, False]),
    ],
)
@pytest.mark.parametrize("kind", ["dr-grpo", "optimal", "batch-mean"])
def test_group_ids_are_numbers_or_text(kind, groups):
    """With groups (0, 2) and (1, 3), means 2 and 5, of all 3.5; V = 1 + ln((1 + e^2) / 2) and 3 + ln((1 + e^4) / 2)."""
    rewards = [1.0, 3.0, 3.0, 7.0]
    soft = [1 + math.log((1 + math.e**d) / 2) + s for d, s in ((2, 0), (4, 2))]
    values = {"dr-grpo": [2.0, 5.0], "optimal": soft, "batch-mean": [3.5, 3.5]}[kind]
    expected = [1 - values[0], 3 - values[1], 3 - values[0], 7 - values[1]]
    for taken in (rewards, np.array(rewards), np.array(rewards, dtype=object)):
        assert advantages(kind, taken, groups)[:, 0].tolist() == pytest.approx(expected)


ZEROS = torch.zeros(2)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("kind", "rewards", "groups", "keywords", "line"),
    [
        ("gpro", ZEROS, [0, 0], {}, "did you mean 'grpo'"),
        (None, ZEROS, [0, 0], {}, "unknown advantage None"),
        ("grpo", [1.0, math.nan], [0, 0], {}, "reward 1 is nan"),
        ("grpo", [1.0, None], [0, 0], {}, "reward 1 is None"),
        ("grpo", np.array([1, None], dtype=object), [0, 0], {}, "reward 1 is None"),
        ("grpo", ["1.0", 2.0], [0, 0], {}, "reward 0 is '1.0'"),
        ("grpo", ZEROS.to(torch.complex64), [0, 0], {}, "rewards "),
        ("grpo", torch.empty(2, device="meta"), [0, 0], {}, "rewards "),
        ("grpo", ZEROS, torch.ones(2, dtype=torch.complex64), {}, "groups "),
        ("grpo", [1.0, 2.0], [0], {}, "both be"),
        ("grpo", [1.0, 2.0], ["a", None], {}, "group id 1 is None"),
        ("grpo", [1.0, 2.0], [math.nan, 1], {}, "group id 0 is nan"),
        ("grpo", [1.0, 2.0], torch.tensor([1, math.nan]), {}, "group id 1 is nan"),
        ("grpo", [1.0, 2.0], [["a"], "b"], {}, r"group id 0 is \['a'\]"),
        ("grpo", ZEROS, [0, 0], {"value_beta": 1.0}, "value_beta has no effect"),
        *(
            ("optimal", ZEROS, [0, 0], {"value_beta": beta}, "^value_beta")
            for beta in ("1", math.nan, 10**400, -1, 0.0)
        ),
    ],
)
def test_what_is_wrong_is_named(kind, rewards, groups, keywords, line):
    with pytest.raises(TrimtabError, match=line):
        advantages(kind, rewards, groups, **keywords)


def test_float32_holds_what_float16_cannot():
    rewards, groups = torch.tensor([6e4, -6e4, 0.0, 0.0]).half(), [0, 0, 1, 1]
    found = advantages("rloo", rewards, groups)
    assert (found.dtype, found.flatten().tolist()) == (torch.float32, [120_000.0, -120_000.0, 0.0, 0.0])
    assert advantages("rloo", rewards.double(), groups).dtype == torch.float64


ENERGY = torch.tensor([[0.1, 1.1, 0.04], [0.4, 0.25, 9.0]], dtype=torch.float64)  # 1 - 2 p + sum p^2 of each token
LAST_UNTRAINED = torch.tensor([[True, True, True], [True, True, False]])


def token_advantages(rewards: list[float], mask: Tensor = LAST_UNTRAINED, energy: Tensor = ENERGY) -> Tensor:
    logp = torch.full_like(energy, -0.5)
    squares = energy - 1 + 2 * logp.exp()
    return optimal_token_advantages(torch.tensor(rewards), torch.tensor([3, 3]), logp, squares, mask)


def test_the_baseline_of_a_token_weighs_responses_by_the_norm_of_their_score() -> None:
    """W is (.1, 1.2, 1.24) and (.4, .65), B is .2 and .64864865; one response is left at the third position."""
    values = token_advantages([1.0, 0.0])
    assert values[0].tolist() == pytest.approx([0.8, 0.35135135, 1.0])
    assert values[1].tolist() == pytest.approx([-0.2, -0.64864865, 0.0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reward", [1e308, -1e308, math.inf, -math.inf, math.nan, 1.1e18])
def test_a_reward_that_would_overflow_is_named_with_its_index(kind: str, reward: float):
    with pytest.raises(ValueError, match=rf"reward 2 is {reward:g}, ".replace("+", r"\+")):
        of(kind, [1.0, 0.0, reward, -reward], [0, 0, 0, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_rewards_give_finite_advantages_and_squares_in_float32(kind: str):
    rewards = torch.tensor([MAX_REWARD, -MAX_REWARD, MAX_REWARD, 0.0], dtype=torch.float32)
    result = advantages(kind, rewards, [0, 0, 0, 0])
    assert bool(result.isfinite().all())
    assert bool(result.square().isfinite().all())
    assert result[0].item() > result[1].item()


@pytest.mark.parametrize("reward", [1e308, math.nan])
def test_a_token_baseline_names_the_reward_too(reward: float):
    logp = torch.full((2, 3), -1.0)
    with pytest.raises(ValueError, match=r"reward 1 is "):
        optimal_token_advantages(
            torch.tensor([0.0, reward], dtype=torch.float64), torch.tensor([0, 0]), logp, logp.exp(), logp < 0
        )


def test_distillation_is_the_log_ratio_of_the_teacher_to_the_student() -> None:
    """Probabilities .6 / .3, .1 / .4 and .5 / .5 give ln 2, -ln 4 and 0; what is untrained is not read."""
    teacher = torch.tensor([[0.6, 0.1, 0.5, math.nan]]).log()
    student = torch.tensor([[0.3, 0.4, 0.5, 0.5]]).log().requires_grad_()
    values = distillation_advantages(teacher, student, torch.tensor([[True, True, True, False]]))
    assert values.tolist() == [pytest.approx([math.log(2), -math.log(4), 0.0, 0.0], abs=1e-6)]
    assert not values.requires_grad
    excluded = distillation_advantages(torch.tensor([[-math.inf]]), torch.tensor([[-1.0]]), torch.tensor([[True]]))
    assert excluded.item() == -math.inf


@pytest.mark.parametrize("term", ["advantage", "kl"])
def test_distillation_has_the_gradient_of_the_reverse_kl_whatever_sampled(term: str) -> None:
    """The sampler has 1/2, 1/4, 1/4: its tokens a, a, b, c are its exact mean, with weights pi / mu."""
    ids = torch.tensor([[0, 0, 1, 2]])
    behavior = torch.tensor([[0.5, 0.5, 0.25, 0.25]], dtype=torch.float64).log()
    teacher = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64).log()
    mask = torch.ones(1, 4, dtype=torch.bool)
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    current = policy[ids]
    kl = {"kl": "unbiased", "kl_coef": 1.0} if term == "kl" else {}
    built = objective("composed", surrogate={"kind": "unclipped"}, ratio={"over": "behavior"}, **kl)
    values = distillation_advantages(teacher[ids], current, mask) if term == "advantage" else torch.zeros(1, 4)
    loss = built(PolicyLogps(current, behavior, mask, reference=teacher[ids]), values.double()).loss
    (ours,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits)
    assert_close(ours, exact, rtol=1e-12, atol=1e-14)
    assert float(exact.abs().max()) > 0.1
