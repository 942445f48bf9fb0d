"""Names and places inside a run directory; the list of its checkpoints."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from trimtab.errors import TrimtabError
from trimtab.runs import atomic

CONFIG, METRICS, MODEL, LOCK, PROVENANCE = "config.toml", "metrics.jsonl", "model", ".lock", "provenance.json"
BEST = "best.json"
_NAME = re.compile(rf"(?:{re.escape(atomic.REPLACED)})?step-(\d{{6,}})")


@dataclass(frozen=True)
class BestCheckpoint:
    """The best checkpoint so far; higher is better."""

    step: int
    metric: str
    value: float


def list_checkpoints(root: Path) -> list[Path]:
    """Every checkpoint under `root`, oldest first, unchecked."""
    if not root.is_dir():
        return []
    found: dict[int, Path] = {}
    # `.trimtab-old-step-N` is all there is of step N while a writer is between the two renames of a replacement.
    for item in sorted(root.iterdir(), key=lambda item: not item.name.startswith(atomic.REPLACED)):
        if item.is_dir() and _NAME.fullmatch(item.name):
            found[checkpoint_step(item)] = item
    return [found[step] for step in sorted(found)]


def checkpoint_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` lives."""
    return root / f"step-{step:06d}"


def best_checkpoint(root: Path) -> BestCheckpoint | None:
    """The best checkpoint marked so far. `TrimtabError` when the mark cannot be read."""
    path = root / BEST
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
        return BestCheckpoint(int(data["step"]), str(data["metric"]), float(data["value"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise TrimtabError(f"{path} is damaged: delete it, the next evaluation marks a best checkpoint again") from None


def move_aside_after(root: Path, step: int) -> list[Path]:
    """Take checkpoints newer than `step` out of the way of a run that goes on from there (they are damaged).

    They stay on the disk as `step-000020.aside`, for inspection; otherwise `prune` would count them as the newest.
    """
    moved = []
    for folder in list_checkpoints(root):
        if checkpoint_step(folder) > step:
            target = folder.with_name(f"{folder.name}.aside")
            if target.exists():
                atomic.remove_folder(target)
            moved.append(folder.rename(target))
    marked = best_checkpoint(root)
    if marked and marked.step > step:
        (root / BEST).unlink()
    return moved


def checkpoint_step(folder: Path) -> int:
    """The step in a checkpoint's name. `TrimtabError` for any other name."""
    match = _NAME.fullmatch(folder.name)
    if not match:
        raise TrimtabError(f"{folder} is not a checkpoint: its name is not like step-000010")
    return int(match[1])
