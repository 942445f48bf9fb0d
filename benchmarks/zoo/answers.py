"""What the diagnosis answers for a stream: the only file of the zoo that knows how it is called and what it returns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.diagnosis.causes import find_causes
from trimtab.diagnosis.pipeline import examine
from trimtab.errors import TrimtabError
from zoo.plants import REFUSED
from zoo.streams import Stream

NONE = "none"
"""Answer of a diagnosis that names no cause."""


@dataclass(frozen=True)
class Answer:
    """The first cause that is named and its confidence, and all that are. `NONE` and `REFUSED` have confidence 1."""

    first: str
    confidence: float
    names: tuple[str, ...]


def answer(stream: Stream, file: Path, *, bare: bool = False, without: Collection[str] = ()) -> Answer:
    """Writes the stream to `file` and diagnoses it. `without`: causes that the diagnosis must not know."""
    stream.write(file, bare=bare)
    try:
        causes = _causes(file, without)
    except TrimtabError:
        return Answer(REFUSED, 1.0, (REFUSED,))
    if not causes:
        return Answer(NONE, 1.0, ())
    return Answer(causes[0].name, causes[0].confidence, tuple(cause.name for cause in causes))


def _causes(file: Path, without: Collection[str]) -> list[Any]:
    """The causes of a file, most confident first; without trying presets, which takes most of the time."""
    measured, _ = examine([file], None, {}, lambda _activity, _tokens: None, without)
    return list(find_causes(measured, without))
