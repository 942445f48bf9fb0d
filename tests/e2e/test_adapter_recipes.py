"""The recipes for AReaL and OpenRLHF bring the loss into the process that trains.

Neither can be installed without CUDA. Stand-ins have their modules and what happens in each process: AReaL names a
class by its path to a worker, OpenRLHF makes its loss in a Ray actor. Ray, and what the pages show, are real.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import forked
from tests.support.ray_support import QUIET

ROOT = Path(__file__).parents[2]
PEERS = os.environ.get("TRIMTAB_PEERS")

ENVIRON = """
import os
def is_single_controller():
    return os.getenv("AREAL_SPMD_MODE", "false") != "1"
"""
AREAL = {
    "areal/trainer/ppo/actor.py": "def grpo_loss_fn(): pass\n",
    "areal/engine/__init__.py": """
class FSDPPPOActor:
    def __init__(self, config):
        from areal.trainer.ppo import actor
        self.loss = actor.grpo_loss_fn
""",
}
AREAL_TRAINER = """
import areal.engine
from areal.trainer.ppo import actor
kind = areal.engine.FSDPPPOActor
print(kind.__module__ + "." + kind.__name__, actor.grpo_loss_fn.__module__)
"""
AREAL_WORKER = """
import importlib, sys
module, name = sys.argv[1].rsplit(".", 1)
print(getattr(importlib.import_module(module), name)(None).loss.__module__)
"""

OPENRLHF = {
    "openrlhf/models/loss.py": "class PolicyLoss:\n    def __init__(self, **_): pass\n",
    "openrlhf/models/__init__.py": "from .loss import PolicyLoss\n",
    "openrlhf/trainer/ray/ppo_actor.py": """
import ray
from openrlhf.models import PolicyLoss

class ActorPPOTrainer:
    def __init__(self):
        self.loss = PolicyLoss(clip_eps_low=0.2)

@ray.remote(num_gpus=1)
class PolicyModelActor:
    def init_model_from_pretrained(self, strategy):
        self.trainer = ActorPPOTrainer()
        return type(self.trainer.loss).__module__, strategy
""",
    "openrlhf/cli/train_ppo_ray.py": """
import sys
import ray
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor

if __name__ == "__main__":
    if not ray.is_initialized():
        ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": {"NCCL_DEBUG": "WARN"}})
    actor = PolicyModelActor.options(num_cpus=1, num_gpus=0).remote()
    print("actor:", *ray.get(actor.init_model_from_pretrained.remote(sys.argv[1])))
""",
}


def blocks(trainer: str) -> list[str]:
    page = (ROOT / "docs" / "reference-adapters.md").read_text(encoding="utf-8")
    text = page.partition(f"\n## {trainer}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture(scope="module")
def python() -> Iterator[forked.Run]:
    """Runs programs in processes that have imported torch and are no rank."""
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    with forked.starter("trimtab.adapters.hooks", environment=environment | QUIET) as run:
        yield run


def run(python: forked.Run, folder: Path, *words: str, **variables: str) -> str:
    path = os.pathsep.join([str(folder), str(ROOT / "src")])
    variables = {"PYTHONPATH": path, "HOME": str(folder)} | variables  # Ray writes a token there
    done = python(*words, cwd=folder, timeout=120, **variables)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_areal_s_worker_trains_with_the_loss(python: forked.Run, tmp_path: Path) -> None:
    if PEERS is not None:  # Its own condition, of which the stand-in is a shorter form.
        source = (Path(PEERS) / "areal" / "areal" / "utils" / "environ.py").read_text()
        environ = source.replace("from areal.utils import logging", "import logging")
    else:
        environ = ENVIRON
    actor, trainer = blocks("AReaL")
    files = {"trimtab_actor.py": actor, "trainer.py": trainer + AREAL_TRAINER, "worker.py": AREAL_WORKER}
    write(tmp_path, AREAL | files | {"areal/utils/environ.py": environ})
    named, loss = run(python, tmp_path, "trainer.py").split()
    assert (named, loss) == ("trimtab_actor.Actor", "areal.trainer.ppo.actor")
    assert run(python, tmp_path, "worker.py", named, WORLD_SIZE="1").strip() == "trimtab.adapters.areal"
    assert run(python, tmp_path, "worker.py", named, AREAL_SPMD_MODE="1").strip() == "trimtab.adapters.areal"
    with pytest.raises(AssertionError, match="this process only starts those that train"):
        run(python, tmp_path, "worker.py", named)


@pytest.mark.slow
def test_openrlhf_s_actor_trains_with_the_loss(python: forked.Run, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: the extra `ray`")
    (script,) = blocks("OpenRLHF")
    write(tmp_path, OPENRLHF | {"train_trimtab.py": script})
    assert "actor: trimtab.adapters.openrlhf option" in run(python, tmp_path, "train_trimtab.py", "option")
