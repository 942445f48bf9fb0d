"""The laboratory's `sort` task: ten digits, "3141592653=" -> "1123345569.".

`Problem.answer` is the whole target with its final stop ".", eleven characters: exactly what a warm start teaches and
what the exact reward compares. The training split is computed from (seed, index); nothing is stored.
"""

from __future__ import annotations

import random

from pydantic import Field

from trimtab.errors import TrimtabError
from trimtab.tasks.task import BuiltTask, Procedural, TaskOptions
from trimtab.tasks.templates import Plain
from trimtab.types import Problem, RewardSpec

TRAIN_SIZE = 1_000_000


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
    test = _distinct(options.holdout, width, seed)
    held_out = frozenset(test)

    def train(index: int) -> Problem:
        text, redraw = _draw("train", index, width, seed), 0
        while text in held_out:
            redraw += 1
            text = _draw(f"train-again-{redraw}", index, width, seed)
        return _problem(text, f"train-{index}")

    return BuiltTask(
        name="sort",
        train=Procedural(TRAIN_SIZE, train),
        test=[_problem(text, f"test-{index}") for index, text in enumerate(test)],
        template=Plain("{question}="),
        rewards=(RewardSpec("exact"),),
        stop=(".",),
        max_tokens=width + 1,
    )


def _draw(split: str, index: int, width: int, seed: int) -> str:
    # A string seed is hashed with SHA-512: the same digits on every platform and in every Python process.
    rng = random.Random(f"sort/{seed}/{split}/{index}")
    return "".join(rng.choices("0123456789", k=width))


def _distinct(count: int, width: int, seed: int) -> list[str]:
    texts: dict[str, None] = {}
    index = 0
    while len(texts) < count:
        texts[_draw("test", index, width, seed)] = None
        index += 1
    return list(texts)


def _problem(text: str, name: str) -> Problem:
    return Problem(id=f"sort-{name}", question=text, answer="".join(sorted(text)) + ".")
