"""Optional copies of metrics.jsonl: TensorBoard, Weights & Biases, MLflow and Trackio."""

from __future__ import annotations

import contextlib
import secrets
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from trimtab.errors import TrimtabError, require_extra
from trimtab.runs import atomic
from trimtab.trainer.config import LogConfig


class Sink(Protocol):
    """Receives the metrics of every step. `close` is called once, also after a failure."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files in `folder`; events of an interrupted run from `first_step` on are hidden."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        require_extra("tensorboard", "log.tensorboard", "or turn it off")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)
        self._written_texts: dict[str, str] = {}

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Numbers become curves (NaN included); a string is written when it changes."""
        for key, value in metrics.items():
            if isinstance(value, str):
                if self._written_texts.get(key) != value:
                    self._writer.add_text(key, value, step)
                    self._written_texts[key] = value
            elif value is not None and key != "step":
                self._writer.add_scalar(key, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A W&B run named after the run directory, which holds its id: a resumed run continues its curves."""

    def __init__(self, project: str, run_dir: Path) -> None:
        require_extra("wandb", "log.wandb", "or remove log.wandb")
        import wandb  # pyright: ignore[reportMissingImports]

        id_file = run_dir / "wandb-id"
        if not id_file.exists():
            atomic.write_text(id_file, secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=project,
                name=run_dir.name,
                id=id_file.read_text(),
                resume="allow",
                dir=str(run_dir),
                config=tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8")),
            )
        except wandb.errors.Error as error:
            reason = str(error).splitlines()[0]
            raise TrimtabError(f"log.wandb: {reason}; run `wandb login`, or set WANDB_MODE=offline") from None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({key: value for key, value in metrics.items() if key != "step"}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """An MLflow run named after the run directory, which holds its id: a resumed run continues its curves."""

    def __init__(self, experiment: str, run_dir: Path) -> None:
        require_extra("mlflow", "log.mlflow", "or remove log.mlflow")
        import mlflow  # pyright: ignore[reportMissingImports]

        id_file = run_dir / "mlflow-id"
        self._mlflow = mlflow
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

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._mlflow.log_metrics(_numbers(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class TrackioSink:
    """A Trackio run named after the run directory; a resumed run continues its curves."""

    def __init__(self, project: str, run_dir: Path) -> None:
        require_extra("trackio", "log.trackio", "or remove log.trackio")
        import trackio  # pyright: ignore[reportMissingImports]

        config = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
        self._run = trackio.init(project=project, name=run_dir.name, config=config, resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(_numbers(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items() if isinstance(value, int | float) and key != "step"}


def open_sinks(log: LogConfig, run_dir: Path, first_step: int = 0) -> list[Sink]:
    """Opens the sinks of `[log]`. Raises `TrimtabError` with the pip command if a package is missing."""
    with contextlib.ExitStack() as opened:
        sinks: list[Sink] = []
        if log.tensorboard:
            sinks.append(TensorBoardSink(run_dir / "tensorboard", first_step))
            opened.callback(sinks[-1].close)
        if log.wandb:
            sinks.append(WandbSink(log.wandb, run_dir))
            opened.callback(sinks[-1].close)
        if log.mlflow:
            sinks.append(MlflowSink(log.mlflow, run_dir))
            opened.callback(sinks[-1].close)
        if log.trackio:
            sinks.append(TrackioSink(log.trackio, run_dir))
        opened.pop_all()
    return sinks
