"""Real vLLM in a process of its own (`engine.workers = 1`): one more engine behind the same connection."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.support.engines import After, processed, tokenizer
from tests.support.processes import gone
from tests.support.vllm_support import needs_vllm, policy, prompts, vllm_recipe

from trimtab.errors import EngineDeadError
from trimtab.trainer.build_model import save_model_files
from trimtab.trainer.engines.remote import process_transport
from trimtab.trainer.engines.remote.process_transport import ProcessTransport
from trimtab.trainer.engines.remote.remote_engine import RemoteEngine
from trimtab.types import Completion, SamplingParams

pytestmark = [pytest.mark.slow, needs_vllm]

# Long enough that an interruption, which crosses two processes, always comes before the end.
LENGTH = 200
ASKED, LONG = prompts([5, 40]), SamplingParams(max_tokens=LENGTH, ignore_stop=True)
FORCED = SamplingParams(max_tokens=12, ignore_stop=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "model"
    save_model_files(policy(), tokenizer(), folder)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RemoteEngine]:
    started = RemoteEngine(ProcessTransport(vllm_recipe("float32"), model, threads=1))
    started.update_weights(policy().named_parameters(), 0)
    yield started
    family = psutil.Process(started.transport.pid).children(recursive=True)
    started.close()
    assert all(gone(process.pid) for process in family)


def check_exact(
    model: Any, groups: list[list[Completion]], version: int, begun: list[list[Completion]] | None = None
) -> None:
    """Log-probs after the prefixes are those of `model`, which is `version`."""
    for asked, group, before in zip(ASKED, groups, begun or [[]] * len(ASKED), strict=True):
        for index, one in enumerate(group):
            k, n = len(before[index].response_ids) if before else 0, len(one.response_ids)
            exact = processed(model, asked, one, LONG)[torch.arange(n), torch.from_numpy(one.response_ids)]
            np.testing.assert_allclose(one.logp_behavior[k:], exact[k:].numpy(), atol=1e-4)
            assert one.policy_version[k:].tolist() == [version] * (n - k)


def family_of(engine: RemoteEngine) -> list[psutil.Process]:
    """The engine's process and everything it started, which is in one process group, and not in this one.

    So Ctrl-C in a terminal does not reach it, and one signal ends all of it.
    """
    process = psutil.Process(engine.transport.pid)
    family = [process, *process.children(recursive=True)]
    assert {os.getpgid(one.pid) for one in family} == {process.pid} != {os.getpgid(0)}
    return family


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_is_lost_and_comes_back(engine: RemoteEngine, number: signal.Signals) -> None:
    """SIGTERM is what a cluster sends to every process of a job."""
    engine.update_weights(policy().named_parameters(), 4)
    family = family_of(engine)
    kill = After(2, then=lambda: os.kill(engine.transport.pid, number))
    with pytest.raises(EngineDeadError, match=r"was killed .*during generate"):
        engine.generate(ASKED, 3, LONG, seed=0, abort=kill)
    assert all(gone(process.pid) for process in family)  # with the memory they held
    engine.restart()
    engine.update_weights(policy(seed=2).named_parameters(), 5)
    check_exact(policy(seed=2), engine.generate(ASKED, 3, FORCED, seed=0), 5)
    engine.restart()  # alive: nothing to do, and nothing is forgotten
    check_exact(policy(seed=2), engine.generate(ASKED, 3, FORCED, seed=0), 5)


ORPHAN = """
import sys
from pathlib import Path
from tests.support.vllm_support import policy, vllm_recipe
from trimtab.trainer.engines.remote.process_transport import ProcessTransport
from trimtab.trainer.engines.remote.remote_engine import RemoteEngine

if __name__ == "__main__":
    engine = RemoteEngine(ProcessTransport(vllm_recipe("float32"), Path(sys.argv[1]), threads=1))
    engine.update_weights(policy().named_parameters(), 0)
    print(engine.transport.pid, flush=True)
    sys.stdin.read()
"""


def test_it_ends_with_its_parent(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(ORPHAN)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(script), str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        family = [child, *child.children(recursive=True)]
        parent.kill()
    assert all(gone(process.pid) for process in family)


def test_a_process_of_vllm_itself_that_dies_is_an_engine_that_died(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensor parallelism vLLM starts processes itself: the engine's process can start them and outlives them."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(process_transport, "WORKER", "tests.programs.vllm_split_worker")
    engine = RemoteEngine(ProcessTransport(vllm_recipe("float32"), model, threads=1))
    engine.update_weights(policy().named_parameters(), 1)
    check_exact(policy(), engine.generate(ASKED, 3, FORCED, seed=0), 1)
    host, *own = family_of(engine)
    [worker] = [process for process in own if "Worker" in process.name()]
    worker.kill()
    with pytest.raises(EngineDeadError, match="one of vLLM's processes died"):
        engine.generate(ASKED, 3, LONG, seed=0)
    assert all(gone(process.pid) for process in (host, *own))  # as after a kill: the engine can be started again
    engine.close()
