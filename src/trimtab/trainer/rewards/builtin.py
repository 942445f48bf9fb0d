"""The built-in rewards. Packages that are slow to import are imported by `build`."""

from __future__ import annotations

import copy
import json
import logging
import re
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from trimtab.errors import TrimtabError
from trimtab.trainer.rewards import Built, Response, Reward, build_weighted
from trimtab.trainer.sandbox.python_pool import PythonPool, SandboxName
from trimtab.trainer.tasks.answers import last_box
from trimtab.types import Problem, RewardSpec, Task


class Exact(Reward):
    """1 if the text before the stop string equals the answer, ignoring surrounding white space, else 0."""

    require_stop: bool = Field(True, description="0 for a response cut by the length limit, however it begins")

    def build(self, task: Task) -> Built:
        def exact(response: Response, problem: Problem) -> float:
            if self.require_stop and response.finish != "stop":
                return 0.0
            expected = problem.answer
            for stop in task.stop:
                expected = expected.removesuffix(stop)
            return float(response.body(task.stop) == expected.strip())

        return Built(exact, isolated=False)


class Format(Reward):
    """1 if the text before the stop string matches a regular expression, else 0."""

    pattern: str = Field(description="regular expression; a dot matches line breaks too")
    whole: bool = Field(True, description="it must match the whole text; false: somewhere in it")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"not a regular expression ({error})") from None
        return pattern

    def build(self, task: Task) -> Built:
        compiled = re.compile(self.pattern, re.DOTALL)
        match = compiled.fullmatch if self.whole else compiled.search

        def form(response: Response, problem: Problem) -> float:
            return float(match(response.body(task.stop)) is not None)

        return Built(form, isolated=True)  # a pattern can backtrack for hours


class Overlong(Reward):
    """DAPO's soft penalty for long responses (Yu et al. 2025, section 3.4; the formula of verl's dapo reward manager).

    min(-(|y| - (L_max - L_cache)) / L_cache * factor, 0): never positive, -factor at |y| = L_max.
    """

    max_tokens: int | None = Field(None, ge=1, description="L_max; default: the run's max_tokens")
    cache: int = Field(ge=1, description="L_cache: the tokens over which the penalty grows")
    factor: float = Field(1.0, gt=0, description="penalty at L_max")

    def build(self, task: Task) -> Built:
        longest = self.max_tokens or task.max_tokens
        if self.cache > longest:
            raise TrimtabError(f"overlong: cache = {self.cache} is longer than max_tokens = {longest}; lower it")
        free = longest - self.cache

        def overlong(response: Response, problem: Problem) -> float:
            return min(-(response.tokens - free) / self.cache * self.factor, 0.0)

        return Built(overlong, isolated=False)


# A number does not begin inside a word or another number. The number of digits is bounded, so that parsing is fast.
_NUMBER = re.compile(
    r"(?<![\w.])(?=[-+]?\$?\.?\d)[-+]?\$?(?P<whole>\d{1,3}(?:,\d{3}){1,20}(?!,?\d)|\d{1,60}(?!\d))?"
    r"(?P<part>\.\d{1,60})?(?P<power>[eE][-+]?\d{1,2}(?!\w))?(?:\s?/\s?(?P<below>\d{1,60}))?"
)


class Numeric(Reward):
    """1 if the chosen number in the response equals the gold number, else 0; the gold answer must be one number."""

    which: Literal["first", "last", "only"] = Field("last", description="which number counts if there are several")
    tolerance: float = Field(1e-4, ge=0, lt=1, description="relative; whole numbers must be exact")
    require_stop: bool = Field(True, description="0 for a response cut by the length limit")

    def build(self, task: Task) -> Built:
        def numeric(response: Response, problem: Problem) -> float:
            gold = numbers(problem.answer)
            if len(gold) != 1:
                raise ValueError(f"the right answer {problem.answer[:40]!r} is not one number; use another reward")
            if self.require_stop and response.finish != "stop":
                return 0.0
            values = numbers(response.body(task.stop))
            if not values or (self.which == "only" and len(values) > 1):
                return 0.0
            return float(close(values[0 if self.which == "first" else -1], gold[0], self.tolerance))

        return Built(numeric, isolated=False)


def numbers(text: str) -> list[Fraction]:
    """Returns all numbers in `text` as exact fractions, in order."""
    values = (_value(match) for match in _NUMBER.finditer(text.replace("−", "-")))
    return [value for value in values if value is not None]


