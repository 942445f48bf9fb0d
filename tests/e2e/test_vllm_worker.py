"""Real vLLM hosted in a process of its own by the trainer's side: one more engine behind the same connection."""

from __future__ import annotations

import os
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.support.engines import interrupted, processed, tokenizer
from tests.support.processes import gone
from tests.support.vllm_support import engine_config, needs_vllm, policy, prompts

from trimtab.engines.remote.process_transport import ProcessTransport
from trimtab.engines.remote.remote_engine import RemoteEngine
from trimtab.errors import EngineDeadError
from trimtab.training.export import save_model_files
from trimtab.types import Completion, Sampling

pytestmark = [pytest.mark.e2e, needs_vllm]

# Long enough that an interruption, which crosses two processes, always comes before the end.
LENGTH = 200
ASKED, LONG = prompts([5, 40]), Sampling(max_tokens=LENGTH, ignore_stop=True)


def assert_written_by(model: Any, groups: list[list[Completion]], begun: list[list[Completion]]) -> None:
    for asked, group, before in zip(ASKED, groups, begun, strict=True):
        for one, start in zip(group, before, strict=True):
            k, n = len(start.response_ids), len(one.response_ids)
            exact = processed(model, asked, one, LONG)[torch.arange(n), torch.from_numpy(one.response_ids)]
            np.testing.assert_allclose(one.logp_behavior[k:], exact[k:].numpy(), atol=1e-4)


def test_vllm_is_hosted_interrupted_killed_and_started_again(tmp_path: Path) -> None:
    save_model_files(policy(), tokenizer(), tmp_path / "model")
    section = engine_config("float32").model_dump(mode="json")
    engine = RemoteEngine(
        ProcessTransport({"type": "vllm", "model": str(tmp_path / "model"), "engine": section}, threads=1)
    )
    engine.publish(policy().named_parameters(), version=1)
    part = interrupted(lambda stop: engine.generate(ASKED, 2, LONG, seed=0, interrupt=stop))
    assert {one.finish for one in chain(*part)} == {"abort"}
    engine.publish(policy(seed=1).named_parameters(), version=2)
    whole = engine.generate(ASKED, 2, LONG, seed=0, prefixes=part)
    assert_written_by(policy(seed=1), whole, part)
    for begun, one in zip(chain(*part), chain(*whole), strict=True):
        k = len(begun.response_ids)
        assert one.policy_version.tolist() == [1] * k + [2] * (LENGTH - k)
    family = psutil.Process(engine.transport.pid).children(recursive=True)
    os.kill(engine.transport.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        engine.generate(ASKED, 2, LONG, seed=0)
    engine.close()
    assert all(gone(process.pid) for process in family)
