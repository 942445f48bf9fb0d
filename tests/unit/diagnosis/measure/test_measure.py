"""The pass as a whole: any cut of the data into tables gives the same, bad streams are refused; its even sample."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.token_tables import noisy, pieces, table, values, whole

from trimtab.diagnosis.measure.one_pass import Sample
from trimtab.diagnosis.records import Measured
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import TrimtabError


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Equal up to the last digits of sums."""
    if is_dataclass(one):
        for item in fields(one):
            assert_same(getattr(one, item.name), getattr(other, item.name), f"{where}.{item.name}")
    elif isinstance(one, Mapping):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key}]")
    elif isinstance(one, tuple) and not all(isinstance(item, str) for item in one):
        assert len(one) == len(other), where
        for index, items in enumerate(zip(one, other, strict=True)):
            assert_same(*items, f"{where}[{index}]")
    elif isinstance(one, np.ndarray | float):
        # Centred sums such as a mean log-ratio have an absolute error.
        np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-12, err_msg=where)
    else:
        assert one == other, where


DATA = noisy(0, 60)
DATA_AT_ONCE: Measured = whole(DATA)


@settings(max_examples=5, deadline=None)
@given(st.lists(st.integers(0, DATA.responses), max_size=6))
def test_chunks_change_nothing(cuts: list[int]) -> None:
    assert_same(whole(*pieces(DATA, cuts)), DATA_AT_ONCE)


def test_scatter_has_the_trainer_in_rows_and_the_sampler_in_columns() -> None:
    # Sampler 0.255, trainer 0.855; an untrained token does not count.
    result = whole(table([[np.log(0.855 / 0.255), 0.0]], behavior=np.log(0.255), mask=[[True, False]])).scatter
    assert result.shape == (100, 100)
    assert result.sum() == result[85, 25] == 1


def test_no_trained_token_is_an_error_in_one_line() -> None:
    with pytest.raises(TrimtabError, match="no response has a trained token: check loss_mask"):
        whole(table([[0.0, 0.0]], mask=[[False, False]]))
    with pytest.raises(TrimtabError, match="no response has a trained token"):
        whole()


def drawn(parts: list[TokenTable], tokens: int, longest: int = 1000) -> TokenTable:
    sample, first = Sample(tokens, longest), 0
    for part in parts:
        sample.add(part, first)
        first += part.responses
    return sample.result()


def same(one: TokenTable, other: TokenTable) -> bool:
    return (
        one.columns.keys() == other.columns.keys()
        and np.array_equal(one.starts, other.starts)
        and all(np.array_equal(values, other.columns[name], equal_nan=True) for name, values in one.columns.items())
    )


def numbered(lengths: list[int]) -> TokenTable:
    """Every token carries the index of its response as id."""
    return table([[0.0] * length for length in lengths], ids=[[row] * length for row, length in enumerate(lengths)])


@pytest.mark.parametrize("cuts", [[], [1, 2, 3], [0, 150, 299], list(range(0, 300, 7))])
def test_what_is_kept_does_not_depend_on_chunks(cuts: list[int]) -> None:
    data = noisy(1, 300)
    reference = drawn([data], tokens=1000)
    assert 900 < reference.tokens <= 1000
    assert same(drawn(pieces(data, cuts), tokens=1000), reference)


def test_sample_is_even_over_the_stream() -> None:
    data = numbered([10] * 20_000)
    kept = np.unique(values(drawn(pieces(data, range(0, 20_000, 500)), tokens=20_000), "ids"))
    assert len(kept) == 2000
    quarters = np.bincount(kept // 5000, minlength=4)
    # Binomial with mean 500 and deviation 20.
    assert abs(quarters - 500).max() < 80


def test_responses_stay_whole_and_in_order() -> None:
    data = numbered(np.random.default_rng(0).integers(1, 30, 500).tolist())
    result = drawn([data], tokens=2000)
    ids, length = np.array(values(result, "ids")), np.bincount(values(data, "ids"))
    for low, high in itertools.pairwise(result.starts):
        assert (ids[low:high] == ids[low]).all()
        assert high - low == length[ids[low]]
    assert (np.diff(ids) >= 0).all()


def test_huge_responses_are_cut_and_leave_space_for_others() -> None:
    for place in range(20):
        lengths = [10] * 20
        lengths[place] = 100_000
        result = drawn([numbered(lengths)], tokens=400, longest=50)
        assert result.responses == 20
        assert np.diff(result.starts).tolist() == [50 if row == place else 10 for row in range(20)]
    assert drawn([numbered([100_000])], tokens=400, longest=50).tokens == 50
    assert 350 < drawn([numbered([100_000] * 30)], tokens=400, longest=50).tokens <= 400


def test_chunks_of_other_columns_are_refused() -> None:
    with pytest.raises(TrimtabError, match=r"different columns \(ids only in some\)"):
        drawn([table([[0.0]]), table([[0.0]], ids=[[1]])], tokens=10)
