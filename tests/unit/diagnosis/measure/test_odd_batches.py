"""Responses that are one, and advantages that do not follow from the rewards, are found in a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.token_tables import table, whole

from trimtab.diagnosis.measure.one_pass import batch_findings
from trimtab.diagnosis.tokens import TokenTable

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
    (found,) = batch_findings(responses(2))
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
    assert list(batch_findings(sound)) == []


def test_an_end_token_that_was_drawn_must_be_trained() -> None:
    (found,) = batch_findings(ended(9, DRAWN))
    assert (found.status, found.name) == ("note", "end token")
    assert found.detail.startswith("in 48 of 48 responses the last token that the sampler drew")


def rewards(*groups: tuple[float, ...]) -> np.ndarray:
    return np.array([value for at in range(GROUPS) for value in groups[at % len(groups)]])


REWARD = rewards((1, 0, 0, 1), (5, 5, 5, 5))
CENTERED = rewards((1, -1, -1, 1), (0, 0, 0, 0))


def names(advantage: np.ndarray, reward: np.ndarray = REWARD) -> list[str]:
    return [one.detail for one in batch_findings(responses(SIZE, reward=reward, advantage=advantage))]


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
    assert list(batch_findings(responses(SIZE, reward=REWARD))) == []


def test_measuring_reports_it() -> None:
    assert [one.name for one in whole(responses(2)).origin.findings] == ["repeated"]
