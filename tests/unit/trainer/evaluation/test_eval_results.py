"""pass@k against enumeration, and the result of one model on one task."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.eval_results import result

from trimtab.errors import TrimtabError
from trimtab.intervals import wilson
from trimtab.trainer.evaluation import pass_at_k


def brute(n, c, k):
    """The share of k-subsets of n samples, c of them right, that hold a right one."""
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    return sum(map(any, subsets)) / len(subsets)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(case):
    n, c, k = case
    assert pass_at_k(n, c, k) == pytest.approx(brute(n, c, k), abs=1e-12)


@given(st.integers(2, 8).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n), min_size=1, max_size=6))))
def test_a_result_averages_enumerated_subsets_over_problems(case):
    n, correct = case
    actual = result([(c, n) for c in correct])
    passes = {k: estimate.value for k, estimate in actual.pass_estimates.items()}
    assert passes == pytest.approx({k: sum(brute(n, c, k) for c in correct) / len(correct) for k in actual.pass_ks})
    assert passes[1] == pytest.approx(actual.accuracy)


def test_hand_numbers_and_large_counts():
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert pass_at_k(5, 4, 2) == 1.0
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5)
    assert pass_at_k(100_000, 1, 1) == pytest.approx(1e-5)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 2), (4, -1, 2), (4, 1, 0)])
def test_undefined_cases_are_errors(n, c, k):
    with pytest.raises(TrimtabError, match="pass@"):
        pass_at_k(n, c, k)


def test_pass_at_k_has_an_interval_for_every_k():
    """Eight samples: pass@8 is yes or no, one observation a problem; pass@1 is the accuracy."""
    actual = result([(0, 8), (1, 8), (2, 8), (8, 8)])
    assert tuple(actual.pass_estimates) == (1, 2, 4, 8)
    assert actual.pass_estimates[1] == actual.accuracy_estimate
    assert actual.pass_estimates[8] == pytest.approx((0.75, *wilson(0.75, 4)))
    assert result([(8, 8)] * 5).pass_estimates[2] == pytest.approx((1.0, *wilson(1.0, 5)))
