"""pass@k against enumeration, results of one model on one task, and tables of several, by hand."""

import json
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.support.eval_results import result

from trimtab.cli.evaluate import rich_table
from trimtab.errors import TrimtabError
from trimtab.intervals import wilson
from trimtab.trainer.environments.episode import EpisodeCounts
from trimtab.trainer.evaluation import Results, Settings, pass_at_k

SETTINGS = {"samples": 4, "seed": 0}
FOUND = {
    ("a", "easy", "greedy"): result([(1, 1), (1, 1)]),
    ("a", "easy", "sampled"): result([(4, 4), (2, 4)]),
    ("a", "hard", "greedy"): result([(0, 1), (0, 1), (1, 1), (0, 1)]),
    ("a", "hard", "sampled"): result([(0, 4), (0, 4), (1, 4), (0, 4)]),
    ("b", "easy", "greedy"): result([(1, 1), (0, 1)]),
    ("b", "easy", "sampled"): result([(3, 4), (1, 4)]),
    ("b", "hard", "greedy"): result([(0, 1)] * 4),
    ("b", "hard", "sampled"): result([(2, 4)] * 4),
}


@pytest.fixture
def results():
    return Results(("a", "b"), ("easy", "hard"), SETTINGS, FOUND)


def lines(table):
    """Header and rows of a table as lists of cells, without intervals."""
    return [[cell.partition(" [")[0] for cell in row] for row in (table.columns, *table.rows)]


def test_one_row_a_model_and_the_average_of_tasks(results):
    header, first, second = lines(results.tables()[0])
    assert header == [
        "model", "easy avg@4", "easy greedy", "hard avg@4", "hard greedy", "average avg@4", "average greedy"
    ]  # fmt: skip
    # (.75 + .0625) / 2 and (1 + .25) / 2; pooled over the six problems the average would be .292 and .5.
    assert first == ["a", "75.0", "100.0", "6.2", "25.0", "40.6", "62.5"]
    assert second == ["b", "50.0", "50.0", "50.0", "0.0", "50.0", "25.0"]


def test_pass_at_k_by_hand(results):
    header, *rows = lines(results.tables()[1])
    assert header == ["model", "k", "easy", "hard", "average"]
    # easy: 1 and 1 - C(2,2)/C(4,2) = 5/6; hard: 1/4 of 1 - C(3,2)/C(4,2) = 1/2.
    assert rows[:3] == [
        ["a", "1", "75.0", "6.2", "40.6"],
        ["a", "2", "91.7", "12.5", "52.1"],
        ["a", "4", "100.0", "25.0", "62.5"],
    ]
    assert [row[0] for row in rows] == ["a"] * 3 + ["b"] * 3


def test_a_single_task_has_no_average_and_one_sample_no_pass_at_k():
    alone = Results(
        ("a",), ("easy",), SETTINGS | {"samples": 1}, {("a", "easy", "greedy"): FOUND["a", "easy", "greedy"]}
    )
    accuracy, details = alone.tables()
    assert lines(accuracy) == [["model", "easy greedy"], ["a", "100.0"]]
    assert lines(details)[1][:7] == ["a", "easy", "greedy", "plain", "2", "1", "1"]
    assert alone.as_dict()["average"][0]["pass"] == {}


def test_a_failed_sample_limits_k_for_every_cell():
    actual = Results(
        ("a", "b"), ("t",), SETTINGS,
        {("a", "t", "sampled"): result([(1, 4), (1, 4)]), ("b", "t", "sampled"): result([(1, 3), (1, 4)])},
    )  # fmt: skip
    assert actual.ks == (1, 2)


def test_notes_below_the_tables_are_printed_once():
    long = replace(FOUND["a", "easy", "sampled"], too_long=1)
    failed = replace(long, errors=("reward 'x' raised",))
    actual = Results(
        ("a",), ("easy",), SETTINGS, {("a", "easy", "greedy"): long, ("a", "easy", "sampled"): failed},
        notes=("easy: asked in a chat",),
    )  # fmt: skip
    first, second, third = actual.remarks()
    assert (first, third) == ("easy: asked in a chat", "first failed reward: reward 'x' raised")
    assert second.startswith("a, easy: 1 of 2 prompts do not fit the context")
    assert actual.as_dict()["notes"] == actual.remarks()


