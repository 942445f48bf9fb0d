"""Three ranks write checkpoints together: whole or absent, damage and full disks included."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from tests.programs.shards_worker import DAMAGES, whole
from tests.support import forked

from trimtab.trainer.checkpoint import state_tensors, store

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)
def test_three_ranks_write_one_checkpoint(python: forked.Run, tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    done = python(
        Path(__file__).parents[1] / "programs" / "shards_worker.py", tmp_path / "checkpoints", results, ranks=3
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reports = [json.loads(file.read_text()) for file in results.iterdir()]
    assert len(reports) == 3
    assert all(one["leader's"] == [True, False] for one in reports)
    # One rank could not write: all know, and nothing is left of the attempt.
    assert all("step-000003" in one["failed"] for one in reports)
    assert sum(one["failed"].startswith("rank 1: ") for one in reports) == 2
    # Whatever of the newest is damaged: all ranks go on from the one before.
    assert all((one["step"], one["meta"]) == (1, {"serial": 1}) for one in reports)
    for damage, one in itertools.product(DAMAGES, reports):
        (note,) = one["notes"][damage]
        assert "step-000002" in note, damage
        assert note.endswith("using step-000001 instead"), damage

    loaded = store.load(tmp_path / "checkpoints" / "step-000001")
    model = loaded.tensors["model"]
    assert set(model) == {*whole(1), "step", "shared"}
    for name, tensor in whole(1).items():
        assert torch.equal(model[name], tensor), name
    assert (float(model["step"]), model["shared"].tolist()) == (1.0, [1, 2, 3])
    assert loaded.tensors["random"]["shared"].tolist() == [1, 2, 3]
    assert loaded.files == {"note": b"1"}

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, tensor in model.items():
                self.register_buffer(name, torch.zeros_like(tensor))

    plain = Plain()
    state_tensors.load_model_state(plain, model)
    assert torch.equal(plain.get_buffer("seven"), whole(1)["seven"])
