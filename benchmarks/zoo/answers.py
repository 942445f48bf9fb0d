"""What the diagnosis answers for a stream: the only file of the zoo that knows how it is called and what it returns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from trimtab.diagnosis.answer import Diagnosis
from trimtab.diagnosis.causes import find_candidates, find_causes
from trimtab.diagnosis.pipeline import examine
from trimtab.diagnosis.records import Recommendation
from trimtab.errors import TrimtabError
from zoo.plants import REFUSED
from zoo.streams import Stream

NONE = "none"
"""Answer of a diagnosis that names no cause."""


@dataclass(frozen=True)
class Answer:
    """The first cause that is named and its confidence, and all that are. `NONE` and `REFUSED` have confidence 1.

    step: what the verdict says to do first, empty where the data is refused.
    """

    first: str
    confidence: float
    names: tuple[str, ...]
    step: str = ""


def answer(stream: Stream, file: Path, *, bare: bool = False, without: Collection[str] = ()) -> Answer:
    """Writes the stream to `file` and diagnoses it. `without`: causes that the diagnosis must not know."""
    stream.write(file, bare=bare)
    found = diagnosed(file, without)
    if found is None:
        return Answer(REFUSED, 1.0, (REFUSED,))
    causes, step = found.causes, found.answer.verdict[-1][1]
    if not causes:
        return Answer(NONE, 1.0, (), step)
    return Answer(causes[0].name, causes[0].confidence, tuple(cause.name for cause in causes), step)


def diagnosed(path: Path, without: Collection[str] = ()) -> Diagnosis | None:
    """The diagnosis of a file or folder without trying presets, which takes most of the time; None if refused."""
    try:
        measured, _ = examine([path], None, {}, lambda _activity, _tokens: None, without)
        causes = find_causes(measured, without)
    except TrimtabError:
        return None
    candidates = find_candidates(measured, causes, {})
    return Diagnosis(measured, causes, (), Recommendation("a preset", {}, ""), candidates=candidates)
