"""Tasks with generated problems: `arithmetic`, `sort`, `swap-sort`, and the data sets of `reasoning-gym`.

`sort` and `swap-sort` are for the models of the laboratory. Prompts are "QUESTION=" and responses "ANSWER.", in digits.
`Problem.answer` is the whole response with the final stop ".", which is the target of a warm start.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.trainer.tasks.task import (
    BuiltTask,
    Chat,
    FewShot,
    Plain,
    Procedural,
    StyleOptions,
    TaskOptions,
    build_template,
    limits,
)
from trimtab.types import Problem, RewardSpec

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
POOL = 16_384  # largest number of problems that are drawn; there are 8100 problems of two digits
SHOT_POOL = 16  # problems reserved as worked examples: they are in neither split


class Arithmetic(TaskOptions):
    """Few-shot arithmetic on two numbers. The wording determines a small model's initial accuracy (docs/tasks.md)."""

    digits: int = Field(2, ge=1, le=9, description="digits of both numbers; no leading zero")
    operation: Literal["+", "-", "*"] = Field("+", description="operation on the two numbers")
    examples: int = Field(2, ge=0, le=SHOT_POOL, description="worked examples before the question")
    holdout: int = Field(256, ge=1, description="test problems")
    seed: int = Field(0, description="draws the problems and the worked examples")

    def build(self) -> BuiltTask:
        pairs = self._draw_pairs()
        # Both orders of a sum or product belong to the same split: a model that learned one knows the other.
        key = (lambda pair: tuple(sorted(pair))) if self.operation in "+*" else (lambda pair: pair)
        shots = pairs[:SHOT_POOL]
        used = {key(pair) for pair in shots}
        test = [pair for pair in pairs[SHOT_POOL:] if key(pair) not in used][: self.holdout]
        used.update(map(key, test))
        train = [pair for pair in pairs if key(pair) not in used]
        if len(test) < self.holdout or not train:
            raise TrimtabError(
                f"holdout = {self.holdout} leaves no training problem among the {len(pairs)} of digits = "
                f"{self.digits}; lower holdout"
            )
        template = FewShot([self._problem(pair) for pair in shots[: self.examples]])
        widest = max(len(self._problem((a, b)).answer) for a in self._bounds for b in self._bounds)
        return BuiltTask(
            name="arithmetic",
            train=[self._problem(pair) for pair in train],
            test=[self._problem(pair) for pair in test],
            template=template,
            rewards=(RewardSpec("exact"),),
            stop=(template.ending,),
            max_tokens=widest + 5,
        )

    @property
    def _bounds(self) -> tuple[int, int]:
        """The smallest and the largest operand."""
        return (0 if self.digits == 1 else 10 ** (self.digits - 1)), 10**self.digits - 1

    def _draw_pairs(self) -> list[tuple[int, int]]:
        """Returns ordered pairs of operands in a random order that depends on the seed alone."""
        low, high = self._bounds
        span = high - low + 1
        codes = random.Random(f"arithmetic/{self.seed}").sample(range(span * span), min(span * span, POOL))
        return [(low + code // span, low + code % span) for code in codes]

    def _problem(self, pair: tuple[int, int]) -> Problem:
        (a, b), sign = pair, self.operation
        return Problem(id=f"{a}{sign}{b}", question=f"{a} {sign} {b} =", answer=str(OPERATIONS[sign](a, b)))


TRAIN_SIZE = 1_000_000
DIGITS = "0123456789"


class Sort(TaskOptions):
    """Sorting digits: "3141592653=" -> "1123345569."; with `steps`, every step is written out (see `insertions`).

    Training problems are computed from (seed, index) on access.
    """

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
        return _build_task("sort", Procedural(TRAIN_SIZE, train), held_out, rows * (self.digits + 1))


class SwapSort(TaskOptions):
    """Sorting distinct digits over several turns, with the tool of the environment "swap", which computes the reward.

    "4213=" is solved by "13?1243=34?1234==.": each call "13?" has the positions to swap and is followed by the new row;
    the last turn is "=." instead of a call. `Problem.answer` is such a transcript with the fewest swaps.
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
        return _build_task("swap-sort", train, test, (self.digits - 1) * (self.digits + 4) + 2)


def _build_task(name: str, train: Sequence[Problem], test: Sequence[Problem], max_tokens: int) -> BuiltTask:
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

    In row k (counted from 1), the first k + 1 digits are sorted.
    """
    return "=".join("".join(sorted(text[:count])) + text[count:] for count in range(2, len(text) + 1))


def fewest_swaps(row: str) -> list[tuple[str, str]]:
    """Returns the fewest swaps that sort a row of distinct digits, from left to right, each with the row after it.

    A swap is two positions, counted from 1, as in "13": "4213" -> [("13", "1243"), ("34", "1234")].
    """
    digits = list(row)
    swaps: list[tuple[str, str]] = []
    for first, digit in enumerate(sorted(row)):
        second = digits.index(digit)
        if second != first:
            digits[first], digits[second] = digits[second], digits[first]
            swaps.append((f"{first + 1}{second + 1}", "".join(digits)))
    return swaps


def transcript(row: str) -> str:
    """Returns the text of an episode with the fewest swaps: calls, results, and the last turn "=."."""
    return "".join(f"{swap}?{result}=" for swap, result in fewest_swaps(row)) + "=."


# Entry i of a dataset is usually drawn with seed + i: with neighboring seeds, the two splits would share entries.
SEED_STRIDE = 100_000_000
STEP = 7919  # a prime: the index is advanced by it if a training question is also a test question
REDRAWS = 64
DRAWS = 4  # entries drawn per wanted test problem, to allow for repeated questions
CHAT = Chat(
    "{question}\n\nThink it through, then write the final answer between <answer> and </answer>.",
    answer="<answer>{answer}</answer>",
)


class ReasoningGym(StyleOptions):
    """Any reasoning-gym dataset, by name and config, scored by the scorer of the dataset.

    `Problem.extra` has what the scorer needs to generate the entry again: dataset, config, seed, size and index.
    """

    dataset: str = Field(description="a reasoning-gym dataset, e.g. chain_sum")
    config: dict[str, Any] = Field(default_factory=dict, description="its own options, without seed and size")
    size: int = Field(4096, ge=1, description="problems in the training split")
    holdout: int = Field(128, ge=1, description="problems in the test split")

    def build(self) -> BuiltTask:
        where = f"reasoning-gym {self.dataset!r}"
        train_seed, test_seed = 2 * SEED_STRIDE * self.seed, SEED_STRIDE * (2 * self.seed + 1)
        draws = self._problems(test_seed, DRAWS * self.holdout, "test")
        test: dict[str, Problem] = {}
        for problem in draws:
            test.setdefault(problem.question, problem)
            if len(test) == self.holdout:
                break
        else:
            raise TrimtabError(
                f"{where}: only {len(test)} different questions in {len(draws)} draws, holdout wants {self.holdout}; "
                "lower holdout or widen its config"
            )
        excluded = set(test)
        shot_count = self.examples if self.style == "few-shot" else 0
        source = self._problems(train_seed, self.size + shot_count, "train")

        def train(index: int) -> Problem:
            for attempt in range(REDRAWS):
                problem = source[(index + attempt * STEP) % len(source)]
                if problem.question not in excluded:
                    return problem
            raise TrimtabError(
                f"{where}: nearly every question is in the test split; lower holdout or widen its config"
            )

        shots = [train(self.size + offset) for offset in range(shot_count)]
        if any(not problem.answer for problem in shots):
            raise TrimtabError(f"{where}: it has no written answers to show; use style = 'chat', or examples = 0")
        excluded.update(problem.question for problem in shots)
        template = build_template(self, shots, CHAT)
        stop, max_tokens = limits(self, template, shots, [problem.answer for problem in test.values()], where)
        tag = {"tag": "answer"} if isinstance(template, Chat) and template.answer == CHAT.answer else {}
        return BuiltTask(
            name=f"reasoning-gym/{self.dataset}",
            train=Procedural(self.size, train),
            test=list(test.values()),
            template=template,
            rewards=(RewardSpec("reasoning-gym", options=tag),),
            stop=stop,
            max_tokens=max_tokens,
        )

    def _problems(self, seed: int, size: int, split: str) -> Procedural:
        """Returns the problems of one reasoning-gym dataset, generated on access."""
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        name, where = self.dataset, f"reasoning-gym {self.dataset!r}"
        if name not in DATASETS:
            raise TrimtabError(f"reasoning-gym has no dataset {name!r}{did_you_mean(name, DATASETS)}")
        try:
            entries = reasoning_gym.create_dataset(name, seed=seed, size=size, **self.config)
        except Exception as error:  # each dataset checks its config in its own way, mostly with assertions
            raise TrimtabError(f"{where}: config refused: {error or type(error).__name__}") from None

        def make(index: int) -> Problem:
            try:
                entry = entries[index]
            except Exception as error:
                raise TrimtabError(f"{where}: cannot make problem {index}: {type(error).__name__}: {error}") from None
            return Problem(
                id=f"{name}-{split}-{index}",
                question=entry["question"],
                answer="" if entry["answer"] is None else str(entry["answer"]),
                extra={"dataset": name, "config": self.config, "seed": seed, "size": size, "index": index},
            )

        return Procedural(size, make)
