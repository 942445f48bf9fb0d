"""The environment `swap` and its task: episodes by hand, and transcripts that solve every row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.trainer import tasks
from trimtab.trainer.config import EnvironmentConfig
from trimtab.trainer.environments import build
from trimtab.trainer.environments.formats import Call
from trimtab.trainer.environments.swap_environment import SwapEnvironment, SwapFormat
from trimtab.trainer.tasks.generated import fewest_swaps, transcript

ROWS = st.integers(3, 6).flatmap(lambda n: st.permutations("0123456789").map(lambda row: "".join(row[:n])))


def started(row: str) -> SwapEnvironment:
    environment = SwapEnvironment()
    environment.reset(id="x", question=row, answer="")
    return environment


def test_an_episode_by_hand() -> None:
    environment = started("4213")
    assert environment.get_reward() == 0
    assert environment.swap("13") == "1243"
    assert environment.get_reward() == 0
    assert environment.swap("43") == "1234"
    assert environment.get_reward() == 1
    assert environment.swap("12") == "2134"
    assert environment.get_reward() == 0


@pytest.mark.parametrize("positions", ["", "1", "123", "05", "15", "1x", "²1"])
def test_what_is_not_two_positions_leaves_the_row(positions: str) -> None:
    assert started("4213").swap(positions) == "4213"


@given(ROWS, st.lists(st.text("0123456", max_size=3), max_size=6))
def test_calls_only_permute_and_every_swap_undoes_itself(row: str, calls: list[str]) -> None:
    environment = started(row)
    for call in calls:
        before = environment.swap("")
        assert sorted(environment.swap(call)) == sorted(row)
        assert environment.swap(call) == before
        environment.swap(call)
    assert environment.get_reward() == float(environment.swap("") == "".join(sorted(row)))


@pytest.mark.parametrize(
    ("text", "call"),
    [("14?", Call("swap", {"positions": "14"})), ("?", Call("swap", {"positions": ""})), ("=", None), ("14", None)],
)
def test_calls_are_read(text: str, call: Call | None) -> None:
    assert SwapFormat().parse(text) == call


def test_transcripts_by_hand() -> None:
    assert transcript("4213") == "13?1243=34?1234==."
    assert transcript("2143") == "12?1243=34?1234==."
    assert transcript("4312") == "13?1342=24?1243=34?1234==."
    assert transcript("1234") == "=."


@given(ROWS)
def test_a_transcript_is_what_environment_and_format_do_with_its_calls(row: str) -> None:
    environment, form, text = started(row), SwapFormat(), transcript(row)
    assert text.endswith("==." if fewest_swaps(row) else "=.")
    assert text.count("?") == len(fewest_swaps(row)) == len(row) - cycles(row)
    replayed = ""
    for swap, _ in fewest_swaps(row):
        parsed = form.parse(f"{swap}?")
        replayed += f"{swap}?" + form.render(environment.swap(**parsed.arguments))  # pyright: ignore[reportCallIssue]
    assert replayed + "=." == text
    assert environment.get_reward() == 1


def cycles(row: str) -> int:
    """Counts the cycles of the permutation that sorts a row: sorting needs one swap less for each."""
    order, seen, count = [sorted(row).index(digit) for digit in row], set[int](), 0
    for place in range(len(row)):
        count += place not in seen
        while place not in seen:
            seen.add(place)
            place = order[place]  # noqa: PLW2901
    return count


def test_splits_share_no_row_and_hold_every_row_that_needs_enough_swaps() -> None:
    task = tasks.build("swap-sort", digits=3, min_swaps=2, holdout=40)
    train, test = ({problem.question for problem in split} for split in (task.train, task.test))
    assert not train & test
    # Of the 6 orders of three digits, the 2 cycles need two swaps: 120 sets of digits, 240 rows.
    assert (len(train), len(test)) == (200, 40)
    assert all(len(fewest_swaps(row)) == 2 for row in train | test)
    assert task.prompt_text(task.test[0], None) == f"{task.test[0].question}="
    assert max(len(task.gold(problem)) for problem in (*task.train, *task.test)) == task.max_tokens


def test_what_cannot_be_built_is_one_line() -> None:
    with pytest.raises(TrimtabError, match="leaves too few of the 240 rows of 3 digits that need 2 swaps"):
        tasks.build("swap-sort", digits=3, holdout=121)
    with pytest.raises(TrimtabError, match="environment 'swap': got an unexpected keyword argument 'max_turn'"):
        build(EnvironmentConfig(name="swap", max_turn=3))
