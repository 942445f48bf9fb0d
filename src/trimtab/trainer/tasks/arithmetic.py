"""The `arithmetic` task of the quickstart: few-shot sums of two whole numbers.

The wording decides where a small model starts: docs/tasks.md says how far.
"""

from __future__ import annotations

import operator
import random
from typing import Literal

from pydantic import Field

from trimtab.errors import TrimtabError
from trimtab.trainer.tasks.task import BuiltTask, Procedural, TaskOptions
from trimtab.trainer.tasks.templates import FewShot
from trimtab.types import Problem, RewardSpec

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
POOL = 16_384  # largest number of problems that are drawn; two digits have 8100 in all
SHOT_POOL = 16  # problems set aside as worked examples, in neither split


class Arithmetic(TaskOptions):
    digits: int = Field(2, ge=1, le=9, description="digits of both numbers; no leading zero")
    operation: Literal["+", "-", "*"] = Field("+", description="operation on the two numbers")
    examples: int = Field(2, ge=0, le=SHOT_POOL, description="worked examples before the question")
    holdout: int = Field(256, ge=1, description="test problems")
    seed: int = Field(0, description="draws the problems and the worked examples")

    def build(self) -> BuiltTask:
        pairs = self._pairs()
        # Both orders of a sum or product belong to the same split: who learned one knows the other.
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
            train=Procedural(len(train), lambda index: self._problem(train[index])),
            test=[self._problem(pair) for pair in test],
            template=template,
            rewards=(RewardSpec("exact"),),
            stop=(template.ending,),
            max_tokens=widest + 5,
        )

    @property
    def _bounds(self) -> tuple[int, int]:
        """The smallest and the largest number."""
        return (0 if self.digits == 1 else 10 ** (self.digits - 1)), 10**self.digits - 1

    def _pairs(self) -> list[tuple[int, int]]:
        """Returns ordered pairs of numbers in a random order that depends on the seed alone."""
        low, high = self._bounds
        span = high - low + 1
        codes = random.Random(f"arithmetic/{self.seed}").sample(range(span * span), min(span * span, POOL))
        return [(low + code // span, low + code % span) for code in codes]

    def _problem(self, pair: tuple[int, int]) -> Problem:
        (a, b), sign = pair, self.operation
        return Problem(id=f"{a}{sign}{b}", question=f"{a} {sign} {b} =", answer=str(OPERATIONS[sign](a, b)))
