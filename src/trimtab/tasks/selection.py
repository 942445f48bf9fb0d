"""Selection of training rows: by their mean score in a band, and without repeated questions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field, model_validator

from trimtab.errors import TrimtabError
from trimtab.tasks.style import StyleOptions
from trimtab.types import Problem


class SelectionOptions(StyleOptions):
    scores: Path | None = Field(
        None, description="file with the mean score of each row by id, as `trimtab eval --scores` writes it"
    )
    score_min: float = Field(0.0, ge=0, le=1, description="training rows with a lower mean score are left out")
    score_max: float = Field(1.0, ge=0, le=1, description="training rows with a higher mean score are left out")
    drop_duplicates: bool = Field(
        False, description="leave out training rows whose question, apart from case and spaces, an earlier one has"
    )

    @model_validator(mode="after")
    def _band_needs_scores(self) -> SelectionOptions:
        bounded = self.score_min > 0 or self.score_max < 1
        if bounded and self.scores is None:
            raise ValueError(
                "score_min and score_max need scores: write them with `trimtab eval MODEL --task ... --samples 8 "
                "--scores FILE`"
            )
        if self.scores is not None and not bounded:
            raise ValueError("scores has no effect without score_min or score_max")
        if self.score_min > self.score_max:
            raise ValueError(f"score_min = {self.score_min:g} is above score_max = {self.score_max:g}")
        return self


def select(train: Sequence[Problem], options: SelectionOptions, where: str) -> tuple[list[Problem], tuple[str, ...]]:
    """Returns the chosen training rows, and a note for each kind of row that is left out.

    Raises `TrimtabError` for a row without a score, and where no row is left.
    """
    kept, notes = list(train), []
    if options.drop_duplicates:
        first = {_normalized(problem.question): problem for problem in reversed(kept)}
        distinct = [problem for problem in kept if first[_normalized(problem.question)] is problem]
        if len(distinct) < len(kept):
            notes.append(
                f"{where}: {len(kept) - len(distinct):,} rows with the question of an earlier one are left out"
            )
        kept = distinct
    if options.scores is not None:
        scores = _read(options.scores)
        if missing := next((problem.id for problem in kept if problem.id not in scores), None):
            raise TrimtabError(
                f"{options.scores} has no score of row {missing!r} of {where}: evaluate the same file with holdout = 1"
            )
        inside = [item for item in kept if options.score_min <= scores[item.id] <= options.score_max]
        notes.append(
            f"{where}: {len(inside):,} of {len(kept):,} rows have a mean score from {options.score_min:g} to "
            f"{options.score_max:g}, the others are left out"
        )
        kept = inside
    if train and not kept:
        raise TrimtabError(f"{where}: no training row is left; widen score_min and score_max")
    return kept, tuple(notes)


def _normalized(question: str) -> str:
    return " ".join(question.casefold().split())


def _read(path: Path) -> Mapping[str, float]:
    """Reads lines of `{"id": ..., "score": ...}`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrimtabError(f"cannot read {path}: {error}; check scores") from None
    scores: dict[str, float] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            scores[row["id"]] = float(row["score"])
        except (ValueError, KeyError, TypeError):
            raise TrimtabError(
                f'{path}, row {number}: not {{"id": ..., "score": ...}}; `trimtab eval --scores` writes it'
            ) from None
    return scores
