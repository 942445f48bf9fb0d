"""What each built-in reward pays, by hand, and several weighted ones, of which one may fail and the others count."""

import json
import os
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.trajectories import multi_turn

from trimtab.errors import TrimtabError
from trimtab.trainer import rewards, tasks
from trimtab.trainer.rewards import Response
from trimtab.trainer.rewards.builtin import numbers, readable
from trimtab.types import Problem, RewardSpec

SUM = tasks.build("arithmetic")
SORT = tasks.build("sort")


def test_observations_do_not_count_in_the_length_of_a_response():
    response = Response.of(multi_turn(0, "ab...c").completion)
    assert response.tokens == 3
    with rewards.build([RewardSpec("overlong", 1.0, 20.0, {"max_tokens": 4, "cache": 4})], SUM) as scorer:
        assert scorer.score([(Problem("p", "q", "1"), response)])[0].total == -3 / 4


def pay(name, text, answer, *, task=SUM, finish="stop", tokens=5, **options):
    with rewards.build([RewardSpec(name, 1.0, 20.0, options)], task) as scorer:
        return scorer.score([(Problem("p", "q", answer), Response(text, finish, tokens))])[0]


@pytest.mark.parametrize(
    ("text", "finish", "value"),
    [
        (" 68", "stop", 1.0),
        (" 68\n\nQuestion: 1", "stop", 1.0),
        ("68", "length", 0.0),
        (" 068", "stop", 0.0),
        (" 68.", "stop", 0.0),
        ("\n68", "stop", 0.0),
        ("", "stop", 0.0),
        (" 68", "abort", 0.0),
    ],
)
def test_exact(text, finish, value):
    assert pay("exact", text, "68", finish=finish).total == value


def test_exact_compares_with_and_without_the_stop_string():
    """An engine cuts the stop string off, a data file may keep it."""
    for text in ("1122256789", "1122256789."):
        assert pay("exact", text, "1122256789.", task=SORT).total == 1.0
    assert Response("a", "stop", 1).body(("",)) == "a"
    assert pay("exact", "112225678", "1122256789.", task=SORT).total == 0.0
    assert pay("exact", " 68", "68", finish="length", require_stop=False).total == 1.0


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("The answer is 18.", [18]),
        ("$1,200.50 or -$5", [Fraction(2401, 2), -5]),
        ("1/2, 3 / 4", [Fraction(1, 2), Fraction(3, 4)]),
        ("3.5e3 and 2e-2", [3500, Fraction(1, 50)]),
        ("5 - 3 = 2; 5-3", [5, 3, 2, 5, 3]),
        ("1,2,3", [1, 2, 3]),
        ("12,34 1,2345 1,234,56", [12, 34, 1, 2345, 1, 234, 56]),
        ("v1.2 x2 a_3", []),
        ("10/0", []),
        ("(x+y) / 3; 24 apples / 3", [3, 24, 3]),
        ("−7 .5 20%", [-7, Fraction(1, 2), 20]),
        ("9" * 61, []),
    ],
)
def test_numbers_in_text(text, values):
    assert numbers(text) == values


@given(st.integers(-(10**50), 10**50))
def test_every_whole_number_is_read_with_and_without_commas(value):
    assert numbers(f"so {value} it is") == numbers(f"so {value:,} it is") == [value]


@pytest.mark.parametrize(
    ("text", "answer", "options", "value"),
    [
        (" 14 bottle caps", "14", {}, 1.0),
        (" 14.0", "14", {}, 1.0),
        (" 14.0001", "14", {}, 0.0),
        (" 109200001", "109200000", {}, 0.0),
        (" 10/3", "3.33333", {}, 1.0),
        (" 3.34", "3.33333", {}, 0.0),
        (" 3.3", "3.33333", {"tolerance": 0.05}, 1.0),
        (" 7 + 7 = 14", "14", {}, 1.0),
        (" 7 + 7 = 14", "14", {"which": "first"}, 0.0),
        (" 7 + 7 = 14", "14", {"which": "only"}, 0.0),
        (" fourteen", "14", {}, 0.0),
        (" 14\n15", "14", {}, 1.0),
    ],
)
def test_numeric(text, answer, options, value):
    assert pay("numeric", text, answer, **options).total == value