def test_json_and_terminal_show_the_same_numbers(results):
    data = json.loads(json.dumps(results.as_dict()))
    assert [(item["model"], item["task"], item["mode"]) for item in data["results"]][:2] == [
        ("a", "t", "greedy"), ("a", "t", "sampled")
    ]  # fmt: skip
    average = next(item for item in data["average"] if (item["model"], item["mode"]) == ("a", "sampled"))
    assert average["accuracy"] == pytest.approx((0.75 + 0.0625) / 2)
    assert average["accuracy_low"] <= average["accuracy"] <= average["accuracy_high"]
    assert average["pass"]["4"]["value"] == pytest.approx(0.625)
    console = Console(width=400, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in results.tables():
        console.print(rich_table(table))
    text = console.export_text()
    assert all(cell in text for table in results.tables() for row in table.rows for cell in row)


def test_what_is_measured():
    assert Settings().modes() == ("greedy",)
    assert Settings(samples=1, temperature=1.0).modes() == ("sampled",)
    assert Settings(samples=1, greedy=True).modes() == ("greedy",)
    assert Settings(samples=8).modes() == ("sampled",)
    assert Settings(samples=8, greedy=True).modes() == ("greedy", "sampled")
    with pytest.raises(TrimtabError, match="samples = 4 at temperature 0 are all the same"):
        Settings(samples=4, temperature=0.0).modes()
    with pytest.raises(TrimtabError, match="'float16'"):
        Settings(dtype="float16")


def test_details_of_a_task_with_an_environment_show_its_episodes():
    broken = EpisodeCounts(episodes=8, calls=10, tool_errors=10, first_errors=("AttributeError: no y", "other"))
    results = {("a", "tools", "sampled"): replace(result([(4, 4)]), episodes=broken)}
    assert Results(("a",), ("tools",), SETTINGS, results).remarks() == [
        "all 10 calls of tools failed, the first: AttributeError: no y"
    ]
    counts = EpisodeCounts(episodes=8, calls=10, tool_errors=4, void=2, failed=1)
    measured = {
        ("a", "tools", "sampled"): replace(result([(4, 4)]), episodes=counts),
        ("a", "easy", "sampled"): result([(4, 4)]),
    }
    header, tools, plain = lines(Results(("a",), ("tools", "easy"), SETTINGS, measured).tables()[-1])
    first = header.index("calls an episode")
    assert header[first : first + 4] == ["calls an episode", "tool errors", "void", "failed episodes"]
    assert tools[first : first + 4] == ["1.25", "40.0%", "25.0%", "1"]
    assert plain[first : first + 4] == ["-"] * 4


def brute(n, c, k):
    """The share of k-subsets of n samples, c of them right, that hold a right one."""
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    return sum(map(any, subsets)) / len(subsets)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(case):
    n, c, k = case
    assert pass_at_k(n, c, k) == pytest.approx(brute(n, c, k), abs=1e-12)


@given(st.integers(2, 8).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n), min_size=1, max_size=6))))
def test_a_result_averages_enumerated_subsets_over_problems(case):
    n, correct = case
    actual = result([(c, n) for c in correct])
    passes = {k: estimate.value for k, estimate in actual.pass_estimates.items()}
    assert passes == pytest.approx({k: sum(brute(n, c, k) for c in correct) / len(correct) for k in actual.pass_ks})
    assert passes[1] == pytest.approx(actual.accuracy)


def test_hand_numbers_and_large_counts():
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert pass_at_k(5, 4, 2) == 1.0
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5)
    assert pass_at_k(100_000, 1, 1) == pytest.approx(1e-5)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 2), (4, -1, 2), (4, 1, 0)])
def test_undefined_cases_are_errors(n, c, k):
    with pytest.raises(TrimtabError, match="pass@"):
        pass_at_k(n, c, k)


def test_pass_at_k_has_an_interval_for_every_k():
    """Eight samples: pass@8 is yes or no, one observation a problem; pass@1 is the accuracy."""
    actual = result([(0, 8), (1, 8), (2, 8), (8, 8)])
    assert tuple(actual.pass_estimates) == (1, 2, 4, 8)
    assert actual.pass_estimates[1] == actual.accuracy_estimate
    assert actual.pass_estimates[8] == pytest.approx((0.75, *wilson(0.75, 4)))
    assert result([(8, 8)] * 5).pass_estimates[2] == pytest.approx((1.0, *wilson(1.0, 5)))
