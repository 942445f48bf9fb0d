"""The laboratory's `program` task: "5557700000=" -> "352750.", a program of a tiny language that prints the digits.

A program is pairs of digits: how often to print, and what. Many programs print the same, as "152527" prints 55577 too.
The answer of a problem is one of them, and a response is judged by running it against the problem's test in a sandbox,
where `PROGRAM` says what its symbols mean. The training split is computed from (seed, index); nothing is stored.
"""

from __future__ import annotations

import random
from itertools import groupby

from pydantic import Field

from trimtab.tasks.task import BuiltTask, TaskOptions, drawn_splits
from trimtab.tasks.templates import Plain
from trimtab.types import Problem, RewardSpec

PROGRAM = """\
code, printed = '{code}', ''
for place in range(0, len(code), 2):
    printed = printed + int(code[place]) * code[place + 1]
"""
LONGEST_RUN = 4


class Options(TaskOptions):
    digits: int = Field(5, ge=4, le=20, description="how many digits a program must print")
    holdout: int = Field(512, ge=1, le=1000, description="test problems")
    seed: int = Field(0, description="draws the problems")


def build(options: Options) -> BuiltTask:
    def draw(split: str, index: int) -> str:
        # A string seed is hashed with SHA-512: the same digits on every platform and in every Python process.
        rng = random.Random(f"program/{options.seed}/{split}/{index}")
        text = ""
        while len(text) < options.digits:
            text += rng.choice("0123456789") * rng.randint(1, LONGEST_RUN)
        return text[: options.digits]

    train, test = drawn_splits(draw, build_problem, options.holdout)
    return BuiltTask(
        name="program",
        train=train,
        test=test,
        template=Plain("{question}="),
        rewards=(RewardSpec("python-tests", timeout=30.0, options={"program": PROGRAM}),),
        stop=(".",),
        max_tokens=2 * options.digits + 1,
    )


def build_problem(text: str, name: str) -> Problem:
    runs = [(len(list(run)), digit) for digit, run in groupby(text)]
    # Counts have one digit, so that a run of more than 9 is printed in parts.
    parts = [(min(9, count - done), digit) for count, digit in runs for done in range(0, count, 9)]
    return Problem(
        id=f"program-{name}",
        question=text,
        answer="".join(f"{count}{digit}" for count, digit in parts) + ".",
        extra={"tests": [f"assert printed == '{text}'"]},
    )
