"""The laboratory's `sort` task: ten digits, "3141592653=" -> "1123345569.".

`Problem.answer` is the whole target with its final stop ".", eleven characters: exactly what a warm start teaches and
what the exact reward compares. The training split is computed from (seed, index); nothing is stored.
"""

from __future__ import annotations

import random

from pydantic import Field

from trimtab.errors import TrimtabError
from trimtab.tasks.task import BuiltTask, TaskOptions, drawn_splits
from trimtab.tasks.templates import Plain
from trimtab.types import Problem, RewardSpec


class Options(TaskOptions):
    digits: int = Field(10, ge=2, le=64, description="how many digits are sorted")
    holdout: int = Field(512, ge=1, description="test problems")
    seed: int = Field(0, description="draws the problems")


def build(options: Options) -> BuiltTask:
    width, seed = options.digits, options.seed
    if options.holdout > 10**width // 2:
        raise TrimtabError(
            f"holdout = {options.holdout} leaves too few of the {10**width} problems to train on; lower it"
        )

    def draw(split: str, index: int) -> str:
        # A string seed is hashed with SHA-512: the same digits on every platform and in every Python process.
        return "".join(random.Random(f"sort/{seed}/{split}/{index}").choices("0123456789", k=width))

    def make(text: str, name: str) -> Problem:
        return Problem(id=f"sort-{name}", question=text, answer="".join(sorted(text)) + ".")

    train, test = drawn_splits(draw, make, options.holdout)
    return BuiltTask(
        name="sort",
        train=train,
        test=test,
        template=Plain("{question}="),
        rewards=(RewardSpec("exact"),),
        stop=(".",),
        max_tokens=width + 1,
    )