def test_numeric_refuses_a_gold_answer_that_is_no_number():
    score = pay("numeric", " 3", "three")
    assert score.total is None
    assert "'three' is not one number" in (score.error or "")


CHAT = tasks.build("reasoning-gym", dataset="gcd", style="chat", holdout=1, size=1)  # any task without stop strings


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("so \\boxed{\\frac{1}{2}}.", "0.5", 1.0),
        ("\\boxed{1,000}", "1000", 1.0),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        ("\\boxed{4.5 \\times 10^{33}}", "4.5e33", 1.0),
        ("\\boxed{4.5e32}", "4.5e33", 0.0),
        ("\\boxed{0.00001}", "1e-5", 1.0),
        ("\\boxed{-\\frac{1}{3}}", "-1./3", 1.0),
        ("\\boxed{\\arcsin(10/13)}", "np.arcsin(10/13)", 1.0),
        ("the answer is 27", "27", 0.0),
        ("\\boxed{}", "27", 0.0),
        ("First \\boxed{3}, wait, final \\boxed{4}", "4", 1.0),
        ("First \\boxed{3}, wait, final \\boxed{4}", "3", 0.0),
        ("$x = \\boxed{1}$ and $x=\\boxed{2}$", "\\{1, 2\\}", 1.0),
        ("$x = \\boxed{1}$ and $x=\\boxed{2}$", "2", 0.0),
        ("\\(\\boxed{1}\\)\\quad\\text{ or }\\(\\boxed{2}\\)", "\\{1, 2\\}", 1.0),
        ("So \\boxed{3}. So \\boxed{4}.", "4", 1.0),
        ("$\\boxed{5}$ (put in \\boxed for $7$)", "7", 0.0),
        ("\\boxed{\\frac{\\boxed{1}}{\\boxed{2}}}", "2", 0.0),
        ("\\boxed{27", "27", 0.0),
    ],
)
def test_math(math_scorer, text, answer, value):
    score = math_scorer.score([(Problem("p", "q", answer), Response(text, "stop", 9))])[0]
    assert score.error is None
    assert score.total == value


@pytest.fixture(scope="module")
def math_scorer():
    with rewards.build([RewardSpec("math", 1.0, 20.0, {})], CHAT) as scorer:
        yield scorer


@pytest.mark.e2e
def test_where_math_reads_the_answer():
    def paid(where, *pairs):
        with rewards.build([RewardSpec("math", 1.0, 20.0, {"where": where})], CHAT) as scorer:
            samples = [(Problem("p", "q", answer), Response(text, "stop", 5)) for text, answer in pairs]
            return [score.total for score in scorer.score(samples)]

    half = "\\frac{1}{2}"
    assert paid("anywhere", ("the answer is $27$", "27")) == [1.0]
    assert paid("whole", ("\\frac{2}{4}", half), ("\\boxed{\\frac{2}{4}}", half), ("", "1")) == [1.0, 1.0, 0.0]
    assert paid("boxed", ("\\frac{2}{4}", half)) == [0.0]


def test_readable_leaves_ordinary_mathematics_alone():
    for text in ("2e^{x}", "3e", "f(e1)", "1.5", "x_{1e5}y", "The value is 3. Then"):
        assert readable(text) == text or text == "x_{1e5}y"


@pytest.mark.e2e
def test_format_runs_outside_so_that_a_bad_pattern_costs_its_sample_only():
    assert pay("format", "<a>1</a>", "1", pattern="<a>.*</a>").total == 1.0
    assert pay("format", "x<a>1</a>", "1", pattern="<a>.*</a>").total == 0.0
    assert pay("format", "x<a>1</a>", "1", pattern="<a>.*</a>", whole=False).total == 1.0
    with rewards.build([RewardSpec("format", 1.0, 0.5, {"pattern": "(a+)+b"})], SUM) as scorer:
        hung, fine = scorer.score([(Problem("p", "q", "1"), Response(text, "stop", 5)) for text in ("a" * 60, "aab")])
    assert hung.total is None
    assert hung.error == "problem 'p': reward 'format' took longer than 0.5 s"
    assert fine.total == 1.0


