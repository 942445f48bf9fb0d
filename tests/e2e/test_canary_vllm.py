"""The canary over real vLLM in bfloat16: each way in which vLLM keeps old weights and reports success is planted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.e2e.test_canary import run_canary
from tests.support.engines import tokenizer
from tests.support.vllm_support import needs_vllm, policy, start, update

from trimtab.errors import DivergedError, TrimtabError
from trimtab.trainer.config import load_config
from trimtab.trainer.rollout import canary as canaries
from trimtab.trainer.rollout.canary import MARGIN, Canary

pytestmark = [pytest.mark.slow, needs_vllm]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    started = start(tmp_path_factory.mktemp("engine"), "bfloat16")
    yield started
    started.close()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Canary:
    """The tiny vocabulary has no letters to write the corpus in: its pieces, in some order, do as well."""
    generator = torch.Generator().manual_seed(0)
    pieces = torch.randint(2, len(tokenizer()), (400,), generator=generator)
    monkeypatch.setattr(
        canaries,
        "_texts",
        lambda _, count, length: torch.stack([pieces[i * 40 :][:length] for i in range(count)]).numpy(),
    )
    built = Canary.build(load_config("quickstart-vllm", ["model.autocast=none"]), tokenizer(), policy())
    assert built is not None
    return built


def worker_of(engine: Any) -> Any:
    return engine._runner._engine.model_executor.driver_worker.worker


def skip_unless_the_head_is_packed(engine: Any) -> None:
    """vLLM keeps a packed copy of the head where the processor has a kernel for it; without one nothing can be old."""
    linear = worker_of(engine).model_runner.model.lm_head.cpu_linear
    if not getattr(linear, "__closure__", None):
        pytest.skip("vLLM packs no weights on this processor")


def test_no_fault_is_reported_for_a_healthy_engine(engine: Any, watch: Canary) -> None:
    model = policy()
    differences = []
    for version in range(12):
        differences.append(run_canary(watch, engine, model, version))
        update(model, 1e-3 if version < 8 else 0.05, seed=version)
    assert 1e-4 < differences[0] < 0.1
    assert max(differences) < MARGIN * differences[0]


def test_a_stale_tied_head_is_caught(engine: Any, watch: Canary, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_the_head_is_packed(engine)
    model = policy()
    run_canary(watch, engine, model, 0)
    update(model, 0.2, seed=1)
    monkeypatch.setattr(type(worker_of(engine)), "_repack_tied_head", lambda *_: None)
    with pytest.raises(TrimtabError, match=r"a part of the weights was not taken over .*tied head"):
        run_canary(watch, engine, model, 1)
    # As a run would meet it that is resumed, or started: at the first check.
    fresh = Canary(watch.texts, watch.config, tied=True)
    with pytest.raises(TrimtabError, match=r"bound 0\.5.*tied head"):
        run_canary(fresh, engine, policy(seed=3), 2)
    monkeypatch.undo()


def test_a_stale_prefix_cache_is_caught(engine: Any, watch: Canary, monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    run_canary(watch, engine, model, 0)
    update(model, 0.2, seed=1)
    monkeypatch.setattr(engine._runner._engine, "reset_prefix_cache", lambda: True)
    with pytest.raises(TrimtabError, match=r"only contexts it had seen before are wrong.*prefix cache"):
        run_canary(watch, engine, model, 1)


@pytest.mark.parametrize("fault", ["head", "cache"])
def test_what_falls_behind_slowly_is_caught(
    engine: Any, watch: Canary, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    model = policy()
    run_canary(watch, engine, model, 0)
    if fault == "head":
        skip_unless_the_head_is_packed(engine)
        monkeypatch.setattr(type(worker_of(engine)), "_repack_tied_head", lambda *_: None)
    else:
        monkeypatch.setattr(engine._runner._engine, "reset_prefix_cache", lambda: True)

    def train() -> None:
        for version in range(1, 80):
            update(model, 4e-3, seed=version)
            run_canary(watch, engine, model, version)

    with pytest.raises(TrimtabError, match=r"of the policy's way back|was not taken over|prefix cache"):
        train()


@pytest.mark.parametrize("size", [0.01, 0.2])
def test_a_skipped_update_is_caught(engine: Any, watch: Canary, monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    model = policy()
    run_canary(watch, engine, model, 0)
    update(model, size, seed=1)
    monkeypatch.setattr(engine._runner, "load", lambda _: [])
    with pytest.raises(TrimtabError, match=r"version 1.*version 0.*the update was skipped"):
        run_canary(watch, engine, model, 1)


def test_weights_that_vllm_leaves_out_are_an_error(engine: Any, watch: Canary, monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    run_canary(watch, engine, model, 0)
    kind = type(worker_of(engine).model_runner.get_model())
    load = kind.load_weights

    def lossy(self: Any, weights: Any) -> Any:
        return load(self, [(name, tensor) for name, tensor in weights if "layers.1.mlp.down_proj" not in name])

    monkeypatch.setattr(kind, "load_weights", lossy)
    with pytest.raises(TrimtabError, match=r"did not take over.*layers\.1\.mlp\.down_proj"):
        run_canary(watch, engine, model, 1)
    with pytest.raises(TrimtabError, match="no weights yet"):
        watch.check(engine, watch.predict(model, 1))


def test_weights_that_are_not_finite_are_caught(engine: Any, watch: Canary) -> None:
    """Last: what they left in the KV cache makes later log-probs NaN under good weights as well."""
    model = policy()
    run_canary(watch, engine, model, 0)
    norm = worker_of(engine).model_runner.get_model().model.layers[0].input_layernorm.weight
    norm.data.fill_(float("nan"))
    expected = watch.predict(model, 0)
    assert expected is not None
    with pytest.raises(DivergedError, match="not finite"):
        watch.check(engine, expected)
