"""reasoning-gym datasets as tasks."""

import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer import rewards, tasks
from trimtab.trainer.rewards import Response
from trimtab.types import Problem


def test_chain_sum_few_shot_is_scored_by_its_own_scorer():
    task = tasks.build("reasoning-gym", dataset="chain_sum", config={"min_terms": 2, "max_terms": 2}, examples=2)
    problem = task.train[17]
    assert (
        problem
        == tasks.build("reasoning-gym", dataset="chain_sum", config={"min_terms": 2, "max_terms": 2}, examples=2).train[
            17
        ]
    )
    expression = problem.question.partition(":")[2].strip(" =")
    left, sign, right = expression.split()
    assert int(problem.answer) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
    assert task.prompt_text(problem, None).count("Answer:") == 3
    with rewards.build([], task) as scorer:
        right, wrong, partial = scorer.score(
            [(problem, Response(text, "stop", 3)) for text in (task.gold(problem), " no\n", f" {problem.answer}!\n")]
        )
    assert (right.total, wrong.total) == (1.0, 0.0)
    size = len(problem.answer)
    assert partial.total == pytest.approx(size / (size + 1))  # the library's own partial credit, kept as it is


def test_chat_answers_are_taken_from_their_tag():
    task = tasks.build("reasoning-gym", dataset="gcd", style="chat", holdout=4, size=8)
    problem = task.test[0]
    texts = [f"well <answer>0</answer> no, <answer> {problem.answer} </answer>", problem.answer, "<answer>0"]
    with rewards.build([], task) as scorer:
        assert [s.total for s in scorer.score([(problem, Response(t, "stop", 9)) for t in texts])] == [1.0, 0.0, 0.0]
    assert task.gold(problem) == f"<answer>{problem.answer}</answer>"


def test_splits_share_no_question_where_questions_are_few():
    task = tasks.build(
        "reasoning-gym", dataset="count_bits", config={"min_n": 1, "max_n": 60}, holdout=20, size=300, examples=2
    )
    tested = {p.question for p in task.test}
    assert len(tested) == 20
    trained = [p.question for p in task.train]
    assert len(trained) == 300
    assert not tested & set(trained)
    shots = task.prompt_text(task.test[0], None).split("\n\n")[:2]
    assert not any(question in shot for shot in shots for question in {*trained, *tested})


def test_problems_of_another_origin_fail_visibly():
    task = tasks.build("reasoning-gym", dataset="gcd", style="chat", holdout=2, size=2)
    foreign = Problem("x", "?", "1")
    changed = Problem("y", "another question", "1", task.test[0].extra)
    with rewards.build([], task) as scorer:
        one, two = scorer.score([(foreign, Response("1", "stop", 1)), (changed, Response("1", "stop", 1))])
    assert one.total is two.total is None
    assert "does not come from a reasoning-gym task" in (one.error or "")
    assert "no longer makes the same problem" in (two.error or "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset": "chain_sums"}, "no dataset 'chain_sums' (did you mean 'chain_sum'"),
        (
            {"dataset": "chain_sum", "config": {"terms": 2}},
            "config refused: ChainSumConfig.__init__() got an unexpected keyword",
        ),
        ({"dataset": "chain_sum", "config": {"seed": 2}}, "multiple values for keyword argument 'seed'"),
        ({"dataset": "chain_sum", "config": {"min_terms": 0}}, "config refused: min_terms must be positive"),
        ({"dataset": "gcd", "config": {"min_value": 1, "max_value": 2}}, "different questions in 512 draws"),
        ({"dataset": "rotate_matrix"}, "contains the stop string"),
        ({"dataset": "boxnet"}, "no written answers to show; use style = 'chat'"),
    ],
)
def test_mistakes_are_named(options, words):
    with pytest.raises(TrimtabError) as error:
        tasks.build("reasoning-gym", **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
