"""Samples are dealt to all reward actors; those of a lost actor are scored once more, without a cluster here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trimtab.trainer.cluster.reward_actors import LOST_TWICE, RayScorer
from trimtab.trainer.rewards import Response, Score
from trimtab.types import Problem


class Dealt(RayScorer):
    """Three actors, of which number 1 is lost `losses` times; a sample's score is the number in its id."""

    def __init__(self, losses: int) -> None:
        self._hosts = [None] * 3
        self._losses = losses
        self.calls: list[dict[int, list[int]]] = []

    def _score_parts(
        self, parts: dict[int, list[int]], packed: Sequence[str | None], scores: list[Score]
    ) -> dict[int, list[int]]:
        self.calls.append(parts)
        lost = {number: part for number, part in parts.items() if number == 1 and len(self.calls) <= self._losses}
        for index in (index for number in parts.keys() - lost for index in parts[number]):
            assert packed[index] is not None
            scores[index] = Score(float(index), {}, None)
        return lost


@pytest.mark.parametrize("losses", [0, 1, 2])
def test_every_sample_is_scored_in_its_place(losses: int) -> None:
    scorer = Dealt(losses)
    problems = [Problem(str(index), "", "", {"set": {1}} if index == 2 else {}) for index in range(8)]
    scores = scorer._score([(problem, Response("a", "stop", 1)) for problem in problems])
    sizes = sorted(len(part) for part in scorer.calls[0].values())
    assert sizes == [2, 2, 3]
    assert sorted(index for part in scorer.calls[0].values() for index in part) == [0, 1, 3, 4, 5, 6, 7]
    lost = scorer.calls[0][1] if losses == 2 else []
    expected = [None if index == 2 or index in lost else float(index) for index in range(8)]
    assert [score.total for score in scores] == expected
    assert "not JSON" in str(scores[2].error)
    assert all(LOST_TWICE in str(scores[index].error) for index in lost)


def test_fewer_samples_than_actors() -> None:
    scorer = Dealt(0)
    [score] = scorer._score([(Problem("0", "", ""), Response("a", "stop", 1))])
    assert score.total == 0.0
    assert scorer.calls[0] == {0: [0]}
