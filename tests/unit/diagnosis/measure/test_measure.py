"""The pass as a whole: any cut of the data into tables gives the same, and bad streams are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.token_tables import ORIGIN, noisy, pieces, table, whole

from trimtab.diagnosis.measure import measure
from trimtab.diagnosis.records import Measured
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


def test_seed_draws_the_bootstrap_only() -> None:
    other = whole(DATA, seed=1)
    assert other.size.mismatch == DATA_AT_ONCE.size.mismatch
    assert other.size.intervals["k3"].low != DATA_AT_ONCE.size.intervals["k3"].low
    assert_same(other.views, DATA_AT_ONCE.views)


def test_scatter_has_the_trainer_in_rows_and_the_sampler_in_columns() -> None:
    # Sampler 0.255, trainer 0.855; an untrained token does not count.
    result = whole(table([[np.log(0.855 / 0.255), 0.0]], behavior=np.log(0.255), mask=[[True, False]])).scatter
    assert result.shape == (100, 100)
    assert result.sum() == result[85, 25] == 1


def test_origin_is_called_after_the_last_table() -> None:
    calls: list[str] = []

    def tables() -> Any:
        yield DATA
        calls.append("end")

    measured = measure(tables(), lambda: (calls.append("origin"), ORIGIN)[1])
    assert calls == ["end", "origin"]
    assert measured.origin == replace(ORIGIN, trained=int(DATA.mask.sum()))


def test_no_trained_token_is_an_error_in_one_line() -> None:
    with pytest.raises(TrimtabError, match="no response has a trained token: check loss_mask"):
        whole(table([[0.0, 0.0]], mask=[[False, False]]))
    with pytest.raises(TrimtabError, match="no response has a trained token"):
        whole()


def test_untrained_responses_and_empty_chunks_are_accepted() -> None:
    empty = pieces(DATA, [0])[0]
    untrained = table([[0.0]], mask=[[False]])
    assert empty.responses == 0
    assert_same(whole(empty, *pieces(DATA, [20]), empty), DATA_AT_ONCE)
    result = whole(untrained, table([[0.5]]))
    assert result.size.mismatch["sequences"] == 1
    assert result.sample.responses == 2
