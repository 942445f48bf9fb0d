"""Reads the provenance of a run (`provenance.json`) and describes it in words for reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.files import parse_json, regular_file
from trimtab.runs.layout import PROVENANCE

GIB = 1024**3


def read_origins(run: Path) -> list[dict[str, Any]]:
    """Returns one mapping for each start of the run, in order; empty if the run has no provenance file.

    Raises `TrimtabError` when the file is damaged.
    """
    file = run / PROVENANCE
    try:
        starts = parse_json(regular_file(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise TrimtabError(f"{file} is damaged ({error}): delete it, the run does not need it") from None
    if not isinstance(starts, list) or not all(isinstance(part, dict) and _well_formed(part) for part in starts):
        raise TrimtabError(f"{file} holds values of unknown types: delete it, the run does not need it")
    return starts


def _well_formed(part: Mapping[str, Any]) -> bool:
    kinds = {"seconds": int | float, "versions": dict, "commit": dict, "hardware": dict, "ranks": int}
    kinds |= {"outcome": str, "error": str}
    parts = {"cores": int, "threads": int, "memory": int | float, "gpus": list}
    hardware = part.get("hardware")
    return all(isinstance(part.get(key), kind | None) for key, kind in kinds.items()) and (
        not isinstance(hardware, dict) or all(isinstance(hardware.get(key), kind | None) for key, kind in parts.items())
    )


def described(part: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns one start as pairs of name and value; absent values are left out."""
    seconds, last, hardware = part.get("seconds"), part.get("last_step"), part.get("hardware") or {}
    commit, outcome, started = part.get("commit") or {}, part.get("outcome"), ""
    with suppress(ValueError):
        started = datetime.fromisoformat(str(part.get("started"))).strftime("%Y-%m-%d %H:%M:%S %Z")
    if last is None:
        steps = f"from {part.get('first_step')}" if part.get("ended") is None else "none was finished"
    else:
        steps = f"{part.get('first_step')} to {last}"
    outcomes = {
        "finished": "all steps done",
        "stopped": "stopped by Ctrl-C, SIGTERM or the caller",
        "failed": f"failed: {part.get('error') or 'no message'}",
    }
    modified = ", with changes that are not committed" if commit.get("modified") else ""
    values = {
        "command": part.get("command"),
        "started": started,
        "duration": "not known: the run goes on, or was killed" if seconds is None else duration(seconds),
        "steps": steps,
        "outcome": outcomes.get(str(outcome)),
        "versions": ", ".join(f"{name} {version}" for name, version in (part.get("versions") or {}).items()),
        "commit": f"{commit.get('id')}{modified}" if commit else "not known: not a checkout of trimtab, or no git",
        "hardware": _hardware(hardware),
        "ranks": part.get("ranks") if part.get("ranks", 1) != 1 else None,
    }
    return [(name, str(value)) for name, value in values.items() if value]


def setting(part: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what must be equal for two starts to be comparable number by number: versions, commit and hardware."""
    hardware = part.get("hardware") or {}
    versions = part.get("versions") or {}
    machine = [hardware.get(key) for key in ("cpu", "threads", "gpus")]
    return tuple(versions.items()), str(part.get("commit")), str(machine)


def duration(seconds: float) -> str:
    """Returns a duration as `42 s`, `3 min 07 s` or `2 h 05 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def _hardware(values: Mapping[str, Any]) -> str:
    gpus: Sequence[str] = values.get("gpus") or []
    counted = [f"{gpus.count(name)} x {name}" if gpus.count(name) > 1 else name for name in dict.fromkeys(gpus)]
    memory = values.get("memory")
    parts = [
        str(values.get("cpu") or ""),
        f"{values['cores']} cores" if values.get("cores") else "",
        f"{values['threads']} thread{'s' if values['threads'] > 1 else ''}" if values.get("threads") else "",
        f"{memory / GIB:.1f} GiB of memory" if memory else "",
        *(counted or ["no GPU"]),
    ]
    return ", ".join(part for part in parts if part)