def close(value: Fraction, gold: Fraction, tolerance: float) -> bool:
    """Whether the numbers are equal. If `gold` is not whole, a relative `tolerance` applies (3.33333 for 10/3)."""
    if gold.denominator == 1:
        return value == gold
    return abs(value - gold) <= Fraction(tolerance) * abs(gold)


def _value(match: re.Match[str]) -> Fraction | None:
    whole, part, below = match["whole"], match["part"], match["below"]
    if whole is None and part is None:
        return None
    value = Fraction((whole or "0").replace(",", "") + (part or "") + (match["power"] or ""))
    if below is not None:
        if int(below) == 0:
            return None
        value /= int(below)
    return -value if match[0].startswith("-") else value


# math-verify reads 4.5e33 as 4.5 times Euler's number times 33, and cannot read "-1./3". Both are common in data sets.
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d{1,60}(?:\.\d{0,60})?)[eE]([+-]?\d{1,3})(?![\w.])")
_BARE_POINT = re.compile(r"(?<=\d)\.(?=\s*[/*+)\]}-])")
_NUMPY = re.compile(r"\bnp\.(?=[a-z])")


class MathEqual(Reward):
    """1 if the answer is mathematically equal to the gold answer, else 0 (also if no answer is found).

    Of several boxes the last one counts; boxes with no words between them but "and" and "or" count as one set.

    It runs in a worker, and the timeout of the worker is the only one. The timeout of math-verify is off: it uses
    signal.alarm, which fails outside the main thread, and its timeouts and errors would count as 0 silently.
    """

    where: Literal["boxed", "whole", "anywhere"] = Field(
        "boxed",
        description="boxed: only \\boxed{} counts; whole: the whole text is the answer; anywhere: any expression",
    )

    def build(self, task: Task) -> Built:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeout is off; see above
        boxed = [LatexExtractionConfig(boxed_match_priority=0)]

        def read(text: str, config: list) -> list:
            return parse(text, extraction_config=config, parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]

        @lru_cache(maxsize=1024)  # all samples of a group have the same gold answer, and parsing takes milliseconds
        def read_gold(answer: str) -> list:
            gold = read(f"\\boxed{{{readable(answer)}}}", boxed)
            if not gold:
                raise ValueError(f"cannot read the right answer {answer[:40]!r}; use another reward")
            return gold

        def equal(response: Response, problem: Problem) -> float:
            gold, answer = read_gold(problem.answer), readable(response.body(task.stop))
            config = [*boxed, ExprExtractionConfig()] if self.where == "anywhere" else boxed
            text = last_box(answer) or {"boxed": "", "whole": f"\\boxed{{{answer}}}", "anywhere": answer}[self.where]
            return float(verify(gold, read(text, config), timeout_seconds=None, raise_on_error=True))

        return Built(equal, isolated=True)


def readable(text: str) -> str:
    """Returns `text` with numbers that math-verify misreads rewritten in LaTeX: 4.5e33 -> 4.5 \\times 10^{33}."""
    text = _SCIENTIFIC.sub(lambda match: f"{match[1].rstrip('.')} \\times 10^{{{int(match[2])}}}", text)
    return _NUMPY.sub(r"\\", _BARE_POINT.sub("", text))


class GymScore(Reward):
    """The score of the reasoning-gym dataset, usually in [0, 1] with partial credit, for a reasoning-gym task.

    It runs in a worker, because several scorers pass the response to a symbolic parser, which can hang.
    """

    tag: str | None = Field(None, description="score what is between <tag> and </tag>; default: the whole answer")

    def build(self, task: Task) -> Built:
        import reasoning_gym

        @lru_cache(maxsize=16)
        def source(dataset: str, config: str, seed: int, size: int) -> Any:
            return reasoning_gym.create_dataset(dataset, seed=seed, size=size, **json.loads(config))

        @lru_cache(maxsize=512)
        def entry_of(index: int, *dataset: Any) -> Any:
            return source(*dataset)[index]

        def gym(response: Response, problem: Problem) -> float:
            answer = response.body(task.stop)
            if self.tag is not None:
                answer = _between(answer, self.tag)
            try:
                name, config, seed, size, index = (
                    problem.extra[key] for key in ("dataset", "config", "seed", "size", "index")
                )
            except KeyError:
                raise ValueError("the problem does not come from a reasoning-gym task") from None
            dataset = name, json.dumps(config, sort_keys=True), seed, size
            entry = entry_of(index, *dataset)
            if entry["question"] != problem.question:
                raise ValueError(
                    "reasoning-gym no longer makes the same problem; use the version the task was built with"
                )
            return source(*dataset).score_answer(answer, entry=copy.deepcopy(entry))

        return Built(gym, isolated=True)


