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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from trimtab.errors import TrimtabError
from trimtab.files import parse_json, regular_file
from trimtab.runs import atomic
from trimtab.runs.dotted_keys import differences
from trimtab.trainer.evaluation.eval_results import BatchCounts

SETTINGS, PARTS = "settings.json", "parts"
FORMAT = 1
_BATCH = TypeAdapter(BatchCounts)


@contextmanager
def results_folder(folder: Path, settings: Mapping[str, Any]) -> Iterator[None]:
    """Locks the folder of an evaluation for the block and notes its settings there.

    Models and tasks may be added by a later command. Raises `TrimtabError` when the folder holds other settings,
    another process writes it, or it cannot be written.
    """
    settings = {"format": FORMAT, **settings}
    with atomic.locked(folder, "evaluation"):
        path, parts = folder / SETTINGS, folder / PARTS
        parts.mkdir(exist_ok=True)
        if path.exists() and any(parts.iterdir()):
            with atomic.readable_errors(path, "read"):
                _require_equal(_parse(regular_file(path).read_text(), path), settings, folder)
        else:  # no batches yet: the settings of a failed command are replaced
            atomic.write_text(path, json.dumps(settings, indent=1))
        yield


class PartFile:
    """The batches of one model, task and mode; each line is synced to disk before the next batch begins.

    An incomplete last line, left by a kill or a full disk, is removed when the file is opened. The header, which is
    everything that determines the batches, is written with the first batch. `name` is of model, task and mode.
    """

    def __init__(self, folder: Path, name: str, header: Mapping[str, Any]) -> None:
        slug = re.sub(r"[^A-Za-z0-9.@]+", "-", name).strip("-.")[-80:]
        key = hashlib.sha256(name.encode()).hexdigest()[:8]  # different names may have the same slug
        self.path = path = folder / PARTS / f"{slug}-{key}.jsonl"
        with atomic.readable_errors(path, "read"):
            data = regular_file(path).read_bytes() if path.exists() else b""
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):
                os.truncate(path, len(whole))
        records = [_parse(line, path) for line in whole.decode().splitlines()]
        self._header = None if records else header
        if records:
            _require_equal(records[0], header, path)
        try:
            self._parts = {int(record["part"]): _BATCH.validate_python(record) for record in records[1:]}
        except (KeyError, TypeError, ValueError):
            raise _damaged(path) from None

    def get(self, number: int) -> BatchCounts | None:
        """Returns batch `number`, or None if it is not finished."""
        return self._parts.get(number)

    def append(self, number: int, part: BatchCounts) -> None:
        """Appends batch `number`. Raises `TrimtabError` if the disk is full; earlier batches stay readable."""
        records = [] if self._header is None else [self._header]
        records.append({"part": number, **asdict(part)})
        data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        with atomic.readable_errors(self.path), self.path.open("ab", buffering=0) as file:
            atomic.append(file.fileno(), data)
        self._header = None
        self._parts[number] = part


def _require_equal(stored: Mapping[str, Any], requested: Mapping[str, Any], path: Path) -> None:
    for key, *values in differences(stored, json.loads(json.dumps(requested))):
        before, now = ("nothing" if value is None else json.dumps(value) for value in values)
        raise TrimtabError(
            f"{path} was measured with {key} = {before:.60}, this command has {now:.60}: repeat its settings, or "
            "choose another --out"
        )


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        record = parse_json(text)
    except ValueError:
        raise _damaged(path) from None
    if not isinstance(record, dict):
        raise _damaged(path)
    return record


def _damaged(path: Path) -> TrimtabError:
    return TrimtabError(f"{path} is damaged: delete it, its batches will be measured again")