def test_overlong_is_dapos_penalty():
    """L_max 20480, cache 4096: free up to 16384, half the penalty at 18432, all of it at 20480."""
    paid = [
        pay("overlong", "", "", tokens=n, max_tokens=20480, cache=4096, factor=2.0).total
        for n in (1, 16384, 16385, 18432, 20480)
    ]
    assert paid == pytest.approx([0.0, 0.0, -2 / 4096, -1.0, -2.0])
    assert pay("overlong", "", "", tokens=SORT.max_tokens, task=SORT, cache=5).total == -1.0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (("exct", 1.0, 5.0, {}), "unknown reward 'exct' (did you mean 'exact'?)"),
        (("exact", 1.0, 5.0, {"stop": 1}), "reward 'exact': unknown option 'stop' (did you mean 'require_stop'?)"),
        (("format", 1.0, 5.0, {}), "option 'pattern' is missing"),
        (("format", 1.0, 5.0, {"pattern": "("}), "not a regular expression"),
        (("overlong", 1.0, 5.0, {"max_tokens": 4, "cache": 5}), "cache = 5 is longer than max_tokens = 4"),
        (("overlong", 1.0, 5.0, {"cache": 10**6}), "cache = 1000000 is longer than max_tokens ="),
        (("exact", float("nan"), 5.0, {}), "weight must be a finite number"),
        (("exact", 1.0, 0.0, {}), "timeout must be a positive number of seconds"),
        (("nowhere_to_be_found:f", 1.0, 5.0, {}), "cannot import 'nowhere_to_be_found'"),
        (("json:lods", 1.0, 5.0, {}), "no 'lods' in 'json' (did you mean 'loads'"),
        (("json:loads", 1.0, 5.0, {"x": 1}), "takes no options, got 'x'"),
        ((lambda _: 0.0, 1.0, 5.0, {}), "it must take 2 arguments"),
        (("json:decoder", 1.0, 5.0, {}), "is module, not a function"),
    ],
)
def test_mistakes_are_named_before_anything_runs(spec, words):
    with pytest.raises(TrimtabError) as error:
        rewards.build([RewardSpec(*spec)], SUM)
    assert words in str(error.value)
    assert json.dumps(str(error.value)).count("\\n") == 0


ITEM = (Problem("23+45", "23 + 45 =", "68", {"bonus": 3}), Response(" 68", "stop", 4))


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
    assert [entry.name for entry in rewards.build_weighted(specs, SUM)] == ["reasoning-gym", "reasoning", "reasoning-2"]


def moody(completion, problem):  # noqa: ARG001
    if completion.strip() == "raise":
        raise RuntimeError("out of patience")
    return 0.5


def test_failures_are_per_sample_and_name_reward_and_problem():
    """What else may fail, and how each failure is called: tests/e2e/test_function_pool.py."""
    items = [(ITEM[0], Response(f" {word}", "stop", 4)) for word in ("fine", "raise", "fine")]
    with rewards.build([RewardSpec("exact", 1.0, 5.0, {}), RewardSpec(moody, 1.0, 1.0, {})], SUM) as scorer:
        scores = scorer.score(items)
        assert scorer.score([ITEM])[0].total == 1.5
    line = "problem '23+45': reward 'moody' raised RuntimeError: out of patience"
    assert [(score.total, score.error) for score in scores] == [(0.5, None), (None, line), (0.5, None)]
    assert dict(scores[1].parts) == {"exact": 0.0}


def test_a_user_function_by_name_is_found_beside_the_user(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def short(completion, problem):\n    return 1 / len(completion)\n")
    monkeypatch.chdir(tmp_path)
    with rewards.build([RewardSpec("my_rewards:short", 1.0, 5.0, {})], SUM) as scorer:
        assert scorer.score([ITEM])[0] == rewards.Score(1 / 3, {"my_rewards:short": 1 / 3}, None)


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
