"""Optional copies of metrics.jsonl: TensorBoard, Weights & Biases, MLflow and Trackio.

The runs of all but TensorBoard have the name of the run directory; a resumed run continues their curves.
"""

from __future__ import annotations

import contextlib
import secrets
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.errors import TrimtabError
from trimtab.extras import require_extra
from trimtab.runs import atomic
from trimtab.trainer.config import LogConfig


class Sink(NamedTuple):
    """Receives the metrics of every step. `close` is called once, also after a failure."""

    log: Callable[[int, Mapping[str, Any]], None]
    close: Callable[[], object]


def open_sinks(log: LogConfig, run_dir: Path, first_step: int = 0) -> list[Sink]:
    """Opens the sinks of `[log]`. Raises `TrimtabError` with the pip command if a package is missing."""
    openers: list[tuple[str | None, Callable[[str, Path], Sink]]] = [
        ("tensorboard" if log.tensorboard else None, lambda _, folder: _tensorboard(folder, first_step)),
        (log.wandb, _wandb),
        (log.mlflow, _mlflow),
        (log.trackio, _trackio),
    ]
    sinks: list[Sink] = []
    with contextlib.ExitStack() as opened:
        for project, open_one in openers:
            if project:
                sinks.append(open_one(project, run_dir))
                opened.callback(sinks[-1].close)
        opened.pop_all()
    return sinks


def _tensorboard(run_dir: Path, first_step: int) -> Sink:
    """Event files below `run_dir`; events of an interrupted run from `first_step` on are hidden."""
    require_extra("tensorboard", "log.tensorboard", "or turn it off")
    from torch.utils.tensorboard import SummaryWriter

    writer, written_texts = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step), dict[str, str]()

    def log(step: int, metrics: Mapping[str, Any]) -> None:
        """Numbers become curves (NaN included); a string is written when it changes."""
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
    """`wandb-id` in the run directory holds the id of the run."""
    require_extra("wandb", "log.wandb", "or remove log.wandb")
    import wandb  # pyright: ignore[reportMissingImports]

    id_file = run_dir / "wandb-id"
    if not id_file.exists():
        atomic.write_text(id_file, secrets.token_hex(4))
    name, run_id, folder = run_dir.name, id_file.read_text(), str(run_dir)
    try:
        run = wandb.init(project=project, name=name, id=run_id, resume="allow", dir=folder, config=_recipe(run_dir))
    except wandb.errors.Error as error:
        reason = str(error).splitlines()[0]
        raise TrimtabError(f"log.wandb: {reason}; run `wandb login`, or set WANDB_MODE=offline") from None
    return Sink(lambda step, metrics: run.log({k: v for k, v in metrics.items() if k != "step"}, step=step), run.finish)


def _mlflow(experiment: str, run_dir: Path) -> Sink:
    """`mlflow-id` in the run directory holds the id of the run."""
    require_extra("mlflow", "log.mlflow", "or remove log.mlflow")
    import mlflow  # pyright: ignore[reportMissingImports]

    id_file = run_dir / "mlflow-id"
    try:
        mlflow.set_experiment(experiment)
        if id_file.exists():
            mlflow.start_run(run_id=id_file.read_text())
        else:
            atomic.write_text(id_file, mlflow.start_run(run_name=run_dir.name).info.run_id)
            mlflow.log_artifact(str(run_dir / "config.toml"))
    except mlflow.exceptions.MlflowException as error:
        reason = str(error).splitlines()[0]
        raise TrimtabError(f"log.mlflow: {reason}; MLFLOW_TRACKING_URI says where runs are kept") from None
    return Sink(lambda step, metrics: mlflow.log_metrics(_numbers(metrics), step=step), mlflow.end_run)


def _trackio(project: str, run_dir: Path) -> Sink:
    require_extra("trackio", "log.trackio", "or remove log.trackio")
    import trackio  # pyright: ignore[reportMissingImports]

    run = trackio.init(project=project, name=run_dir.name, config=_recipe(run_dir), resume="allow", embed=False)
    return Sink(lambda step, metrics: run.log(_numbers(metrics), step=step), run.finish)


def _recipe(run_dir: Path) -> dict[str, Any]:
    return tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items() if isinstance(value, int | float) and key != "step"}
