"""The tasks of the laboratory's models, "QUESTION=" -> "ANSWER." in digits: `sort` and `swap-sort`.

`Problem.answer` is the whole response with its final stop ".", as a warm start teaches it. The training split of
`sort` is computed from (seed, index); nothing is stored.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from pydantic import Field

from trimtab.errors import TrimtabError
from trimtab.trainer.tasks.task import BuiltTask, Procedural, TaskOptions
from trimtab.trainer.tasks.templates import Plain
from trimtab.types import Problem, RewardSpec

TRAIN_SIZE = 1_000_000
DIGITS = "0123456789"


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

        test: dict[str, None] = {}
        for index in itertools.count():
            test[draw("test", index)] = None
            if len(test) == self.holdout:
                break

        def train(index: int) -> Problem:
            text, redraw = draw("train", index), 0
            while text in test:
                redraw += 1
                text = draw(f"train-again-{redraw}", index)
            return make(text, f"train-{index}")

        held_out = [make(text, f"test-{index}") for index, text in enumerate(test)]
        rows = self.digits - 1 if self.steps else 1
        return _task("sort", Procedural(TRAIN_SIZE, train), held_out, rows * (self.digits + 1))


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


def _task(name: str, train: Sequence[Problem], test: Sequence[Problem], max_tokens: int) -> BuiltTask:
    return BuiltTask(
        name=name,
        train=train,
        test=test,
        template=Plain("{question}="),
        rewards=(RewardSpec("exact"),),
        stop=(".",),
        max_tokens=max_tokens,
    )


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
