"""Views by hand, planted mismatch found where it is, and what views have in common."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from tests.support.token_tables import noisy, table, values, whole

from trimtab.diagnosis.measure.trained_tokens import PROBABILITY_EDGES

TWO = math.log(2)


def test_by_probability_by_hand() -> None:
    # Ratios 2 and 1/2 at p = 0.25, ratio 1 at p = 0.9; bins likely tokens last.
    view = whole(table([[TWO, -TWO, 0.0]], behavior=[[math.log(0.25)] * 2 + [math.log(0.9)]])).views["probability"]
    assert view.count.tolist() == [0] * 13 + [2, 1]
    assert view.labels[13:] == ("0.22 - 0.46", "0.46 - 1")
    assert view.labels[0] == "below 2.2e-05"
    assert values(view, "edges") == PROBABILITY_EDGES.tolist()
    assert view.ratio_mean[13:] == pytest.approx([1.25, 1.0])
    assert view.log_ratio_mean[13:] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert view.k3[13:] == pytest.approx([0.25, 0.0], abs=1e-6)
    assert view.abs_mean[13:] == pytest.approx([TWO, 0.0], abs=1e-6)
    # 2% of the way from -log 2 to log 2.
    assert view.low[13] == pytest.approx(-0.96 * TWO, rel=0.02)
    assert view.median[13] == pytest.approx(0.0, abs=1e-6)
    assert view.high[13] == pytest.approx(0.96 * TWO, rel=0.02)
    assert np.isnan(view.k3[:13]).all()
    assert np.isnan(view.high[:13]).all()


def test_by_position_counts_untrained_tokens_as_places() -> None:
    # Of ten tokens the trained ones stand in tenths 0, 4 and 9.
    mask = [place in (0, 4, 9) for place in range(10)]
    ratios = [TWO if place == 4 else 0.0 for place in range(10)]
    view = whole(table([ratios], mask=[mask])).views["position"]
    assert view.count.tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert view.ratio_mean[[0, 4, 9]] == pytest.approx([1, 2, 1])


def test_by_entropy_by_hand() -> None:
    view = whole(table([[0.0, TWO, 0.0, 0.0, -TWO]], entropy=[[0.0, 0.005, 0.25, 0.3, 7.5]])).views["entropy"]
    assert view.labels[0] == "0 - 0.01"
    assert view.labels[-1] == "6 - 12"
    assert view.count.tolist() == [2, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    assert values(view, "edges")[:2] + values(view, "edges")[-2:] == [0.0, 0.01, 6.0, 12.0]
    assert view.ratio_mean[[0, -1]] == pytest.approx([1.5, 0.5])


def test_by_turn_by_hand() -> None:
    # Turns of 5, 2 and 1 tokens: the second's tokens stand behind its own boundary, not before the next.
    mask = [[True] * 5 + [False, True, True, False, False, True]]
    ratios = [[0.0] * 4 + [0.1] + [9.0, 0.2, 0.3, 9.0, 9.0, 0.4]]
    views = whole(table(ratios, mask=mask)).views
    assert views["turn"].labels == ("-3", "-2", "-1", "0", "+1", "+2", "+3", "elsewhere")
    assert views["turn"].count.tolist() == [1, 1, 1, 2, 1, 0, 0, 2]
    assert views["turn"].log_ratio_mean[2:5] == pytest.approx([0.1, 0.3, 0.3], rel=1e-5)
    assert views["turn-number"].labels == ("1", "2", "3")
    assert views["turn-number"].count.tolist() == [5, 2, 1]
    assert views["turn-number"].log_ratio_mean == pytest.approx([0.02, 0.25, 0.4], rel=1e-5)
    assert views["observation"].labels == ("0", "1", "no observation yet")
    assert views["observation"].count.tolist() == [2, 1, 5]
    assert views["observation"].log_ratio_mean == pytest.approx([0.3, 0.3, 0.02], rel=1e-5)
    assert views["observation"].k3[1] == pytest.approx(np.expm1(0.3) - 0.3, rel=1e-5)


def test_a_column_of_turns_decides_where_they_begin() -> None:
    # The second turn begins at the seventh token; an untrained token inside a turn is no boundary.
    mask = [[True, True, False, True, True, False, True, True]]
    ratios = [[0.0, 0.0, 9.0, 0.0, 0.1, 9.0, 0.2, 0.3]]
    data = replace(table(ratios, mask=mask), turn=np.array([0, 0, 0, 0, 0, 0, 1, 1]))
    views = whole(data).views
    assert views["turn-number"].count.tolist() == [4, 2]
    assert views["observation"].count.tolist() == [1, 1, 4]
    # Where only the second turn is trained, it is still the second, after an observation.
    later = replace(data, mask=np.array([False] * 6 + [True, True]))
    assert whole(later).views["observation"].labels == ("0", "1")
    assert "turn-number" not in whole(later).views


def test_distances_from_an_observation_are_binned() -> None:
    mask = np.array([True] + [False] + [True] * 200)
    view = whole(table([[0.0] * 202], mask=[mask.tolist()])).views["observation"]
    assert view.labels == (
        *("0", "1", "2", "3", "4-7", "8-15", "16-31", "32-63", "64-127", "128 and more", "no observation yet"),
    )
    assert view.count.tolist() == [1, 1, 1, 1, 4, 8, 16, 32, 64, 72, 1]


def test_ages_by_hand() -> None:
    data = table([[0.1, 0.2, 0.3], [0.4, 0.5]], version=[[7, 6, 1], [9, 400]], proximal_version=[7, 409])
    view = whole(data).views["version"]
    assert view.labels == ("0", "1", "5-8", "9-16", "257 and more")
    assert view.count.tolist() == [1, 1, 1, 1, 1]
    assert view.log_ratio_mean == pytest.approx([0.1, 0.2, 0.3, 0.5, 0.4], rel=1e-6)
    assert view.note == ""


def test_tokens_newer_than_the_trainer_have_their_own_bin() -> None:
    view = whole(table([[0.1, 0.2]], version=[[3, 5]], proximal_version=[4])).views["version"]
    assert view.labels == ("newer than the trainer", "1")
    assert view.log_ratio_mean == pytest.approx([0.2, 0.1], rel=1e-6)


def test_by_length_by_hand() -> None:
    # The untrained token does not count as length; the response without a trained one is no response.
    ratios = [[0.8], [0.0, 0.0, 0.0], [math.log(2.5), 0.0, 0.0, 1.0], [0.0], [0.1] * 17]
    mask = [[True], [True, True, True], [True, True, True, False], [False], [True] * 17]
    view = whole(table(ratios, mask=mask)).views["length"]
    assert view.labels == ("1", "3", "16-22")
    assert view.count.tolist() == [1, 6, 17]
    assert view.log_ratio_mean == pytest.approx([0.8, math.log(2.5) / 6, 0.1], rel=1e-6)


def test_ids_by_hand() -> None:
    # k3 is 1 - log 2 for ratio 2 and log 2 - 1/2 for ratio 1/2; an untrained token of id 5 does not count.
    view = whole(
        table([[TWO, TWO, -TWO, 0.0, 9.0]], ids=[[5, 5, 7, 9, 5]], mask=[[True, True, True, True, False]])
    ).views["token"]
    first, second = 2 * (1 - TWO), TWO - 0.5
    assert view.labels == ("5", "7", "9")
    assert view.columns["id"].tolist() == [5, 7, 9]
    assert view.count.tolist() == [2, 1, 1]
    assert view.columns["share"] == pytest.approx([first / (first + second), second / (first + second), 0.0], abs=1e-6)
    assert view.k3 == pytest.approx([first / 2, second, 0.0], abs=1e-6)
    assert view.ratio_mean == pytest.approx([2.0, 0.5, 1.0])
    assert np.isnan(view.median).all()  # too few for percentiles


def test_planted_ids_stand_first_whatever_the_vocabulary() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 200_000, 4000)
    ids[::40] = 199_999
    ids[1::80] = 150_000
    ratios = 0.001 * rng.standard_normal(4000)
    ratios[::40] = 0.5
    ratios[1::80] = -0.2
    view = whole(table(ratios.reshape(40, 100).tolist(), ids=ids.reshape(40, 100).tolist())).views["token"]
    assert view.labels[:2] == ("199999", "150000")
    assert len(view.labels) == 20
    assert view.median[:2] == pytest.approx([0.5, -0.2], rel=1e-6)
    assert view.columns["share"][0] > 0.9


def test_ids_outside_a_vocabulary_are_counted_together() -> None:
    view = whole(table([[1.0, 1.0, 0.0]], ids=[[-3, 1 << 60, 4]])).views["token"]
    assert view.labels == ("other", "4")
    assert view.columns["id"].tolist() == [-1, 4]
    assert view.count.tolist() == [2, 1]
    none = whole(table([[0.0, 0.0]], ids=[[2, 1]])).views["token"]
    assert (none.labels, none.columns["share"].tolist()) == (("1", "2"), [0.0, 0.0]), "no mismatch has no shares"


def test_prompts_are_ordered_by_their_share_of_k3() -> None:
    """Prompt 7 holds both large ratios; k3 of .5 is e^.5 - 1.5 = .1487, that of .1 is .00517."""
    view = whole(table([[0.1, 0.1], [0.5, 0.1], [0.5], [0.1]], prompt=[3, 7, 7, 3])).views["prompt"]
    assert view.labels == ("7", "3")
    assert view.count.tolist() == [3, 3]
    assert view.columns["responses"].tolist() == [2, 2]
    large, small = np.expm1(0.5) - 0.5, np.expm1(0.1) - 0.1
    assert view.k3 == pytest.approx([(2 * large + small) / 3, small], rel=1e-5)
    assert view.columns["share"] == pytest.approx(np.array([2 * large + small, 3 * small]) / (2 * large + 4 * small))


def test_the_note_says_whether_errors_repeat() -> None:
    random = np.random.default_rng(0)
    prompt = np.repeat(np.arange(40), 5)
    size = random.lognormal(size=40)[prompt]
    repeated = whole(table([list(one * random.normal(size=30)) for one in size], prompt=prompt)).views["prompt"]
    # 1 of the variance, less what 40 prompts without a meaning explain of 200 responses: (39 + 3 sqrt(78)) / 200 = .33.
    assert re.search(r"decides 6\d% of the variance", repeated.note)
    chance = whole(table([list(one * random.normal(size=30)) for one in random.permutation(size)], prompt=prompt))
    assert "decides 0%" in chance.views["prompt"].note


def test_columns_that_are_absent_cost_their_views_only() -> None:
    assert set(whole(table([[0.0, 0.1]])).views) == {"probability", "position", "length"}
    assert set(whole(noisy(0, 40)).views) == {
        *("probability", "position", "length", "token", "turn", "turn-number", "observation", "version", "entropy")
    }


@pytest.mark.parametrize(
    "name", ["probability", "position", "length", "turn", "turn-number", "observation", "version", "entropy"]
)
def test_views_split_all_tokens_and_all_k3(name: str) -> None:
    result = whole(noisy(1, 60))
    view = result.views[name]
    assert view.count.sum() == result.size.mismatch["tokens"]
    assert np.nansum(view.count * view.k3) == pytest.approx(result.size.mismatch["k3"] * view.count.sum(), rel=1e-9)
    inside = view.count > 20
    assert ((view.low < view.median) & (view.median < view.high))[inside].all()
