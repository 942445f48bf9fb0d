"""Every rank of a test: `torchrun ... fsdp_worker.py JOBS.json` trains one job after the other on recorded rollouts.

A job: {"out": folder, "recording": folder, "sets": [overrides], "resume": bool, "fault": null | "average" | "twice"}.
Without a recording (null) the recipe's own engine samples.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trimtab.runs import trajectories
from trimtab.trainer import build_model, packing, run
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.engines.factory import build_engines
from trimtab.trainer.models import sharding
from trimtab.trainer.models.load import LoadedModel
from trimtab.trainer.ranks import join
from trimtab.types import Completion, Engine, Prompt, SamplingParams


class Recorded:
    """Answers training prompts with what another run sampled for them; everything else a real engine does.

    The last published weights are summed up in `published.json` of the run.
    """

    def __init__(self, engine: Engine, recording: Path, out: Path) -> None:
        self._engine = engine
        self._out = out
        self._answers: dict[bytes, list[Completion]] = {}
        for file in sorted((recording / "trajectories").glob("*.parquet")):
            for row in trajectories.read(file):
                self._answers.setdefault(row.trajectory.prompt.ids.tobytes(), []).append(row.trajectory.completion)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, as_is: bool = False) -> None:
        taken = {name: tensor.clone() for name, tensor in weights}
        sums = {name: float(tensor.double().square().sum()) for name, tensor in taken.items()}
        (self._out / "published.json").write_text(json.dumps(sums))
        self._engine.update_weights(taken.items(), version, as_is=as_is)

    def generate(
        self, prompts: Sequence[Prompt], samples: int, sampling: SamplingParams, **keywords: Any
    ) -> list[list[Completion]]:
        if sampling.temperature == 0:
            return self._engine.generate(prompts, samples, sampling, **keywords)
        return [self._answers[prompt.ids.tobytes()] for prompt in prompts]


def train(job: Mapping[str, Any]) -> None:
    """Start or continue the run of a job."""

    def engines(config: Config, loaded: LoadedModel, files: Path) -> list[Recorded]:
        recording, out = Path(job["recording"]), Path(job["out"])
        return [Recorded(engine, recording, out) for engine in build_engines(config, loaded, files)]

    torch.manual_seed(0)  # adapters begin with random numbers
    config = load_config("laboratory", job["sets"])
    run.train(config, out=job["out"], resume=job["resume"], engines=None if job["recording"] is None else engines)


def plant(fault: str | None) -> None:
    """Break the arithmetic of several ranks."""
    if fault == "average":
        apply_fsdp = sharding.apply_fsdp

        def averaged(model: Any, mesh: Any, **options: Any) -> None:
            apply_fsdp(model, mesh, **options)
            for module in model.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(float(mesh.size()))

        build_model.apply_fsdp = averaged
    elif fault == "twice":
        assign_micro_batches = packing.assign_micro_batches

        def greedy(sizes: Sequence[int], ranks: int) -> list[list[int | None]]:
            shares = assign_micro_batches(sizes, ranks)
            return [[0, *share[1:]] for share in shares]

        packing.assign_micro_batches = greedy


def main(jobs: Iterable[Mapping[str, Any]]) -> None:
    with join():
        for job in jobs:
            plant(job["fault"])
            train(job)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
