"""Runs on a device, in a process of its own: `device_worker.py DEVICE OUT CASE OVERRIDE...` prints JSON.

DEVICE is `pretended`, or `cuda` for the first GPU.

CASE is a recipe, which is trained on the device and on the CPU; `continued`: a run on the device, the same resumed
from its first checkpoint, and the exported model evaluated on both devices; or `everything`: under `run` the laboratory
trained on both; `presets`: loss and gradient of every preset; `outside`: whether log-probs are NaN, of three tokens of
which the second is outside its sampling mask; and `refusals`: the messages of two operations that no GPU does.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.contract.conftest import NAMES, Batch, Laboratory
from tests.support.device_events import LOG, Event
from tests.support.run_results import untimed, weights

from trimtab.runs.layout import list_checkpoints
from trimtab.trainer import build_model, run
from trimtab.trainer.config import load_config
from trimtab.trainer.evaluation import Settings, compare
from trimtab.trainer.export import export
from trimtab.trainer.models import laboratory, load
from trimtab.trainer.models.logprobs import TokenBatch, pack_kept, score

if sys.argv[1] == "cuda":
    from tests.support.cuda_device import DEVICE
else:
    from tests.support.pretended_device import DEVICE

SECTIONS = ("model", "optimizer")
UPDATE, STEP = "trainer/learner.py:_one_update", "trainer/learner.py:_step_if_finite"


def phase(event: Event) -> str:
    """The part of a training step that waited for the device."""
    if STEP in event.functions:
        return "update"
    if UPDATE in event.functions or "trainer/learner.py:logp" in event.functions:
        return "micro-batch"
    if event.functions and event.functions[0].split(":")[1] == "to_lists":
        return "token"
    if any(name.endswith(":generate") for name in event.functions):
        return "generation"
    return "checkpoint" if any("checkpoint/" in name for name in event.functions) else "step"


def trained(recipe: str, out: Path, overrides: list[str]) -> dict[str, Any]:
    config = load_config(recipe, overrides)
    build_model.default_device = lambda: torch.device("cpu")
    run.train(config, out=out / "cpu")
    build_model.default_device = lambda: DEVICE
    LOG.events.clear()
    run.train(config, out=out / "device")
    rows = {name: untimed(out / name) for name in ("cpu", "device")}
    here, there = weights(out / "cpu"), weights(out / "device")
    return {
        "rows": rows,
        "weights": largest((here[name] - there[name]).abs().max() for name in here),
        "counts": Counter(phase(event) for event in LOG.events),
        "micro": Counter(" < ".join(event.functions[:3]) for event in LOG.events if phase(event) == "micro-batch"),
    }


def largest(values: Iterable[torch.Tensor]) -> float:
    """The largest value; NaN if one is NaN, which Python's `max` may leave out."""
    return float(torch.stack(list(values)).max())


def continued(out: Path, overrides: list[str]) -> dict[str, Any]:
    """Whether the resumed run is the same, and accuracies of its exported model on the CPU and on the device."""
    load.default_device = build_model.default_device = lambda: DEVICE
    config = load_config("laboratory", overrides)
    run.train(config, out=out / "whole")
    shutil.copytree(out / "whole", out / "resumed")
    shutil.rmtree(list_checkpoints(out / "resumed" / "checkpoints")[-1])
    resumed = run.train(config, out=out / "resumed", resume=True).run
    tensors = {section: (weights(out / "whole", section), weights(resumed, section)) for section in SECTIONS}
    model = str(export(resumed, out / "exported"))
    results = []
    for device in (DEVICE, torch.device("cpu")):
        load.default_device = lambda device=device: device
        settings = Settings(problems=32, dtype="float32")
        results += compare([model], [config.task.name], settings).measured.values()
    return {
        "rows": [untimed(out / "whole"), untimed(resumed)],
        "equal": {name: all(torch.equal(a[key], b[key]) for key in a) for name, (a, b) in tensors.items()},
        "accuracy": [result.accuracy for result in results],
    }


def presets() -> dict[str, Any]:
    """The largest difference of loss and gradients between the devices, and the waits of one call."""
    results = {}
    for name in NAMES:
        objective, batch = Laboratory.objective(name), Batch.random(0)
        here = Laboratory.run(objective, batch)
        moved = batch.map(lambda tensor: tensor.to(DEVICE))
        LOG.events.clear()
        there = Laboratory.run(objective, moved)
        waits = Counter(" < ".join((event.kind, *event.functions[:2])) for event in LOG.events)
        pairs = [(here.loss, there.loss), (here.grad, there.grad), (here.entropy_grad, there.entropy_grad)]
        difference = largest((a - b.cpu()).abs().max() for a, b in pairs)
        results[name] = {"difference": difference, "waits": waits}
    return results


def refusals() -> list[str]:
    here, there = torch.ones(3), torch.ones(3, device=DEVICE)
    messages = []
    for refused in (lambda: here + there, there.numpy):
        try:
            refused()
        except (RuntimeError, TypeError) as error:
            messages.append(str(error))
    return messages


def outside() -> list[list[bool]]:
    model, _ = laboratory.build(0)
    ids = [3, 4, 5]
    batch = TokenBatch.pack([np.array([1, 2])], [np.array(ids)], [0], pad_id=0).to(DEVICE)
    kept = pack_kept([[np.array([3, 7]), np.array([6, 7]), np.array([5])]], 3).to(DEVICE)
    with torch.no_grad():
        return score(model.to(DEVICE), batch, kept=kept).logp.isnan().tolist()


def main() -> None:
    _, out, case, *overrides = sys.argv[1:]
    torch.set_num_threads(1)
    if case == "everything":
        result = {"run": trained("laboratory", Path(out), overrides)}
        result |= {"presets": presets(), "outside": outside(), "refusals": refusals()}
    elif case == "continued":
        result = continued(Path(out), overrides)
    else:
        result = trained(case, Path(out), overrides)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
