"""The view by prompt."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.support.token_tables import table, whole


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


def test_there_is_no_view_without_prompts() -> None:
    assert "prompt" not in whole(table([[0.1, 0.2]])).views
