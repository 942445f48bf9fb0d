"""Even, bounded, the same whatever the tables."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.support.token_tables import noisy, pieces, table, values

from trimtab.diagnosis.measure import Sample
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import TrimtabError


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


def test_all_is_kept_where_it_fits() -> None:
    data = noisy(0, 30)
    assert same(drawn(pieces(data, [3, 3, 20]), tokens=data.tokens), data)


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


def test_select_and_concat_undo_each_other() -> None:
    data = noisy(2, 20)
    assert same(TokenTable.concat(pieces(data, [4, 9])), data)
    some = data.select(np.arange(20) % 2 == 1, longest=5)
    assert np.diff(some.starts).tolist() == np.minimum(np.diff(data.starts)[1::2], 5).tolist()
    assert values(some, "step") == values(data, "step")[1::2]
