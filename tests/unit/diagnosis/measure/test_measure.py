"""The pass as a whole: any cut of the data into tables gives the same; its even sample, and what that shows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.token_tables import noisy, pieces, table, values, whole

from trimtab.diagnosis.measure.batch_anomalies import find_anomalies
from trimtab.diagnosis.measure.rescored_sides import judge_sides
from trimtab.diagnosis.measure.sample import Sample
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


@pytest.mark.parametrize(
    ("sampler", "trainer", "shared", "side"),
    [
        (0.5, 0.03, 0.0, "sampler"),
        (0.03, 0.5, 0.0, "trainer"),
        (0.5, 0.5, 0.0, "both"),
        (0.03, 0.04, 0.0, "neither"),
        (0.05, 0.001, 0.0, "sampler"),  # beyond 16 bits, and on one side only
        (0.03, 0.001, 0.0, "neither"),  # within them, if on one side only
        (0.1, 0.1, 1.0, "other"),
    ],
)
def test_the_side_that_differs_from_the_rescored_column(
    sampler: float, trainer: float, shared: float, side: str
) -> None:
    """Gaussian differences, of which k3 is about half the square, from a column that both may be far from."""
    rng = np.random.default_rng(0)
    rescored = (-3 - rng.random(3000)).astype(np.float32)
    away = shared * rng.normal(size=3000)
    behavior, proximal = (rescored + away + spread * rng.normal(size=3000) for spread in (sampler, trainer))
    table = TokenTable(
        starts=np.arange(0, 3001, 30),
        mask=np.ones(3000, dtype=np.bool_),
        behavior=behavior.astype(np.float32),
        proximal=proximal.astype(np.float32),
        rescored=rescored,
    )
    found = judge_sides(table)
    assert ("other" if found.is_other_model else found.side) == side
    if not shared:
        assert found.sampler.value == pytest.approx(sampler**2 / 2, rel=0.3)
        assert found.trainer.low < found.trainer.value < found.trainer.high
    assert judge_sides(replace(table, rescored=None)) is None


GROUPS, SIZE, LENGTH = 12, 4, 20
DRAWN = -np.random.default_rng(1).random((GROUPS * SIZE, LENGTH))


def responses(different: int, logp: Any = -1.0, **columns: Any) -> TokenTable:
    """GROUPS prompts with SIZE responses each, of which `different` are."""
    texts = np.random.default_rng(0).integers(0, 1000, (GROUPS, SIZE, LENGTH))
    texts = texts[:, np.arange(SIZE) % different].reshape(-1, LENGTH)
    group = np.repeat(np.arange(GROUPS), SIZE)
    none = np.zeros((GROUPS * SIZE, LENGTH)).tolist()
    return table(none, ids=texts.tolist(), behavior=logp, group=group, **columns)


def ended(before: int, logp: Any) -> TokenTable:
    """Responses that end with one of `before` ids, and then with id 7, which is not trained."""
    sound = responses(SIZE, logp)
    left = LENGTH - sound.position
    ids = np.where(left == 1, 7, np.where(left == 2, sound.row % before, sound.ids))
    return replace(sound, ids=ids, mask=left > 1)


def test_copies_of_improbable_responses_are_counted() -> None:
    (found,) = find_anomalies(responses(2))
    assert (found.status, found.name) == ("note", "repeated")
    assert found.detail.startswith("24 of 48 responses repeat another one")
    assert "its own seed" in found.next_step


@pytest.mark.parametrize(
    "sound",
    [
        *(responses(SIZE), responses(2, logp=-0.1), responses(2, step=np.tile([0, 0, 1, 1], GROUPS))),
        *(ended(9, -1.0), ended(1, DRAWN)),
    ],
    ids=["all differ", "probable", "asked again in a later step", "end not drawn", "after an end that is trained"],
)
def test_other_copies_and_ends_are_not(sound: TokenTable) -> None:
    assert list(find_anomalies(sound)) == []


def test_an_end_token_that_was_drawn_must_be_trained() -> None:
    (found,) = find_anomalies(ended(9, DRAWN))
    assert (found.status, found.name) == ("note", "end token")
    assert found.detail.startswith("in 48 of 48 responses the last token that the sampler drew")


def rewards(*groups: tuple[float, ...]) -> np.ndarray:
    return np.array([value for at in range(GROUPS) for value in groups[at % len(groups)]])


REWARD = rewards((1, 0, 0, 1), (5, 5, 5, 5))
CENTERED = rewards((1, -1, -1, 1), (0, 0, 0, 0))


def names(advantage: np.ndarray, reward: np.ndarray = REWARD) -> list[str]:
    return [one.detail for one in find_anomalies(responses(SIZE, reward=reward, advantage=advantage))]


def test_equal_rewards_with_advantages_are_named() -> None:
    over_the_batch = (REWARD - REWARD.mean()) / REWARD.std()
    (detail,) = names(over_the_batch)
    assert detail.startswith("in 6 of 6 groups with equal rewards the advantages are not 0")


def test_advantages_of_other_responses_are_named() -> None:
    (detail,) = names(-CENTERED)
    assert detail == "in 6 of 6 groups with different rewards larger rewards have smaller advantages"


def test_sound_advantages_are_not_named() -> None:
    assert names(CENTERED) == []
    assert names(np.full(len(REWARD), np.nan)) == []
    assert list(find_anomalies(responses(SIZE, reward=REWARD))) == []


def test_measuring_reports_it() -> None:
    assert [one.name for one in whole(responses(2)).origin.findings] == ["repeated"]
