"""Sampling masks in files: every id back, in few bytes, and nothing by halves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.runs import binary_columns
from trimtab.types import Completion, IntArray

SETS = st.lists(st.lists(st.integers(0, 200_000), unique=True).map(sorted), max_size=8)


def completion(*sets: list[int]) -> Completion:
    n = len(sets)
    kept = tuple(np.array(ids, dtype=np.int64) for ids in sets)
    return Completion(
        np.zeros(n, np.int64), np.zeros(n, np.float32), np.zeros(n, np.int64), "stop", "", sampling_mask=kept
    )


def stored(*sets: list[int]) -> dict:
    column = binary_columns.encode_masks([completion(*sets)])
    assert column is not None
    return column.to_pylist()[0]


def ids(sets: tuple[IntArray, ...] | None) -> list[list[int]]:
    assert sets is not None
    return [one.tolist() for one in sets]


def test_what_is_stored_are_steps_lowest_bytes_first() -> None:
    result = stored([5, 6, 300], [2])
    assert result["width"] == 2
    assert np.frombuffer(result["sizes"], np.int32).tolist() == [3, 1]
    # Steps 5, 1, 294 = 256 + 38 and, anew, 2.
    assert list(result["steps"]) == [5, 1, 38, 2, 0, 0, 1, 0]
    assert ids(binary_columns.decode_mask(result)) == [[5, 6, 300], [2]]


@pytest.mark.parametrize(("largest", "width"), [(255, 1), (256, 2), (65_535, 2), (65_536, 4)])
def test_a_step_takes_as_many_bytes_as_the_largest_needs(largest: int, width: int) -> None:
    result = stored([0, largest], [1])
    assert (result["width"], len(result["steps"])) == (width, 3 * width)
    # A long way down from set to set is no step.
    assert stored([100_000 + largest], [3])["width"] == 4
    assert ids(binary_columns.decode_mask(result)) == [[0, largest], [1]]


@given(st.lists(SETS, min_size=1, max_size=3))
def test_sets_come_back(rows: list[list[list[int]]]) -> None:
    column = binary_columns.encode_masks([completion(*row) for row in rows])
    assert column is not None
    result = [binary_columns.decode_mask(value) for value in column.to_pylist()]
    assert [ids(sets) for sets in result] == rows
    assert all(one.dtype == np.int64 for sets in result for one in sets or ())


def test_a_file_has_all_sets_or_none() -> None:
    plain = Completion(np.array([1]), np.zeros(1, np.float32), np.array([0]), "stop", "")
    assert binary_columns.encode_masks([plain, plain]) is None
    assert binary_columns.decode_mask(None) is None
    with pytest.raises(ValueError, match="kept: 1 of 2 rows have it"):
        binary_columns.encode_masks([completion([1]), plain])


def test_bytes_that_are_not_as_many_as_the_sizes_say_are_refused() -> None:
    result = stored([5, 6, 300], [2])
    with pytest.raises(ValueError, match="reshape"):
        binary_columns.decode_mask(result | {"steps": result["steps"][:-1]})
