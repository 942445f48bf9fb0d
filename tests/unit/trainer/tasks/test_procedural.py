"""Tasks that are made: arithmetic, sorting and reasoning-gym have right answers and splits that share nothing."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.trainer import rewards, tasks
from trimtab.trainer.rewards import Response
from trimtab.trainer.tasks.generated import insertions
from trimtab.types import Problem


def test_arithmetic_prompt_is_the_few_shot_format():
    task = tasks.build("arithmetic", examples=2)
    problem = task.train[0]
    first, second, last = task.prompt_text(problem, None).split("\n\n")
    for block in (first, second):
        question, answer = block.removeprefix("Question: ").split("\nAnswer: ")
        a, b = map(int, numbers_of(question))
        assert a + b == int(answer)
    assert last == f"Question: {problem.question}\nAnswer:"
    assert task.gold(problem) == f" {problem.answer}\n"
    assert task.stop == ("\n",)
    assert [spec.name for spec in task.rewards] == ["exact"]


def numbers_of(question):
    return [word for word in question.replace("?", "").split() if word.isdigit()]


@pytest.mark.parametrize(
    ("operation", "result"), [("+", lambda a, b: a + b), ("-", lambda a, b: a - b), ("*", lambda a, b: a * b)]
)
def test_arithmetic_answers_are_right_and_fit(operation, result):
    task = tasks.build("arithmetic", operation=operation, seed=3)
    for problem in [*task.test, *task.train[:500]]:
        a, b = map(int, problem.id.replace(operation, " ").split())
        assert all(10 <= number <= 99 for number in (a, b))
        assert problem.answer == str(result(a, b))
        assert len(task.gold(problem)) <= task.max_tokens


@pytest.mark.parametrize("options", [{}, {"seed": 5}, {"digits": 1, "holdout": 20}, {"digits": 3}, {"digits": 9}])
def test_arithmetic_splits_share_no_problem_not_even_mirrored(options):
    task = tasks.build("arithmetic", **options)
    assert len(task.test) == options.get("holdout", 256)
    sides = [{frozenset(p.id.split("+")) for p in split} for split in (task.train, task.test)]
    assert not sides[0] & sides[1]
    worked = {
        tuple(numbers_of(line)) for line in task.prompt_text(task.test[0], None).split("\n") if "Question" in line
    }
    worked.remove(tuple(numbers_of(task.test[0].question)))
    assert len(worked) == 2
    assert not {frozenset(pair) for pair in worked} & (sides[0] | sides[1])


@pytest.mark.parametrize("name", ["arithmetic", "sort", "swap-sort"])
def test_same_seed_same_problems(name):
    one, two, other = (tasks.build(name, seed=seed) for seed in (1, 1, 2))
    assert one.train[:50] == two.train[:50]
    assert one.test == two.test
    assert one.train[:50] != other.train[:50]
    assert one.test != other.test


def test_frozen_first_problems():
    """Runs are compared across releases: these may only change with a CHANGELOG entry."""
    sort = tasks.build("sort")
    assert (sort.train[0].question, sort.test[0].question) == ("8691521722", "9570562015")
    swaps = tasks.build("swap-sort")
    assert (len(swaps.train), len(swaps.test)) == (3058, 512)
    assert (swaps.train[0].question, swaps.test[0].question) == ("9167", "8194")


def test_every_step_of_a_sort_is_written_out():
    assert insertions("3142") == "1342=1342=1234"
    task = tasks.build("sort", digits=11, steps=True)
    problem = task.test[0]
    rows = problem.answer.removesuffix(".").split("=")
    assert len(problem.answer) == task.max_tokens == 120
    assert rows[-1] == "".join(sorted(problem.question))
    for count, (before, after) in enumerate(itertools.pairwise([problem.question, *rows]), start=2):
        assert after == "".join(sorted(before[:count])) + before[count:]
    plain = tasks.build("sort", digits=11)
    assert [item.question for item in task.test] == [item.question for item in plain.test]


@given(st.integers(0, 999_999), st.integers(0, 5))
def test_sort_targets(index, seed):
    task = SORTS[seed]
    problem = task.train[index]
    assert problem == task.train[index - len(task.train)]
    assert len(problem.question) == 10
    assert problem.answer == "".join(sorted(problem.question)) + "."
    assert task.prompt_text(problem, None) == problem.question + "="
    assert task.gold(problem) == problem.answer
    assert len(problem.answer) == task.max_tokens == 11


SORTS = [tasks.build("sort", seed=seed) for seed in range(6)]


def test_sort_splits_are_disjoint_where_collisions_are_certain():
    task = tasks.build("sort", digits=2, holdout=50)
    tested = {problem.question for problem in task.test}
    assert len(tested) == 50
    trained = {problem.question for problem in task.train[:5000]}
    assert len(trained) == 50
    assert not tested & trained


def test_sequences_behave_like_sequences():
    train = tasks.build("sort").train
    assert len(train) == 1_000_000
    assert train[3:6] == [train[3], train[4], train[5]]
    with pytest.raises(IndexError):
        train[len(train)]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("arithmatic", {}, "unknown task 'arithmatic' (did you mean 'arithmetic'?)"),
        ("zzz", {}, "unknown task 'zzz' (known: arithmetic, file, hf, mixture, reasoning-gym, sort, swap-sort)"),
        ("sort", {"digit": 4}, "unknown option 'digit' (did you mean 'digits'?)"),
        ("sort", {"digits": "many"}, "digits: Input should be a valid integer"),
        ("sort", {"digits": 2, "holdout": 51}, "holdout = 51 leaves too few of the 100 problems"),
        ("arithmetic", {"operation": "/"}, "operation: Input should be '+', '-' or '*', got '/'"),
        ("arithmetic", {"digits": 1}, "holdout = 256 leaves no training problem among the 100"),
        ("file", {}, "option 'path' is missing"),
        ("file", {"path": "x.jsonl", "fromat": "gsm8k"}, "unknown option 'fromat' (did you mean 'format'"),
    ],
)
def test_mistakes_are_named(name, options, words):
    with pytest.raises(TrimtabError) as error:
        tasks.build(name, **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_every_task_lists_its_options():
    for name in tasks.KINDS.names():
        described = tasks.KINDS.options(name)
        assert ("seed" in described) == (name != "mixture")  # its tasks have seeds of their own
    assert "format" in tasks.KINDS.options("file")


def test_chain_sum_few_shot_is_scored_by_its_own_scorer():
    options = {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 2}, "examples": 2}
    task, again = (tasks.build("reasoning-gym", **options) for _ in range(2))
    problem = task.train[17]
    assert problem == again.train[17]
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
        ({"dataset": "chain_sum", "config": {"terms": 2}}, "config refused: ChainSumConfig.__init__() got an unexp"),
        ({"dataset": "chain_sum", "config": {"seed": 2}}, "multiple values for keyword argument 'seed'"),
        ({"dataset": "chain_sum", "config": {"min_terms": 0}}, "config refused: min_terms must be positive"),
        ({"dataset": "gcd", "config": {"min_value": 1, "max_value": 2}}, "different questions in 512 draws"),
        ({"dataset": "rotate_matrix"}, "contains the stop string"),
        ({"dataset": "boxnet"}, "no written answers to show; use style = 'chat'"),
    ],
)
def test_mistakes_in_a_dataset_are_named(options, words):
    with pytest.raises(TrimtabError) as error:
        tasks.build("reasoning-gym", **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
