"""Real vLLM in a process of its own (AsyncLLM): the same tokens, interruption, death and return."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.support.engines import After, interrupted, processed
from tests.support.processes import gone
from tests.support.vllm_support import needs_vllm, policy, prompts, start, update

from trimtab.errors import EngineDeadError
from trimtab.types import Completion, Sampling

pytestmark = [pytest.mark.slow, needs_vllm]

FORCED = Sampling(max_tokens=12, ignore_stop=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    started = start(tmp_path_factory.mktemp("engine"), "float32", "own")
    started.publish(policy().named_parameters(), 0)
    yield started
    family = children()
    started.close()
    assert all(gone(process.pid) for process in family)


def children(of: int | None = None) -> list[psutil.Process]:
    return [process for process in psutil.Process(of).children(recursive=True) if "EngineCore" in process.name()]


def check_exact(model: Any, engine: Any, groups: list[list[Completion]], begun: int = 0) -> None:
    for prompt, group in zip(prompts([5, 40]), groups, strict=True):
        for completion in group:
            n = len(completion.response_ids)
            exact = processed(model, prompt, completion, FORCED)[
                torch.arange(n), torch.from_numpy(completion.response_ids)
            ]
            np.testing.assert_allclose(completion.logp_behavior[begun:], exact[begun:].numpy(), atol=1e-4)
            assert completion.policy_version[begun:].tolist() == [engine.policy_version] * (n - begun)


def test_it_samples_publishes_and_is_interrupted(engine: Any) -> None:
    asked, model = prompts([5, 40]), policy()
    whole = engine.generate(asked, 3, FORCED, seed=0)
    check_exact(model, engine, whole)
    update(model, 0.3, seed=0)
    engine.publish(model.named_parameters(), 1)
    check_exact(model, engine, engine.generate(asked, 3, FORCED, seed=0))
    long = Sampling(max_tokens=200, ignore_stop=True)
    parts = interrupted(lambda stop: engine.generate(asked, 3, long, seed=0, interrupt=stop))
    assert {part.finish for group in parts for part in group} == {"abort"}
    check_exact(model, engine, parts)
    engine.publish(policy().named_parameters(), 2)  # needs an empty engine
    done = engine.generate(asked, 3, Sampling(max_tokens=210, ignore_stop=True), seed=0, prefixes=parts)
    for before, after in zip((p for g in parts for p in g), (p for g in done for p in g), strict=True):
        n = len(before.response_ids)
        assert after.policy_version.tolist() == [1] * n + [2] * (210 - n)
        assert after.response_ids[:n].tolist() == before.response_ids.tolist()
    held = dict(engine.weights())
    assert all(torch.equal(held[name], tensor) for name, tensor in policy().named_parameters())


def test_a_killed_process_is_lost_and_comes_back(engine: Any) -> None:
    class Kill(After):
        def is_set(self) -> bool:
            if super().is_set():
                for process in children():
                    with suppress(psutil.NoSuchProcess):  # reaped since
                        process.kill()
            return False

    long = Sampling(max_tokens=200, ignore_stop=True)
    with pytest.raises(EngineDeadError, match="died"):
        engine.generate(prompts([5, 40]), 3, long, seed=0, interrupt=Kill(2))
    engine.recover()
    model = policy(seed=2)
    engine.publish(model.named_parameters(), 5)
    check_exact(model, engine, engine.generate(prompts([5, 40]), 3, FORCED, seed=0))
    engine.recover()  # alive: nothing to do, and nothing is forgotten
    check_exact(model, engine, engine.generate(prompts([5, 40]), 3, FORCED, seed=0))


ORPHAN = """
import os, psutil
from pathlib import Path
from tests.support.vllm_support import start
if __name__ == "__main__":
    engine = start(Path({folder!r}), "float32", "own")
    print([p.pid for p in psutil.Process().children(recursive=True) if "EngineCore" in p.name()][0], flush=True)
    os.read(0, 1)
"""


def test_a_process_that_was_asked_to_end_is_lost_and_comes_back(engine: Any) -> None:
    """SIGTERM, as a cluster sends it to every process of a job: vLLM exits with 0 and answers nothing any more."""
    [core] = children()
    core.send_signal(signal.SIGTERM)

    def generate_for_a_minute() -> None:  # vLLM may answer whole calls before it has ended
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            engine.generate(prompts([5, 40]), 3, Sampling(max_tokens=200, ignore_stop=True), seed=0)

    with pytest.raises(EngineDeadError, match="died"):
        generate_for_a_minute()
    engine.recover()
    model = policy(seed=2)
    engine.publish(model.named_parameters(), 6)
    check_exact(model, engine, engine.generate(prompts([5, 40]), 3, FORCED, seed=0))


SIGNALLED = """
import os, signal, sys
from pathlib import Path
from tests.support.vllm_support import policy, prompts, start
from trimtab.types import Sampling
if __name__ == "__main__":
    engine = start(Path({folder!r}), "float32", "own")
    engine.publish(policy().named_parameters(), 0)
    signal.signal(signal.SIGINT, lambda *_: print("asked to stop", flush=True))
    print("ready", flush=True)
    while sys.stdin.readline().strip():
        [[answer]] = engine.generate(prompts([5]), 1, Sampling(max_tokens=12, ignore_stop=True), seed=0)
        print("tokens", len(answer.response_ids), flush=True)
    engine.close()
"""


def test_ctrl_c_in_a_terminal_leaves_it_alive_for_the_step_in_progress(tmp_path: Any) -> None:
    """A terminal sends SIGINT to every process of the foreground group."""
    script = tmp_path / "parent.py"
    script.write_text(SIGNALLED.format(folder=str(tmp_path)))
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])},
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        for number, word in enumerate(("ready", "asked to stop", "tokens 12")):
            assert any(line.strip() == word for line in parent.stdout), word
            if number == 0:
                assert os.getpgid(children(parent.pid)[0].pid) == parent.pid
                os.killpg(parent.pid, signal.SIGINT)
            if number == 1:
                parent.stdin.write("generate\n")
                parent.stdin.flush()
        parent.stdin.close()
        assert parent.wait(timeout=60) == 0


def test_it_dies_with_its_parent(tmp_path: Any) -> None:
    script = tmp_path / "parent.py"
    script.write_text(ORPHAN.format(folder=str(tmp_path)))
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        line = next(line for line in parent.stdout if line.strip().isdigit())
        core = psutil.Process(int(line))
        parent.send_signal(signal.SIGKILL)
        core.wait(timeout=60)
