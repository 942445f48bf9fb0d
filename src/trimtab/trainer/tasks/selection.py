"""Selection of training rows: by their mean score in a band, and without repeated questions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from trimtab.errors import TrimtabError
from trimtab.files import parse_json, regular_file
from trimtab.trainer.tasks.style import StyleOptions
from trimtab.types import Problem


class SelectionOptions(StyleOptions):
    score_column: str | None = Field(
        None, description="column with the mean score of each row, or with the list of its scores, from 0 to 1"
    )
    scores: Path | None = Field(
        None, description="file with the mean score of each row by id, as `trimtab eval --scores` writes it"
    )
    score_min: float = Field(0.0, ge=0, le=1, description="training rows with a lower mean score are left out")
    score_max: float = Field(1.0, ge=0, le=1, description="training rows with a higher mean score are left out")
    drop_duplicates: bool = Field(
        False,
        description="leave out training rows whose question, apart from case and spaces, an earlier or a test row has",
    )

    @model_validator(mode="after")
    def _band_needs_scores(self) -> SelectionOptions:
        bounded = self.score_min > 0 or self.score_max < 1
        if self.scores is not None and self.score_column is not None:
            raise ValueError("name score_column or scores, not both")
        if bounded and self.scores is None and self.score_column is None:
            raise ValueError(
                "score_min and score_max need score_column, or scores: write them with `trimtab eval MODEL --task ... "
                "--samples 8 --scores FILE`"
            )
        return self


def select(
    train: Sequence[Problem], test: Sequence[Problem], options: SelectionOptions, where: str
) -> tuple[list[Problem], tuple[str, ...]]:
    """Returns the chosen training rows, and a note for each way of choosing that leaves some out.

    `test` are the rows of the test split, which no training row may repeat. Raises `TrimtabError` for a row that
    `options.scores` does not have, and where no row is left.
    """
    kept, notes = list(train), []
    if options.drop_duplicates:
        kept = _distinct(train, test)
        if len(kept) < len(train):
            notes.append(
                f"{where}: {len(kept):,} of {len(train):,} training rows are kept, the others have the question of "
                "another row"
            )
    if options.scores is not None or options.score_column is not None:
        scores = _scores(kept, options, where)
        low, high = options.score_min, options.score_max
        inside = [item for item, score in zip(kept, scores, strict=True) if score is not None and low <= score <= high]
        unknown = f" ({scores.count(None):,} without a score)" if None in scores else ""
        notes.append(
            f"{where}: {len(inside):,} of {len(kept):,} training rows have a mean score from {low:g} to {high:g}, "
            f"the others are left out{unknown}"
        )
        kept = inside
    if train and not kept:
        raise TrimtabError(f"{notes[-1]}: no training row is left; give it others, or widen score_min and score_max")
    return kept, tuple(notes)


def _distinct(train: Sequence[Problem], test: Sequence[Problem]) -> list[Problem]:
    """Returns the first training row of each question that no test row has."""
    seen = {_normalized(problem.question) for problem in test}
    kept = []
    for problem in train:
        question = _normalized(problem.question)
        if question not in seen:
            kept.append(problem)
        seen.add(question)
    return kept


def _normalized(question: str) -> str:
    return " ".join(question.casefold().split())


def _scores(train: Sequence[Problem], options: SelectionOptions, where: str) -> list[float | None]:
    """Returns the mean score of every row; None where its column is empty."""
    if options.score_column is not None:
        return [problem.extra[options.score_column] for problem in train]
    assert options.scores is not None
    scores = _read(options.scores)
    if missing := next((problem.id for problem in train if problem.id not in scores), None):
        raise TrimtabError(
            f"{options.scores} has no score of row {missing!r} of {where}: evaluate the same rows with holdout = 1"
        )
    return [scores[problem.id] for problem in train]


def mean_score(value: Any, column: str, location: str) -> float | None:
    """Returns the mean of a row's scores, or its one score; None if the row has none.

    Raises `TrimtabError` for a value that is not from 0 to 1, naming the row.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    values: list[Any] = value if isinstance(value, list) and value else [value]
    if isinstance(value, str):  # a cell of a CSV file
        with suppress(ValueError):
            values = [float(value)]
    if not all(_is_score(item) for item in values):
        raise TrimtabError(f"{location}: column {column!r} holds {str(value)[:40]!r}, not a score from 0 to 1")
    return sum(values) / len(values)


def _is_score(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _read(path: Path) -> Mapping[str, float]:
    """Reads lines of `{"id": ..., "score": ...}`."""
    try:
        lines = regular_file(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrimtabError(f"cannot read {path}: {error}; check scores") from None
    scores: dict[str, float] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            name, score = str(row["id"]), row["score"]
        except (ValueError, KeyError, TypeError):
            raise TrimtabError(
                f'{path}, row {number}: not {{"id": ..., "score": ...}}; `trimtab eval --scores` writes it'
            ) from None
        if not _is_score(score):
            raise TrimtabError(f"{path}, row {number}: {score!r} is not a score from 0 to 1")
        scores[name] = score
    return scores
