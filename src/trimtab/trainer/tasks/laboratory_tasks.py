"""The tasks of the laboratory's models, "QUESTION=" -> "ANSWER." in digits: `sort`, `swap-sort` and `program`.

`Problem.answer` is the whole response with its final stop ".", as a warm start teaches it. The training splits of
`sort` and `program` are computed from (seed, index); nothing is stored.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from pydantic import Field

from trimtab.errors import TrimtabError
from trimtab.trainer.tasks.task import BuiltTask, Procedural, TaskOptions
from trimtab.trainer.tasks.templates import Plain
from trimtab.types import Problem, RewardSpec

TRAIN_SIZE = 1_000_000
DIGITS = "0123456789"
# What the symbols of `program` mean; run against the tests of a problem.
PROGRAM = """\
code, printed = '{code}', ''
for place in range(0, len(code), 2):
    printed = printed + int(code[place]) * code[place + 1]
"""
LONGEST_RUN = 4
EXACT = RewardSpec("exact")


class Sort(TaskOptions):
    """Digits, sorted: "3141592653=" -> "1123345569.", or with every step written out (`insertions`)."""

    digits: int = Field(10, ge=2, le=64, description="how many digits are sorted")
    steps: bool = Field(False, description="write the row after each of the digits - 1 insertions; all must be right")
    holdout: int = Field(512, ge=1, description="test problems")
    seed: int = Field(0, description="draws the problems")

    def build(self) -> BuiltTask:
        if self.holdout > 10**self.digits // 2:
            raise TrimtabError(
                f"holdout = {self.holdout} leaves too few of the {10**self.digits} problems to train on; lower it"
            )

        def draw(split: str, index: int) -> str:
            # A string seed is hashed with SHA-512: the same digits on every platform and in every Python process.
            return "".join(random.Random(f"sort/{self.seed}/{split}/{index}").choices(DIGITS, k=self.digits))

        def make(text: str, name: str) -> Problem:
            answer = insertions(text) if self.steps else "".join(sorted(text))
            return Problem(id=f"sort-{name}", question=text, answer=f"{answer}.")

        rows = self.digits - 1 if self.steps else 1
        return _task("sort", *_drawn_splits(draw, make, self.holdout), rows * (self.digits + 1))


class SwapSort(TaskOptions):
    """Distinct digits, sorted over several turns with the tool of the environment "swap", which computes the reward.

    "4213=" is solved by "13?1243=34?1234==.": positions to swap, the row that follows, and a last turn "=." instead of
    a call. `Problem.answer` is such a transcript with the fewest swaps.
    """

    digits: int = Field(4, ge=3, le=6, description="how many distinct digits are sorted")
    min_swaps: int = Field(2, ge=0, description="rows that need fewer swaps are left out")
    holdout: int = Field(512, ge=1, description="test problems")
    seed: int = Field(0, description="draws the split")

    def build(self) -> BuiltTask:
        rows = ["".join(digits) for digits in itertools.permutations(DIGITS, self.digits)]
        rows = [row for row in rows if len(fewest_swaps(row)) >= self.min_swaps]
        if self.holdout > len(rows) // 2:
            raise TrimtabError(
                f"holdout = {self.holdout} leaves too few of the {len(rows)} rows of {self.digits} digits that need "
                f"{self.min_swaps} swaps; lower it or min_swaps"
            )
        random.Random(f"swap-sort/{self.seed}").shuffle(rows)
        problems = [Problem(f"swap-sort-{row}", row, transcript(row)) for row in rows]
        train, test = problems[self.holdout :], problems[: self.holdout]
        return _task("swap-sort", train, test, (self.digits - 1) * (self.digits + 4) + 2)


class Program(TaskOptions):
    """A program that prints the digits: "5557700000=" -> "352750.", pairs of how often to print, and what.

    Many programs print the same, as "152527" prints 55577 too: a response is judged by running it in a sandbox.
    """

    digits: int = Field(5, ge=4, le=20, description="how many digits a program must print")
    holdout: int = Field(512, ge=1, le=1000, description="test problems")
    seed: int = Field(0, description="draws the problems")

    def build(self) -> BuiltTask:
        def draw(split: str, index: int) -> str:
            rng = random.Random(f"program/{self.seed}/{split}/{index}")
            text = ""
            while len(text) < self.digits:
                text += rng.choice(DIGITS) * rng.randint(1, LONGEST_RUN)
            return text[: self.digits]

        reward = RewardSpec("python-tests", timeout=30.0, options={"program": PROGRAM})
        splits = _drawn_splits(draw, program_problem, self.holdout)
        return _task("program", *splits, 2 * self.digits + 1, reward)


def _task(
    name: str, train: Sequence[Problem], test: Sequence[Problem], max_tokens: int, reward: RewardSpec = EXACT
) -> BuiltTask:
    return BuiltTask(
        name=name,
        train=train,
        test=test,
        template=Plain("{question}="),
        rewards=(reward,),
        stop=(".",),
        max_tokens=max_tokens,
    )


def _drawn_splits(
    draw: Callable[[str, int], str], make: Callable[[str, str], Problem], holdout: int
) -> tuple[Procedural, list[Problem]]:
    """Returns a million training problems, computed on access, and `holdout` test problems that are not among them.

    `draw(split, index)` returns a random question, and `make(question, name)` its problem.
    """
    test: dict[str, None] = {}
    for index in range(100 * holdout):
        if len(test) < holdout:
            test[draw("test", index)] = None

    def train(index: int) -> Problem:
        text, redraw = draw("train", index), 0
        while text in test:
            redraw += 1
            text = draw(f"train-again-{redraw}", index)
        return make(text, f"train-{index}")

    return Procedural(TRAIN_SIZE, train), [make(text, f"test-{index}") for index, text in enumerate(test)]


def insertions(text: str) -> str:
    """Returns the rows of an insertion sort, joined by "=": "3142" -> "1342=1342=1234".

    Row k has the first k + 1 digits sorted and the others as they were.
    """
    return "=".join("".join(sorted(text[:count])) + text[count:] for count in range(2, len(text) + 1))


def fewest_swaps(row: str) -> list[tuple[int, int]]:
    """Returns swaps that sort a row of distinct digits, as positions from 1, filling the row from the left."""
    digits: list[str] = list(row)
    swaps: list[tuple[int, int]] = []
    for first, digit in enumerate(sorted(row)):
        second = digits.index(digit)
        if second != first:
            digits[first], digits[second] = digits[second], digits[first]
            swaps.append((first + 1, second + 1))
    return swaps


def transcript(row: str) -> str:
    """Returns the text of an episode with the fewest swaps: calls, results, and the last turn "=."."""
    digits, text = list(row), ""
    for first, second in fewest_swaps(row):
        digits[first - 1], digits[second - 1] = digits[second - 1], digits[first - 1]
        text += f"{first}{second}?{''.join(digits)}="
    return text + "=."


def program_problem(text: str, name: str) -> Problem:
    """Returns the problem of printing `text`; its answer is one of the programs that do."""
    runs = [(len(list(run)), digit) for digit, run in itertools.groupby(text)]
    # Counts have one digit, so that a run of more than 9 is printed in parts.
    parts = [(min(9, count - done), digit) for count, digit in runs for done in range(0, count, 9)]
    return Problem(
        id=f"program-{name}",
        question=text,
        answer="".join(f"{count}{digit}" for count, digit in parts) + ".",
        extra={"tests": [f"assert printed == '{text}'"]},
    )
