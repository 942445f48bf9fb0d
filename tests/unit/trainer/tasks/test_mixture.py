"""Mixtures of tasks: shares, splits, prompts and rewards of each task, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer import rewards, tasks
from trimtab.trainer.rewards import Response
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.trainer.tasks import mixture
from trimtab.types import Problem

SUM = {"name": "arithmetic", "digits": 1, "holdout": 4, "label": "sum"}
PRODUCT = {"name": "arithmetic", "operation": "*", "digits": 1, "holdout": 4, "examples": 1, "label": "product"}


def labels(problems: list[Problem]) -> Counter[str]:
    return Counter(problem.extra["task"] for problem in problems)


def test_an_epoch_has_every_problem_and_the_shares_of_the_weights() -> None:
    """Rows of 3 and 12 problems, weights 1 and 2: the second sets the epoch, 12 problems of it and 6 of the first."""
    problems = {name: [Problem(str(i), "q", "a") for i in range(size)] for name, size in (("a", 3), ("b", 12))}
    epoch = list(mixture._mix(problems, {"a": 1.0, "b": 2.0}))
    assert Counter(problem.id for problem in epoch) == {
        **{f"a/{i}": 2 for i in range(3)},
        **{f"b/{i}": 1 for i in range(12)},
    }
    held_out = mixture._interleave(problems, {"a": 1.0, "b": 2.0})
    assert [problem.id for problem in held_out[:6]] == ["b/0", "a/0", "b/1", "b/2", "a/1", "b/3"]
    assert len({problem.id for problem in held_out}) == 15


def test_a_rare_task_beside_a_large_one_does_not_make_the_epoch_endless() -> None:
    built = tasks.build("mixture", part=[{"name": "sort"}, {"name": "sort", "label": "rare", "weight": 1e-4}])
    assert len(built.train) == pytest.approx(mixture.EPOCH, rel=1e-3)


def test_each_problem_has_the_prompt_the_gold_answer_and_the_rewards_of_its_task() -> None:
    built = tasks.build("mixture", part=[SUM, PRODUCT])
    alone = tasks.build("arithmetic", **{key: SUM[key] for key in ("digits", "holdout")})
    problem = built.train[0]
    assert problem.id == f"sum/{alone.train[0].id}"
    assert built.prompt_text(problem, None) == alone.prompt_text(alone.train[0], None)
    assert built.gold(problem) == alone.gold(alone.train[0])
    product = next(problem for problem in built.test if problem.extra["task"] == "product")
    assert built.prompt_text(product, None).count("Question") == 2
    with rewards.build([], built) as scorer:
        good, bad = (Response(f" {text}\n", "stop", 3) for text in (product.answer, "nothing"))
        assert [score.total for score in scorer.score([(product, good), (product, bad)])] == [1.0, 0.0]


def test_rewards_by_task_add_up_with_their_weights() -> None:
    built = tasks.build("mixture", part=[SUM, PRODUCT])
    exact, short = {"name": "exact"}, {"name": "format", "pattern": ".+", "weight": 0.5}
    specs = [rewards.RewardSpec("by-task", options={"rewards": {"sum": [exact, short], "product": [short]}})]
    with rewards.build(specs, built) as scorer:
        items = [(problem, Response(f" {problem.answer}\n", "stop", 3)) for problem in built.test[:2]]
        assert {item[0].extra["task"]: score.total for item, score in zip(items, scorer.score(items), strict=True)} == {
            "sum": 1.5,
            "product": 0.5,
        }
        stranger = Problem("x", "q", "a", {"task": "other"})
        assert "no rewards for problems of 'other', only for sum, product" in str(
            scorer.score([(stranger, items[0][1])])[0].error
        )


def test_the_stream_draws_tasks_by_weight_and_repeats_for_a_seed() -> None:
    built = tasks.build("mixture", part=[{**SUM, "weight": 3.0}, PRODUCT])
    tokenizer = lambda text, add_special_tokens: {"input_ids": list(text.encode())}  # noqa: ARG005, E731
    first, again, other = (PromptStream(built, tokenizer, seed) for seed in (0, 0, 1))
    taken = [prompt.problem for prompt in first.at(0, len(built.train))]
    assert labels(taken)["sum"] / len(taken) == pytest.approx(0.75, abs=0.01)
    assert [problem.id for problem in taken[50:60]] == [prompt.problem.id for prompt in again.at(50, 10)]
    assert [problem.id for problem in taken[:10]] != [prompt.problem.id for prompt in other.at(0, 10)]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ([SUM, {**PRODUCT, "label": "sum"}], "labels sum, sum are not all different"),
        ([SUM, {"name": "sort"}], r"end responses in different ways \(\('\\n',\), \('\.',\)\)"),
        ([SUM, {"name": "sorted"}], r"unknown task 'sorted' \(did you mean 'sort'"),
        ([SUM, {**PRODUCT, "digit": 1}], r"unknown option 'digit' \(did you mean 'digits'"),
        ([{**SUM, "weight": 0.0}], r"part\.0\.weight: Input should be greater than 0"),
        ([], "part: List should have at least 1 item"),
    ],
)
def test_mistakes_are_one_line(part: list[dict[str, object]], message: str) -> None:
    with pytest.raises(TrimtabError, match=message) as raised:
        tasks.build("mixture", part=part)
    assert "\n" not in str(raised.value)