def _between(text: str, tag: str) -> str | None:
    """Returns the content of the last complete <tag>...</tag>, or None if there is none."""
    head, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = head.rpartition(f"<{tag}>")
    return inside.strip() if closing and opening else None


# A block is opened by the first fence of a line; the first word after the fence is the language.
_BLOCK = re.compile(r"^(?:(?!```)[^\n])*`{3,}[ \t]*([^\s`]*)[^\n`]*\n(.*?)```", re.DOTALL | re.MULTILINE)
_PYTHON = re.compile(r"py(?:thon)?[\d.]*", re.IGNORECASE)


class PythonTests(Reward):
    """1 if the program and then the tests of the problem run without an error or a timeout, else 0.

    The program is the last fenced block of Python, else the last without a language, else the whole response. The
    sandbox receives the tests only after the program has ended, so an early exit cannot skip them. A response's
    functions can still cheat while the tests run.
    """

    sandbox: SandboxName = Field("monty", description="`monty`, a part of Python; or `bubblewrap`, all of it")
    packages: tuple[str, ...] = Field((), description="installed packages that a program may import; bubblewrap only")
    seconds: float = Field(1.0, gt=0, le=1e6, description="that the program may take, and its tests again")
    memory_mb: int = Field(256, ge=1, le=65536, description="megabytes a run may use")
    program: str = Field("{code}", description="the Python program, with {code} where the response's code belongs")
    tests: str = Field("tests", description="column of the task's `extra`: Python with assertions, or a list of them")

    @field_validator("program")
    @classmethod
    def _has_code(cls, program: str) -> str:
        if "{code}" not in program:
            raise ValueError("write {code} where the code of the response belongs")
        return program

    def build(self, task: Task) -> Built:
        try:
            self._start().close()
        except TrimtabError as error:
            raise TrimtabError(f"reward 'python-tests': {error}") from None
        pool = cache(self._start)  # started in the worker process that runs this reward

        def python_tests(response: Response, problem: Problem) -> float:
            tests = problem.extra.get(self.tests)
            if not tests:
                raise ValueError(f"the problem has no {self.tests!r}; name the column in the task's extra")
            body = response.body(task.stop)
            blocks = _BLOCK.findall(body)
            of_python = [code for language, code in blocks if _PYTHON.fullmatch(language)]
            code = (of_python or [code for language, code in blocks if not language] or [body])[-1]
            lines = tests if isinstance(tests, str) else "\n".join(tests)
            with pool().session() as session:
                for text in (self.program.replace("{code}", code), lines):
                    run = session.run(text)
                    if run.sandbox_failed:
                        raise RuntimeError(f"the sandbox failed: {run.error}")
                    if run.error is not None:
                        return 0.0
            return 1.0

        return Built(python_tests, isolated=True)

    def _start(self) -> PythonPool:
        limits = {"timeout": self.seconds, "memory_mb": self.memory_mb}
        return PythonPool(self.sandbox, workers=1, packages=self.packages, **limits)


class RewardPart(BaseModel):
    """One reward of a task in a mixture, with the keywords of the reward."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    weight: float = 1.0


class ByTask(Reward):
    """In a mixture, the weighted sum of the rewards of the task to which the problem belongs."""

    rewards: dict[str, list[RewardPart]] = Field(
        min_length=1,
        description="for each label of a task a list of tables: `name`, `weight`, and the reward's keywords",
    )

    def build(self, task: Task) -> Built:
        specs = {
            label: [RewardSpec(part.name, part.weight, options=part.model_extra or {}) for part in parts]
            for label, parts in self.rewards.items()
        }
        entries = {label: build_weighted(of_task, task) for label, of_task in specs.items()}

        def by_task(response: Response, problem: Problem) -> float:
            label = problem.extra.get("task")
            if label not in entries:
                raise ValueError(f"by-task has no rewards for problems of {label!r}, only for {', '.join(entries)}")
            return sum(entry.weight * entry.built.function(response, problem) for entry in entries[label])

        isolated = any(entry.built.isolated for of_task in entries.values() for entry in of_task)
        return Built(by_task, isolated=isolated)
