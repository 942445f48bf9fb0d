"""Observers of a run's progress, and sinks that copy its metrics to TensorBoard or Weights & Biases.

Training does not import any display.
"""

from __future__ import annotations

import contextlib
import secrets
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from trimtab.errors import TrimtabError, first_line
from trimtab.plugins import require_extra
from trimtab.runs import atomic
from trimtab.runs.layout import CONFIG, TENSORBOARD, WANDB_ID
from trimtab.trainer.config import Config, LogConfig

Moment = Literal["before", "after"] | int


class Observer(Protocol):
    """Receives the progress of a run. All calls come from one thread, in order; none may change the run."""

    def started(self, config: Config, equation: str, total_steps: int, run: Path) -> None:
        """Called once before the first step, with the resolved recipe, its equation and the run directory."""

    def phase(self, name: str, done: int, total: int) -> None:
        """Called as ("collect", finished steps, all steps of the run) and ("update", done, all updates of the step)."""

    def step(self, metrics: Mapping[str, float | str]) -> None:
        """Called after each step with the object that was written to metrics.jsonl."""

    def evaluated(self, task: str, moment: Moment, value: float) -> None:
        """Called with the greedy accuracy in [0, 1] on held-out problems, before or after training or after a step."""

    def message(self, text: str) -> None:
        """Called with one line of text for the user."""

    def finished(self, summary: Mapping[str, float | str], report: Path | None) -> None:
        """Called once, at the end. Displays show `eval/<task>/before`, `/after` and `/problems` in one line."""


class NullObserver(Observer):
    """An observer that does nothing."""


class Sink(NamedTuple):
    """Receives the metrics of every step. `close` is called once, also after a failure."""

    log: Callable[[int, Mapping[str, Any]], None]
    close: Callable[[], object]


def open_sinks(log: LogConfig, run_dir: Path, first_step: int = 0) -> list[Sink]:
    """Opens the sinks of `[log]`. Raises `TrimtabError` with the pip command if a package is missing."""
    sinks: list[Sink] = []
    with contextlib.ExitStack() as opened:
        if log.tensorboard:
            sinks.append(_tensorboard(run_dir, first_step))
            opened.callback(sinks[0].close)
        if log.wandb:
            sinks.append(_wandb(log.wandb, run_dir))
        opened.pop_all()
    return sinks


def _tensorboard(run_dir: Path, first_step: int) -> Sink:
    """Returns a sink of event files below `run_dir`. Events of an interrupted run from `first_step` on are hidden."""
    require_extra("tensorboard", "log.tensorboard", "or turn it off")
    from torch.utils.tensorboard import SummaryWriter

    writer, written_texts = SummaryWriter(str(run_dir / TENSORBOARD), purge_step=first_step), dict[str, str]()

    def log(step: int, metrics: Mapping[str, Any]) -> None:
        """Writes numbers (also NaN) as curves, and a string when it changes."""
        for key, value in metrics.items():
            if isinstance(value, str):
                if written_texts.get(key) != value:
                    writer.add_text(key, value, step)
                    written_texts[key] = value
            elif value is not None and key != "step":
                writer.add_scalar(key, float(value), step)
        writer.flush()

    return Sink(log, writer.close)


def _wandb(project: str, run_dir: Path) -> Sink:
    """Returns a sink for a W&B run named like `run_dir`. A resumed run finds its id in the file `wandb-id`."""
    require_extra("wandb", "log.wandb", "or remove log.wandb")
    import wandb  # pyright: ignore[reportMissingImports]

    id_file = run_dir / WANDB_ID
    if not id_file.exists():
        atomic.write_text(id_file, secrets.token_hex(4))
    name, run_id, folder = run_dir.name, id_file.read_text(encoding="utf-8"), str(run_dir)
    recipe = tomllib.loads((run_dir / CONFIG).read_text(encoding="utf-8"))
    try:
        run = wandb.init(project=project, name=name, id=run_id, resume="allow", dir=folder, config=recipe)
    except wandb.errors.Error as error:
        raise TrimtabError(f"log.wandb: {first_line(error)}; run `wandb login`, or set WANDB_MODE=offline") from None
    return Sink(lambda step, metrics: run.log({k: v for k, v in metrics.items() if k != "step"}, step=step), run.finish)
