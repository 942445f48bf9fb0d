"""Reads the scalars that a run logged: JSON, CSV, the trainer_state.json of transformers, or TensorBoard events."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.files import MAX_SCALARS_BYTES, RAISE_LIMITS, limit, natural_key, opened, parse_json, regular_file
from trimtab.monitor.curves import Row, curves_of, known_scalars
from trimtab.plugins import require_extra

STEP = (
    *("step", "global_step", "training_step", "training/global_step", "train/global_step", "trainer/global_step"),
    *("system/global_step", "progress/batch", "train/step", "rollout/step", "_step", "Step"),
)
"""Names of the step counter; the first one that a row has is used."""
_LONGEST_NAME = 500
"""Most characters of a name; objects nested more deeply are ignored."""
_TENSORBOARD = {"Wall time", "Step", "Value"}
"""The columns of the CSV file that TensorBoard exports for one curve."""
_STATE, _EVENTS, _HISTORY = "trainer_state.json", "events.out.tfevents*", "log_history"


def find_scalars(path: Path) -> Path:
    """Returns the file of scalars, or the folder of TensorBoard events, that `path` names.

    In a folder of a transformers trainer, it is trainer_state.json, or that of the newest checkpoint if it has more
    steps. In another folder, it is the only file, or folder of events, with known scalars. Raises `TrimtabError` if
    there is none, or more than one.
    """
    if not path.is_dir() or any(path.glob(_EVENTS)):
        return path
    newest = sorted(path.glob(f"checkpoint-*/{_STATE}"), key=lambda state: natural_key(str(state)))[-1:]
    if states := [state for state in (path / _STATE, *newest) if state.exists()]:
        return states[0] if len(states) == 1 else max(states, key=lambda state: read_scalars(state)[-1]["step"])
    endings = (".jsonl", ".json", ".csv")
    files = sorted(item for item in path.iterdir() if item.name.lower().removesuffix(".gz").endswith(endings))
    found = files + sorted({event.parent for event in path.rglob(_EVENTS)})
    known = found if len(found) == 1 else [item for item in found if _is_known(item)]
    if len(known) != 1:
        names = ", ".join(str(item.relative_to(path)) for item in known[:5])
        what = f"{len(known)} files of scalars ({names})" if known else "no file of known scalars"
        raise TrimtabError(f"{path} holds {what}: name one file (JSON lines, a JSON array, CSV, TensorBoard events)")
    return known[0]


def read_scalars(path: Path) -> list[Row]:
    """Returns a row of numbers for each step, in the order of the file, with the number of the step as `step`.

    path: JSON lines, a JSON array of objects, a trainer_state.json, a CSV table (as W&B exports it), each gzipped or
    not, or a folder of TensorBoard events. Consecutive rows of the same step are merged into one. The last line of JSON
    lines may be unfinished. Raises `TrimtabError` for a file that is none of these.
    """
    if path.is_dir():
        return _merged(_events(path), path)
    with opened(path) as file:
        data = file.read(limit(MAX_SCALARS_BYTES) + 1)
    if len(data) > limit(MAX_SCALARS_BYTES):
        raise TrimtabError(
            f"{path} holds over {limit(MAX_SCALARS_BYTES) >> 20} MB: name a file of scalars, leave steps out, or "
            f"{RAISE_LIMITS}"
        )
    is_table = path.name.lower().removesuffix(".gz").endswith(".csv")
    try:
        text = data.decode("utf-8-sig")
        if is_table:
            csv.field_size_limit(limit(MAX_SCALARS_BYTES))
        rows = list(csv.DictReader(io.StringIO(text, newline=""))) if is_table else _objects(text)
    except (ValueError, csv.Error) as error:
        kind = "CSV" if is_table else "JSON"
        raise TrimtabError(f"{path}: not readable as {kind} of scalars ({error}): name another file") from None
    if not all(isinstance(row, dict) for row in rows):
        raise TrimtabError(f"{path}: each line or element must be a JSON object of scalars by name")
    if is_table and rows and rows[0].keys() == _TENSORBOARD:
        name = _name_in(path)
        rows = [{"step": row["Step"], name: row["Value"]} for row in rows]
    return _merged(map(_numbers, rows), path)


def _is_known(path: Path) -> bool:
    try:
        return bool(curves_of(read_scalars(path))[1])
    except TrimtabError:  # another kind of file
        return False


def _name_in(path: Path) -> str:
    """Returns the known scalar at the end of the name of TensorBoard's CSV, where `_` replaces other characters."""
    stem = path.name.removesuffix(".gz").removesuffix(".csv")
    names = {scalar.name: re.sub(r"\W", "_", scalar.name) for scalar in known_scalars()}
    found = [name for name, plain in names.items() if re.search(rf"(^|[^a-z0-9]){plain}$", stem)]
    if not found:
        raise TrimtabError(
            f"{path} is a curve of TensorBoard whose column 'Value' has no name of a metric, and neither has the file: "
            f"name it as the metric, for example mismatch_k3.csv, or give the folder of the event files"
        )
    return max(found, key=len)


