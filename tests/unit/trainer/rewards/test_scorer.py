"""Several weighted rewards, a user's own among them; a failing one is reported and the others still count."""

import os
import time

import numpy as np
import pytest

from trimtab.trainer import rewards, tasks
from trimtab.trainer.rewards import Response
from trimtab.types import Completion, Problem, RewardSpec

SUM = tasks.build("arithmetic")
ITEM = (Problem("23+45", "23 + 45 =", "68", {"bonus": 3}), Response(" 68", "stop", 4))


def test_the_tasks_own_reward_is_the_default():
    with rewards.build([], SUM) as scorer:
        assert scorer.score([ITEM])[0] == rewards.Score(1.0, {"exact": 1.0}, None)


def test_total_is_the_weighted_sum_of_unweighted_parts():
    def bonus(completion, problem):
        return len(completion) + problem.extra["bonus"]

    specs = [RewardSpec("exact", 2.0), RewardSpec(bonus, -0.5), RewardSpec("format", 1.0, 5.0, {"pattern": "x"})]
    with rewards.build(specs, SUM) as scorer:
        score = scorer.score([ITEM])[0]
    assert dict(score.parts) == {"exact": 1.0, "bonus": 6.0, "format": 0.0}
    assert next(iter(score.parts)) == "exact"
    assert score.total == 2.0 - 3.0


def test_the_same_reward_twice_keeps_two_names():
    specs = [RewardSpec("format", options={"pattern": pattern}) for pattern in (".*8", "7.*")]
    with rewards.build(specs, SUM) as scorer:
        assert dict(scorer.score([ITEM])[0].parts) == {"format": 1.0, "format-2": 0.0}


def test_a_name_that_another_one_begins_with_is_not_the_same():
    def reasoning(completion, problem):
        raise NotImplementedError

    specs = [RewardSpec("reasoning-gym"), RewardSpec(reasoning), RewardSpec(reasoning)]
    assert [entry.name for entry in rewards.weighted(specs, SUM)] == ["reasoning-gym", "reasoning", "reasoning-2"]


class Mute(Exception):
    def __str__(self):
        raise ValueError


def moody(completion, problem):  # noqa: ARG001
    word = completion.strip()
    if word == "raise":
        raise RuntimeError("out of patience")
    if word == "mute":
        raise Mute
    if word == "hang":
        time.sleep(100)
    if word == "leave":
        os._exit(1)
    return float("nan") if word == "nan" else 0.5


@pytest.mark.e2e
def test_failures_are_per_sample_and_name_reward_and_problem():
    words = ["fine", "raise", "mute", "hang", "leave", "nan", "fine"]
    items = [(ITEM[0], Response(f" {word}", "stop", 4)) for word in words]
    with rewards.build([RewardSpec("exact", 1.0, 5.0, {}), RewardSpec(moody, 1.0, 1.0, {})], SUM) as scorer:
        scores = scorer.score(items)
        assert scorer.score([ITEM])[0].total == 1.5
    assert [score.total for score in scores] == [0.5, None, None, None, None, None, 0.5]
    assert [score.error for score in scores] == [
        None,
        "problem '23+45': reward 'moody' raised RuntimeError: out of patience",
        "problem '23+45': reward 'moody' raised Mute",
        "problem '23+45': reward 'moody' took longer than 1 s",
        "problem '23+45': reward 'moody' ended its process (exit code 1)",
        "problem '23+45': reward 'moody' returned nan, not a finite number",
        None,
    ]
    assert all(dict(score.parts) == {"exact": 0.0} for score in scores[1:6])


def test_a_user_function_by_name_is_found_beside_the_user(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def short(completion, problem):\n    return 1 / len(completion)\n")
    monkeypatch.chdir(tmp_path)
    with rewards.build([RewardSpec("my_rewards:short", 1.0, 5.0, {})], SUM) as scorer:
        assert scorer.score([ITEM])[0] == rewards.Score(1 / 3, {"my_rewards:short": 1 / 3}, None)


def test_completions_of_an_engine_are_scored_as_they_come():
    ids = np.arange(3)
    completion = Completion(ids, np.zeros(3, np.float32), ids, "length", " 68")
    specs = [RewardSpec("exact"), RewardSpec("overlong", options={"max_tokens": 4, "cache": 4})]
    with rewards.build(specs, SUM) as scorer:
        assert dict(scorer.score([(ITEM[0], completion)])[0].parts) == {"exact": 0.0, "overlong": -0.75}


def test_a_deleted_scorer_ends_its_processes():
    scorer = rewards.build([RewardSpec(lambda completion, problem: os.getppid(), 1.0, 5.0, {})], SUM)  # noqa: ARG005
    supervisor = int(scorer.score([ITEM])[0].total or 0)
    del scorer
    with pytest.raises(ProcessLookupError):
        os.kill(supervisor, 0)


@pytest.mark.parametrize(
    ("value", "weight", "error"),
    [
        (1e308, 1.0, "reward 'absurd' returned 1e+308, above 1e+18"),
        (-1e19, 1.0, "reward 'absurd' returned -1e+19, above 1e+18"),
        (1e17, 1e3, "the weighted sum of the rewards returned 1e+20, above 1e+18"),
    ],
)
def test_an_absurd_reward_costs_its_sample_only(value: float, weight: float, error: str):
    def absurd(completion, problem):  # noqa: ARG001
        return value if completion.strip() == "large" else 0.5

    items = [(ITEM[0], Response(f" {word}", "stop", 4)) for word in ("large", "fine")]
    with rewards.build([RewardSpec(absurd, weight)], SUM) as scorer:
        large, fine = scorer.score(items)
    assert (large.total, large.error) == (None, f"problem '23+45': {error}")
    if weight == 1.0:
        assert (fine.total, fine.error) == (0.5, None)
