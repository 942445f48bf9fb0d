"""What ten real runs logged, for the tests of their verdicts: nine of the laboratory, and the quickstart.

`python -m tests.support.health_runs` trains them again, in some minutes, and writes `health_runs.json`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from trimtab.report import health
from trimtab.runs.metric_catalog import K3
from trimtab.runs.reader import Run, read_run
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.lab.regimes import regime
from trimtab.trainer.run import train

FILE = Path(__file__).with_suffix(".json")
FEW = ("eval.problems=16", "eval.every=0", "log.trajectories_every=0")
STALE = (*regime("stale-32").settings, "trainer.steps=64")  # both halves of quickstart-stale, shortened
RUNS: dict[str, tuple[str, ...]] = {
    **{name: (*regime(name).settings, "trainer.steps=20") for name in ("on-policy", "bf16", "int8")},
    **{f"stale-{name}": (*STALE, f"objective.name={name}") for name in ("token-tis", "dapo")},
    "lag-8": ("trainer.sync_every=9", "objective.name=token-tis", "trainer.steps=40"),
    "int3": (*regime("int3").settings, "objective.name=token-bypass", "trainer.steps=20"),
    "collapse": ("optim.lr=3e-3", "optim.warmup=20", "trainer.steps=24", "trainer.max_idle_steps=0"),
    "cut": ("sampling.max_tokens=4", "trainer.steps=6", "trainer.prompts=4"),
    "quickstart": ("trainer.steps=24", "eval.problems=64", "checkpoint.every=0"),
}


def _config(name: str) -> Config:
    return load_config(name if name == "quickstart" else "laboratory", [*FEW, *RUNS[name]])


def trained(name: str, out: Path) -> Path:
    """Trains a run anew and returns its folder."""
    return train(_config(name), out=out).run


def stored(name: str) -> Run:
    """The run as it was when the file was written: what a verdict reads, in four digits."""
    columns = _file()[name]
    rows = [{"step": step + 1} for step in range(len(columns["reward/mean"]))]
    for key, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row.update({} if value == "" else {key: value})
    return Run(Path(name), _config(name).model_dump(exclude_none=True), rows)


@cache
def _file() -> dict[str, dict[str, list[Any]]]:
    return json.loads(FILE.read_text())


def columns(run: Run) -> dict[str, list[Any]]:
    """The metrics that a verdict reads, by key; empty text where a step has none."""
    source = Path(health.__file__).read_text()
    read = {key for key in run.keys if f'"{key}"' in source or key == K3 or key.startswith("eval/")}
    return {key: [_rounded(row[key]) if key in row else "" for row in run.rows] for key in sorted(read)}


def _rounded(value: float | None) -> float | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(tempfile.mkdtemp())
    found = {}
    for name in RUNS:
        out = folder / name
        found[name] = columns(read_run(out if out.exists() else trained(name, out)))
    FILE.write_text(
        "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items()) + "\n}\n"
    )


if __name__ == "__main__":
    main()
