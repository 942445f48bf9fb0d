"""The `arithmetic` task of the quickstart: few-shot sums of two whole numbers.

The wording decides where a small model starts; the measured table is in docs/tasks.md.
"""

from __future__ import annotations

import operator
import random
from typing import Literal

from pydantic import Field

from trimtab.errors import TrimtabError
from trimtab.tasks.task import BuiltTask, Procedural, TaskOptions
from trimtab.tasks.templates import FewShot
from trimtab.types import Problem, RewardSpec

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
POOL = 16_384  # largest number of problems that are drawn; two digits have 8100 in all
SHOT_POOL = 16  # problems set aside as worked examples, in neither split


class Options(TaskOptions):
    digits: int = Field(2, ge=1, le=9, description="digits of both numbers; no leading zero")
    operation: Literal["+", "-", "*"] = Field("+", description="operation on the two numbers")
    examples: int = Field(2, ge=0, le=SHOT_POOL, description="worked examples before the question")
    holdout: int = Field(256, ge=1, description="test problems")
    seed: int = Field(0, description="draws the problems and the worked examples")


def build(options: Options) -> BuiltTask:
    pairs = _pairs(options)
    # Both orders of a sum or product belong to the same split: who learned one knows the other.
    key = (lambda pair: tuple(sorted(pair))) if options.operation in "+*" else (lambda pair: pair)
    shots = pairs[:SHOT_POOL]
    used = {key(pair) for pair in shots}
    test = [pair for pair in pairs[SHOT_POOL:] if key(pair) not in used][: options.holdout]
    used.update(map(key, test))
    train = [pair for pair in pairs if key(pair) not in used]
    if len(test) < options.holdout or not train:
        raise TrimtabError(
            f"holdout = {options.holdout} leaves no training problem among the {len(pairs)} of digits = "
            f"{options.digits}; lower holdout"
        )
    examples = [_problem(pair, options) for pair in shots[: options.examples]]
    template = FewShot(examples)
    widest = max(len(str(OPERATIONS[options.operation](a, b))) for a in _bounds(options) for b in _bounds(options))
    return BuiltTask(
        name="arithmetic",
        train=Procedural(len(train), lambda index: _problem(train[index], options)),
        test=[_problem(pair, options) for pair in test],
        template=template,
        rewards=(RewardSpec("exact"),),
        stop=(template.ending,),
        max_tokens=widest + 5,
    )


def _bounds(options: Options) -> tuple[int, int]:
    return (0 if options.digits == 1 else 10 ** (options.digits - 1)), 10**options.digits - 1


def _pairs(options: Options) -> list[tuple[int, int]]:
    """Returns ordered pairs of numbers in a random order that depends on the seed alone."""
    low, high = _bounds(options)
    span = high - low + 1
    codes = random.Random(f"arithmetic/{options.seed}").sample(range(span * span), min(span * span, POOL))
    return [(low + code // span, low + code % span) for code in codes]


def _problem(pair: tuple[int, int], options: Options) -> Problem:
    a, b = pair
    return Problem(
        id=f"{a}{options.operation}{b}",
        question=f"{a} {options.operation} {b} =",
        answer=str(OPERATIONS[options.operation](a, b)),
    )