def _objects(text: str) -> list[Any]:
    """Returns the rows of a text of JSON lines, or of one JSON value. Raises `ValueError` for another text."""
    lines = [line for line in text.split("\n") if line.strip()]
    try:
        value = parse_json(text) if lines else []
    except ValueError:
        if len(lines) < 2:
            raise
    else:
        history = value.get(_HISTORY) if isinstance(value, dict) else value
        return history if isinstance(history, list) else [value]
    if not text.endswith("\n"):
        try:
            parse_json(lines[-1])
        except ValueError:  # the line that a run is writing
            lines.pop()
    return [parse_json(line) for line in lines]


def _numbers(row: Mapping[str, object]) -> Row:
    """Returns the numbers of a row; texts of a CSV table are converted, nested names joined by `/`."""
    found: dict[str, float] = {}
    levels: list[tuple[str, Mapping[str, object]]] = [("", row)]
    while levels:
        prefix, level = levels.pop()
        for name, value in level.items():
            if isinstance(value, dict):
                if len(prefix) + len(name) < _LONGEST_NAME:
                    levels.append((f"{prefix}{name}/", value))
            elif isinstance(value, int | float | str) and not isinstance(value, bool):
                try:
                    found[prefix + name] = float(value)
                except ValueError:  # a text is not a scalar
                    continue
                except OverflowError:  # an integer of more than 308 digits
                    found[prefix + name] = math.inf
    return found


def _merged(rows: Iterable[Row], path: Path) -> list[Row]:
    """Merges consecutive rows of the same step; rows without a step are numbered."""
    merged: list[dict[str, float]] = []
    for number, row in enumerate(rows, start=1):
        counter = next((name for name in STEP if name in row), None)
        step = row[counter] if counter else len(merged)
        if not math.isfinite(step):
            raise TrimtabError(f"{path}, row {number}: {counter} is {step}: mend the number of that step")
        if merged and merged[-1]["step"] == step:
            merged[-1].update(row)
        else:
            merged.append({**row, "step": step})
    if not merged:
        raise TrimtabError(f"{path} holds no step yet: wait for the first one, or name another file")
    return list(merged)


def _events(folder: Path) -> Sequence[Row]:
    """Returns the scalars of all TensorBoard event files in a folder, by step."""
    require_extra("tensorboard", f"reading {folder}", "or name a file of JSON lines or CSV")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    try:
        for file in folder.glob(_EVENTS):
            regular_file(file)
    except OSError as error:
        raise TrimtabError(f"cannot read {error.filename}: {error.strerror}") from None
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    rows: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            rows.setdefault(event.step, {"step": event.step})[name] = event.value
    return [_numbers(rows[step]) for step in sorted(rows)]
