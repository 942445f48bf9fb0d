"""The `math` reward: mathematical equality by math-verify.

It runs in a worker, whose timeout is the only one: that of math-verify uses signal.alarm, which fails outside the
main thread, and by default it turns its timeouts and errors into "wrong", which here would be a silent 0.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Literal

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from pydantic import Field

from trimtab.trainer.rewards.reward import Built, Response, Reward
from trimtab.types import Problem, Task

# math-verify reads 4.5e33 as 4.5 times Euler's number times 33, and "-1./3" not at all; data sets are full of both.
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d{1,60}(?:\.\d{0,60})?)[eE]([+-]?\d{1,3})(?![\w.])")
_BARE_POINT = re.compile(r"(?<=\d)\.(?=\s*[/*+)\]}-])")
_NUMPY = re.compile(r"\bnp\.(?=[a-z])")


class MathEqual(Reward):
    """1 if the answer is mathematically equal to the gold answer, else 0 (also when no answer is found)."""

    where: Literal["boxed", "whole", "anywhere"] = Field(
        "boxed",
        description="boxed: only \\boxed{} counts; whole: the whole text is the answer; anywhere: any expression",
    )

    def build(self, task: Task) -> Built:
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeout is off; see above
        stops = task.stop
        boxed = [LatexExtractionConfig(boxed_match_priority=0)]

        def read(text: str, config: list) -> list:
            return parse(text, extraction_config=config, parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]

        @lru_cache(maxsize=1024)  # a group of samples shares its gold answer, and reading one takes milliseconds
        def read_gold(answer: str) -> list:
            gold = read(f"\\boxed{{{readable(answer)}}}", boxed)
            if not gold:
                raise ValueError(f"cannot read the right answer {answer[:40]!r}; use another reward")
            return gold

        def equal(response: Response, problem: Problem) -> float:
            gold = read_gold(problem.answer)
            answer = readable(response.body(stops))
            if self.where == "anywhere":
                expressions = read(answer, [*boxed, ExprExtractionConfig()])
            elif "\\boxed" in answer:
                expressions = read(answer, boxed)
            else:
                expressions = read(f"\\boxed{{{answer}}}", boxed) if self.where == "whole" else []
            return float(verify(gold, expressions, timeout_seconds=None, raise_on_error=True))

        return Built(equal, isolated=True)


def readable(text: str) -> str:
    """Returns `text` with numbers that math-verify misreads written in LaTeX: 4.5e33 -> 4.5 \\times 10^{33}."""
    text = _SCIENTIFIC.sub(lambda match: f"{match[1].rstrip('.')} \\times 10^{{{int(match[2])}}}", text)
    return _NUMPY.sub(r"\\", _BARE_POINT.sub("", text))
