"""Rows of a data set -> problems -> a task. Where the rows come from is the business of file.py and hub.py."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field

from trimtab.errors import TrimtabError, TrimtabWarning, nearest
from trimtab.tasks.answers import AnswerFormat, extract
from trimtab.tasks.base import BuiltTask
from trimtab.tasks.schemas import SCHEMAS, Schema, SchemaName
from trimtab.tasks.style import StyleOptions, build_template, limits, split_shots
from trimtab.tasks.templates import Chat, Template
from trimtab.types import Problem, RewardSpec

Row = tuple[int, Mapping[str, Any]]  # its number in the file, counted from 1, and its columns
BOXED = Chat("{question}\n\nReason step by step and write the final answer in \\boxed{}.", answer="\\boxed{{answer}}")


class RowOptions(StyleOptions):
    schema_: SchemaName | None = Field(None, alias="format", description="a known layout: sets the next four")
    question: str | None = Field(None, description="column with the question (default: question)")
    answer: str | None = Field(None, description="column with the answer (default: answer)")
    answer_format: AnswerFormat | None = Field(None, description="how the answer is written (default: text)")
    id: str | None = Field(None, description="column with a unique id (default: the row number)")
    extra: tuple[str, ...] = Field((), description="columns handed to rewards as problem.extra")
    holdout: float = Field(0.1, ge=0, le=1, description="share of the questions kept for testing; 1: all of them")

    @property
    def columns(self) -> Schema:
        """The named layout with the user's own words over it."""
        schema = Schema() if self.schema_ is None else SCHEMAS[self.schema_]
        return schema.with_columns(self.question, self.answer, self.answer_format, self.id)


def read_problems(rows: Iterable[Row], options: RowOptions, where: str, prefix: str) -> list[Problem]:
    """Every row as a problem. Raises `TrimtabError` naming file and row: nothing is skipped."""
    columns = options.columns
    problems: list[Problem] = []
    seen: dict[str, int] = {}
    for number, row in rows:
        place = f"{where}, row {number}"
        question = _column(row, columns.question, "question", place)
        if not isinstance(question, str) or not question.strip():
            raise TrimtabError(
                f"{place}: column {columns.question!r} has no question text; fill it in or remove the row"
            )
        stored = _column(row, columns.answer, "answer", place)
        try:
            answer = extract(stored, columns.answer_format)
        except ValueError as error:
            raise TrimtabError(f"{place}, column {columns.answer!r}: {error}") from None
        name = f"{prefix}-{number}" if columns.id is None else str(_column(row, columns.id, "id", place))
        if name in seen:
            raise TrimtabError(f"{place}: id {name!r} is also that of row {seen[name]}; use another id column, or none")
        seen[name] = number
        extra = {column: _json(_column(row, column, "extra", place), column, place) for column in options.extra}
        problems.append(Problem(id=name, question=question.strip(), answer=answer, extra=extra))
    if not problems:
        raise TrimtabError(f"{where}: no rows; give a file with at least one problem")
    return problems


def build_task(
    name: str, options: RowOptions, problems: Sequence[Problem], held_out: Sequence[Problem] | None, where: str
) -> BuiltTask:
    """A task over these problems; `held_out` is the test split if it has a source of its own."""
    if held_out is None:
        train, test = _split(problems, options.holdout, options.seed)
    else:
        train, test = _without_overlap(problems, held_out, where), list(held_out)
    shots, train = split_shots(options, options.columns.worked, train, where)
    template = build_template(options, shots, BOXED)
    stop, max_tokens = limits(options, template, shots, [problem.answer for problem in (*train, *test)], where)
    return BuiltTask(
        name=name,
        train=train,
        test=test,
        template=template,
        rewards=(_reward(options, template),),
        stop=stop,
        max_tokens=max_tokens,
    )


def _reward(options: RowOptions, template: Template) -> RewardSpec:
    form = options.columns.answer_format
    if isinstance(template, Chat) and template.answer == BOXED.answer:
        return RewardSpec("math")
    if form == "boxed":
        return RewardSpec("math", options={"where": "whole"})
    return RewardSpec("exact" if form == "text" else "numeric")


def _column(row: Mapping[str, Any], column: str, option: str, place: str) -> Any:
    if column not in row:
        raise TrimtabError(f'{place}: no column {column!r}{nearest(column, row)}; set {option} = "<column>" to name it')
    return row[column]


def _json(value: Any, column: str, place: str) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise TrimtabError(
            f"{place}: column {column!r} holds a {type(value).__name__}; extra columns reach rewards as JSON: "
            "store text, numbers, lists or objects"
        ) from None
    return value


def _split(problems: Sequence[Problem], share: float, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Split by question, so that rows that repeat one are never on both sides."""
    questions = list(dict.fromkeys(problem.question for problem in problems))
    random.Random(f"split/{seed}").shuffle(questions)
    tested = frozenset(questions[: round(share * len(questions))])
    return (
        [problem for problem in problems if problem.question not in tested],
        [problem for problem in problems if problem.question in tested],
    )


def _without_overlap(train: Sequence[Problem], test: Sequence[Problem], where: str) -> list[Problem]:
    tested = frozenset(problem.question for problem in test)
    kept = [problem for problem in train if problem.question not in tested]
    if len(kept) < len(train):
        warnings.warn(
            f"{where}: {len(train) - len(kept)} training rows are also in the test split and are left out of training",
            TrimtabWarning,
            stacklevel=4,
        )
    return kept
