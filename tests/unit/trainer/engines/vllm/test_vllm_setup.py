"""What vLLM is started with and asked for. vLLM itself is not needed: of it only the kind of device is asked."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.support.engines import EOS, SIZE, prompts

from trimtab.errors import TrimtabError
from trimtab.trainer.config import EngineConfig, load_config
from trimtab.trainer.config.rollout_sections import VllmConfig
from trimtab.trainer.engines.decoding_rows import GenerateCall
from trimtab.trainer.engines.request import EngineModel
from trimtab.trainer.engines.vllm import stepped_runner
from trimtab.trainer.engines.vllm.vllm_engine import VllmEngine
from trimtab.types import SamplingParams

MODEL = EngineModel(None, frozenset({EOS}), SIZE, context=None)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say `device.cpu = True` for a CPU; the default here is a GPU."""
    asked = SimpleNamespace(cpu=False)
    parts = {
        "platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: asked.cpu)},
        "sampling_params": {"SamplingParams": SimpleNamespace, "RequestOutputKind": SimpleNamespace(DELTA="delta")},
    }
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    for name, content in parts.items():
        module = ModuleType(f"vllm.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # set by some of these, put back by this
    return asked


def started(*sets: str) -> dict[str, Any]:
    return stepped_runner.arguments("folder", load_config("quickstart-vllm", sets).engine)


@pytest.mark.parametrize(("gpus", "backend"), [(1, None), (2, "mp"), (8, "mp")])
def test_several_gpus_of_one_process_never_ask_ray(device: Any, gpus: int, backend: str | None) -> None:
    """In an actor vLLM would choose Ray by itself, and wait for a bundle per GPU that the placement group lacks."""
    assert not device.cpu
    given = started(f"engine.vllm.tensor_parallel={gpus}")
    assert (given["tensor_parallel_size"], given["distributed_executor_backend"]) == (gpus, backend)


def test_every_start_keeps_the_sampling_contract(device: Any) -> None:
    for device.cpu in (False, True):
        given = started("engine.vllm.memory=0.25")
        assert given["logprobs_mode"] == "processed_logprobs"
        assert given["load_format"] == "dummy"
        assert given["trust_remote_code"] is False
        assert ("gpu_memory_utilization" in given) is not device.cpu
    assert given["kv_cache_memory_bytes"] == 1 << 28


@pytest.mark.usefixtures("device")
def test_arbitrary_weights_are_not_scored() -> None:
    engine = VllmEngine.__new__(VllmEngine)
    engine._config, engine._model, engine._weights = EngineConfig(type="vllm"), MODEL, None
    with pytest.raises(TrimtabError, match="no weights yet"):
        engine.prefill_logps([], [])


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("keep_sets", "temperature", "top_k", "asked"),
    [
        (False, 1.0, 0, (1.0, 0)),
        (False, 0.0, 0, (0.0, 0)),
        (True, 0.7, 20, (0.7, 20)),
        (True, 0.0, 20, (1.0, 1)),  # greedy by another name: vLLM refuses temperature 0 where it returns sets
        (True, 0.0, 0, (1.0, 1)),
        (True, 1.0, 0, (1.0, SIZE)),  # untruncated (the canary): vLLM refuses 0 there as well
    ],
)
def test_requests_that_vllm_accepts_beside_keep_sets(
    keep_sets: bool, temperature: float, top_k: int, asked: tuple[float, int]
) -> None:
    engine = VllmEngine.__new__(VllmEngine)
    engine._config = EngineConfig(type="vllm", vllm=VllmConfig(sampling_mask=keep_sets))
    engine._model = MODEL
    sampling = SamplingParams(temperature=temperature, top_k=top_k, max_tokens=5)
    call = GenerateCall.begin(MODEL, 0, prompts([3]), 1, sampling, 0, None, None)
    params = engine._parameters(call.rows[0], call)
    assert (params.temperature, params.top_k) == asked
