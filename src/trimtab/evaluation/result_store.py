"""An evaluation on disk: counts of every finished batch, from which an interrupted one resumes.

settings.json   the settings; a run with others is refused
parts/          one JSONL file per model, task and mode: a header line, then one line per batch
results.json    results.md   the tables, when all is done
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from trimtab.errors import TrimtabError
from trimtab.evaluation.eval_result import BatchCounts, EpisodeCounts, ProblemResult
from trimtab.files import parse_json, regular_file
from trimtab.runs import atomic
from trimtab.runs.dotted_keys import flatten

SETTINGS, PARTS, LOCK = "settings.json", "parts", ".lock"
FORMAT = 1


class Store:
    """The folder of one evaluation, locked against a second process; a context manager.

    Models and tasks may be added by a later command. Raises `TrimtabError` when the folder holds other settings,
    another process writes it, or it cannot be written.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        with atomic.readable_errors(folder):
            (folder / PARTS).mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder / LOCK)
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                raise TrimtabError(
                    f"{folder} is in use by another evaluation: wait for it, or choose another --out"
                ) from None
        try:
            self._check_settings({"format": FORMAT, **settings})
        except BaseException:
            self._lock.release()
            raise

    def parts(self, name: str, header: Mapping[str, Any]) -> PartFile:
        """Returns the batches of one model, task and mode (`name`); `header` is everything that determines them."""
        slug = re.sub(r"[^A-Za-z0-9.@]+", "-", name).strip("-.")[-80:]
        key = hashlib.sha256(name.encode()).hexdigest()[:8]  # different names may have the same slug
        return PartFile(self.folder / PARTS / f"{slug}-{key}.jsonl", header)

    def write(self, name: str, text: str) -> None:
        """Writes a file of the folder atomically."""
        atomic.write_text(self.folder / name, text)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        path = self.folder / SETTINGS
        if path.exists() and any((self.folder / PARTS).iterdir()):
            _require_equal(_read(path), settings, self.folder)
        else:  # no batches yet: the settings of a failed command are replaced
            atomic.write_text(path, json.dumps(settings, indent=1))


class PartFile:
    """The batches of one model, task and mode; each line is synced to disk before the next batch begins.

    An incomplete last line, left by a kill or a full disk, is removed when the file is opened. The header is written
    with the first batch.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self._parts: dict[int, BatchCounts] = {}
        with atomic.readable_errors(path, "read"):
            data = regular_file(path).read_bytes() if path.exists() else b""
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):
                os.truncate(path, len(whole))
        lines = whole.decode().splitlines()
        self._header = None if lines else header
        for line in lines[:1]:
            _require_equal(_parse_record(line, path), header, path)
        for line in lines[1:]:
            number, part = _parse_part(_parse_record(line, path), path)
            self._parts[number] = part

    def get(self, number: int) -> BatchCounts | None:
        """Returns batch `number`, or None if it is not finished."""
        return self._parts.get(number)

    def append(self, number: int, part: BatchCounts) -> None:
        """Appends batch `number`. Raises `TrimtabError` if the disk is full; earlier batches stay readable."""
        records = [] if self._header is None else [self._header]
        records.append({"part": number, **asdict(part)})
        self._append(b"".join(json.dumps(record).encode() + b"\n" for record in records))
        self._header = None
        self._parts[number] = part

    def _append(self, data: bytes) -> None:
        with atomic.readable_errors(self.path), self.path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                while data:  # a nearly full disk accepts only a part of it
                    data = data[file.write(data) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise


def _parse_part(record: dict[str, Any], path: Path) -> tuple[int, BatchCounts]:
    try:
        number = int(record.pop("part"))
        problems = tuple(ProblemResult(**problem) for problem in record.pop("problems"))
        episodes = record.pop("episodes", None)
        return number, BatchCounts(
            problems=problems,
            errors=tuple(record.pop("errors")),
            episodes=None
            if episodes is None
            else EpisodeCounts(**{**episodes, "first_errors": tuple(episodes["first_errors"])}),
            **record,
        )
    except (KeyError, TypeError, ValueError):
        raise _damaged_error(path) from None


def _require_equal(stored: Mapping[str, Any], requested: Mapping[str, Any], path: Path) -> None:
    old, new = flatten(stored), flatten(json.loads(json.dumps(requested)))
    for key in [*new, *(key for key in old if key not in new)]:
        if old.get(key) != new.get(key):
            raise TrimtabError(
                f"{path} was measured with {key} = {_short(old.get(key))}, this command has {_short(new.get(key))}: "
                "repeat its settings, or choose another --out"
            )


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read(path: Path) -> dict[str, Any]:
    with atomic.readable_errors(path, "read"):
        return _parse_record(regular_file(path).read_text(), path)


def _parse_record(text: str, path: Path) -> dict[str, Any]:
    try:
        record = parse_json(text)
    except ValueError:
        raise _damaged_error(path) from None
    if not isinstance(record, dict):
        raise _damaged_error(path)
    return record


def _damaged_error(path: Path) -> TrimtabError:
    return TrimtabError(f"{path} is damaged: delete it, its batches will be measured again")
