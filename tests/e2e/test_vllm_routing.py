"""Why vLLM's experts are not replayed: on a CPU it cannot return them. Once this fails, they can be had."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.vllm_support import engine_config, needs_vllm

from trimtab.trainer.build_model import save_model_files
from trimtab.trainer.engines.vllm import stepped_runner
from trimtab.trainer.models import laboratory

pytestmark = [pytest.mark.slow, needs_vllm]


@pytest.mark.parametrize(("newer", "message"), [("0", "requires Model Runner V2"), ("1", "Triton")])
def test_neither_model_runner_returns_experts(
    newer: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", newer)
    save_model_files(*laboratory.build(0, laboratory.MIXTURE), tmp_path / "model")
    config = engine_config("float32")
    stepped_runner.import_vllm(eager=True)
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is not one for CPUs")
    given = stepped_runner.arguments(tmp_path / "model", config) | {"max_model_len": None}
    if newer == "0":
        assert EngineArgs(**given).create_engine_config().model_config.is_moe
    with pytest.raises(ValueError, match=message):
        EngineArgs(**given, enable_return_routed_experts=True).create_engine_config()
