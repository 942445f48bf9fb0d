"""File names inside a run directory, and its lists of checkpoints and trajectory files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from trimtab.errors import TrimtabError
from trimtab.files import parse_json, regular_file
from trimtab.runs import atomic

CONFIG, METRICS, MODEL, LOCK, PROVENANCE = "config.toml", "metrics.jsonl", "model", ".lock", "provenance.json"
CHECKPOINTS, TRAJECTORIES, REPORT = "checkpoints", "trajectories", "report.html"
BEST, RESULT = "best.json", "result.json"  # of the best checkpoint; of a run of an experiment
TENSORBOARD, WANDB_ID = "tensorboard", "wandb-id"  # a folder; a file with the id of the run at W&B
TRACEBACK = "error.txt"  # of a run of an experiment
_NAME = re.compile(rf"(?:{re.escape(atomic.REPLACED)})?step-(\d{{6,}})")
_TRAJECTORY_FILE = re.compile(r"step-(\d+)\.parquet")


@dataclass(frozen=True)
class BestCheckpoint:
    """The best checkpoint so far, with the metric that selected it; higher is better."""

    step: int
    metric: str
    value: float


def run_of(file: Path) -> Path | None:
    """Returns the run directory that a file belongs to, or None."""
    folder = Path(os.path.realpath(file)).parent
    places = (folder, folder.parent) if folder.name == TRAJECTORIES else (folder,)
    return next((place for place in places if (place / CONFIG).is_file()), None)


def list_checkpoints(root: Path) -> list[Path]:
    """Returns the folders of all checkpoints under `root`, oldest first, without validation."""
    found = [item for item in (root.iterdir() if root.is_dir() else ()) if item.is_dir() and _NAME.fullmatch(item.name)]
    # Between the two renames of a replacement only `.trimtab-old-step-N` exists for step N.
    found.sort(key=lambda item: not item.name.startswith(atomic.REPLACED))
    by_step = {checkpoint_step(item): item for item in found}
    return [by_step[step] for step in sorted(by_step)]


def trajectory_files(folder: Path) -> dict[int, Path]:
    """Returns the trajectory files in a folder by step; empty if there is none."""
    matches = [(_TRAJECTORY_FILE.fullmatch(item.name), item) for item in (folder.iterdir() if folder.is_dir() else ())]
    return dict(sorted((int(match[1]), item) for match, item in matches if match))


def checkpoint_folder(root: Path, step: int) -> Path:
    """Returns the folder of the checkpoint of `step`."""
    return root / f"step-{step:06d}"


def best_checkpoint(root: Path) -> BestCheckpoint | None:
    """Returns the best checkpoint so far, or None. Raises `TrimtabError` if best.json cannot be read."""
    path = root / BEST
    if not path.exists():
        return None
    try:
        data = parse_json(regular_file(path).read_text(encoding="utf-8"))
        return BestCheckpoint(int(data["step"]), str(data["metric"]), float(data["value"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        raise TrimtabError(f"{path} is damaged: delete it, the next evaluation marks a best checkpoint again") from None


def move_aside_after(root: Path, step: int) -> None:
    """Renames the checkpoints after `step`, from which a run continues.

    They are damaged, and remain as `step-000020.aside` for inspection. Under their old names, `delete_old` would count
    them as the newest.
    """
    for folder in list_checkpoints(root):
        if checkpoint_step(folder) > step:
            target = folder.with_name(f"{folder.name}.aside")
            if target.exists():
                atomic.remove_folder(target)
            folder.rename(target)
    best = best_checkpoint(root)
    if best and best.step > step:
        (root / BEST).unlink()


def checkpoint_step(folder: Path) -> int:
    """Returns the step in a checkpoint's name. Raises `TrimtabError` for any other name."""
    match = _NAME.fullmatch(folder.name)
    if not match:
        raise TrimtabError(f"{folder} is not a checkpoint: its name is not like step-000010")
    return int(match[1])
