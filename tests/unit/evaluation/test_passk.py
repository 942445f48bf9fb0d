"""pass@k against enumeration, and the bootstrap against what it must do."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.evaluation import bootstrap, estimates, pass_at_k
from trimtab.evaluation.result import EvalResult, Part, ProblemResult


def result(counts, seed=0, task="t"):
    """An evaluation with these (correct, scored) counts."""
    problems = tuple(ProblemResult(f"p{i}", n, c, c / n) for i, (c, n) in enumerate(counts))
    part = Part(problems, sum(n for _, n in counts), 0, 0, 0, 0, (), 0.0)
    return EvalResult.of([part], task=task, samples=max(n for _, n in counts), temperature=1.0, seed=seed)


def brute(n, c, k):
    """The share of k-subsets of n samples, c of them right, that hold a right one."""
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    return sum(map(any, subsets)) / len(subsets)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(case):
    n, c, k = case
    assert pass_at_k(n, c, k) == pytest.approx(brute(n, c, k), abs=1e-12)


@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(1, n), st.lists(st.integers(0, n), min_size=1, max_size=6))
    )
)
def test_a_result_averages_enumerated_subsets_over_problems(case):
    n, k, correct = case
    found = result([(c, n) for c in correct])
    assert found.pass_at(k) == pytest.approx(sum(brute(n, c, k) for c in correct) / len(correct), abs=1e-12)
    assert found.pass_at(1) == pytest.approx(found.accuracy)
    assert found.pass_at(n) == pytest.approx(sum(c > 0 for c in correct) / len(correct))
    assert np.all(np.diff(found.passes(range(1, n + 1)), axis=1) >= 0), "more tries never hurt"


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


def enumerated(values):
    """Quantiles of the mean over all n^n resamples: the bootstrap without chance."""
    means = np.array([np.mean(drawn) for drawn in product(values, repeat=len(values))])
    return np.quantile(means, [0.025, 0.975])


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0, 1.0], [0.0, 0.1, 0.5, 0.9, 1.0], [0.2, 0.3, 0.31, 0.8, 0.81, 0.9]])
def test_intervals_are_those_of_all_resamples(values):
    low, high = enumerated(values)
    [found] = estimates([[[value] for value in values]], seed=5)
    assert found.value == pytest.approx(np.mean(values))
    assert found.low == pytest.approx(low, abs=0.021)
    assert found.high == pytest.approx(high, abs=0.021)
    assert (found.low, found.high) == bootstrap(values, seed=5), "one task alone has the interval it always had"


def test_pass_at_k_intervals_against_another_implementation():
    """Multinomial weights instead of drawn indices, other random numbers, the formula by brute force."""
    rng = np.random.default_rng(7)
    counts = [(int(c), 8) for c in rng.binomial(8, rng.beta(0.5, 1.0, size=60))]
    found = result(counts).pass_estimates
    weights = rng.multinomial(60, np.full(60, 1 / 60), size=20_000) / 60
    assert tuple(found) == (1, 2, 4, 8)
    for k, estimate in found.items():
        values = np.array([brute(8, c, k) for c, _ in counts])
        assert estimate.value == pytest.approx(values.mean())
        assert [estimate.low, estimate.high] == pytest.approx(np.quantile(weights @ values, [0.025, 0.975]), abs=0.01)


def test_the_macro_mean_weighs_tasks_not_problems():
    few, many = [[1.0, 1.0]] * 2, [[0.0, 0.5]] * 6
    first, second = estimates([few, many], seed=0)
    assert (first.value, second.value) == pytest.approx((0.5, 0.75)), "pooled it would be 0.25 and 0.625"
    assert (first.low, first.high) == pytest.approx((0.5, 0.5))


def test_tasks_of_equal_size_are_resampled_independently():
    task = [[float(value)] for value in [0, 1] * 50]
    [one], [two] = estimates([task], seed=0), estimates([task, task], seed=0)
    assert (two.high - two.low) / (one.high - one.low) == pytest.approx(2**-0.5, abs=0.06)


def test_a_column_of_differences_has_the_paired_interval():
    """Two systems that differ by .1 on every problem: however uncertain each, the difference is certain."""
    hard = np.linspace(0, 0.9, 30)[:, None]
    both = np.concatenate([hard, hard + 0.1, hard + 0.1 - hard], axis=1)
    alone, relay, gain = estimates([both], seed=3)
    assert gain.low == pytest.approx(0.1)
    assert gain.high == pytest.approx(0.1)
    assert relay.low - alone.low == pytest.approx(0.1), "columns share their draws"
    assert alone.high - alone.low > 0.1
