"""pass@k against enumeration, and the bootstrap against what it must do."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.evaluation import bootstrap, pass_at_k


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(case):
    n, c, k = case
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


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


def test_bootstrap_is_the_binomial_interval_and_repeats():
    values = [1.0] * 60 + [0.0] * 140
    low, high = bootstrap(values, seed=0)
    assert (low, high) == bootstrap(values, seed=0) != bootstrap(values, seed=1)
    half = 1.96 * (0.3 * 0.7 / 200) ** 0.5
    assert low == pytest.approx(0.3 - half, abs=0.012)
    assert high == pytest.approx(0.3 + half, abs=0.012)
    assert bootstrap([1.0] * 5, seed=0) == (1.0, 1.0)
