"""The engine over inference servers: real server processes, both wire formats, real kills."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.server_process import ServerProcess, engine_over, starter

from trimtab.errors import EngineDeadError, TrimtabError, TrimtabWarning
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.server import server_engine
from trimtab.trainer.engines.server.server_engine import ServerEngine
from trimtab.trainer.models.load import LoadedModel, load
from trimtab.trainer.sft import laboratory_folder
from trimtab.types import Completion, Prompt, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SAMPLING = SamplingParams(max_tokens=20, stop=(".",))
SAMPLES, SEED = 4, 11


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[ServerProcess]]]:
    """Two servers of the vLLM kind, one of the SGLang kind; tests that kill one start it again."""
    folder, home = laboratory_folder(), tmp_path_factory.mktemp("servers")
    kinds = ["vllm", "vllm", "sglang"]
    with starter() as start:
        started = [ServerProcess(start, kind, folder, home / str(index)) for index, kind in enumerate(kinds)]
        yield {"vllm": started[:2], "sglang": started[2:]}
        for one in started:
            one.kill()


@pytest.fixture
def servers(both: dict[str, list[ServerProcess]]) -> Iterator[list[ServerProcess]]:
    for one in both["vllm"]:
        one.reset()
    yield both["vllm"]
    for one in both["vllm"]:
        if not one.alive:
            one.start()


def expected(
    laboratory: LoadedModel, prompts: Sequence[Prompt], sampling: SamplingParams = SAMPLING
) -> list[list[Completion]]:
    """What the servers' own model writes for the seeds they are sent."""
    local = EmbeddedEngine(laboratory.model, laboratory.tokenizer, torch.float32)
    seeds = [[server_engine.request_seed(SEED, p, s, 0) for s in range(SAMPLES)] for p in range(len(prompts))]
    return [[local.generate([prompts[p]], 1, sampling, seed=seed)[0][0] for seed in row] for p, row in enumerate(seeds)]


def assert_equal(result: list[list[Completion]], reference: list[list[Completion]], version: int = 0) -> None:
    for one, other in zip(np.ravel(result), np.ravel(reference), strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        np.testing.assert_array_equal(one.logp_behavior, other.logp_behavior)  # JSON carries every bit
        assert set(one.policy_version.tolist()) <= {version}
        assert (one.finish_reason, one.text) == (other.finish_reason, other.text)
        assert one.entropy is None


def changed(laboratory: LoadedModel) -> dict[str, torch.Tensor]:
    return {name: weight + 0.05 * weight.std() for name, weight in laboratory.model.named_parameters()}


def other_model(laboratory: LoadedModel) -> LoadedModel:
    """The laboratory model with `changed` weights."""
    model = load(str(laboratory_folder()), dtype=torch.float32).model
    model.load_state_dict(changed(laboratory), strict=False)
    return laboratory._replace(model=model)


class TestWire:
    @pytest.fixture(params=["vllm", "sglang"])
    def served(self, both: dict[str, list[ServerProcess]], request: pytest.FixtureRequest) -> list[ServerProcess]:
        for one in both[request.param]:
            one.reset()
        return both[request.param]

    def test_tokens_and_log_probs_are_the_models_own(
        self,
        laboratory: LoadedModel,
        served: list[ServerProcess],
        prompts: list[Prompt],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self._short_seeds(served, monkeypatch)
        engine = engine_over(laboratory, served)
        completions = engine.generate(prompts, SAMPLES, SAMPLING, seed=SEED)
        assert_equal(completions, expected(laboratory, prompts))
        stopped = [one for row in completions for one in row if one.finish_reason == "stop"]
        assert stopped
        assert all(laboratory.tokenizer.decode(one.response_ids).endswith(".") for one in stopped)  # it is kept
        assert not any(one.text.endswith(".") for one in stopped)
        assert engine.decoded_tokens == sum(len(one.response_ids) for row in completions for one in row)
        assert engine.prefilled_tokens == sum(SAMPLES * len(prompt.ids) for prompt in prompts)
        requested = [seed for one in served for seed in one.logged("received")]
        assert len(requested) == len(set(requested)) == len(prompts) * SAMPLES

    @staticmethod
    def _short_seeds(served: list[ServerProcess], monkeypatch: pytest.MonkeyPatch) -> None:
        """SGLang takes 31 bits of a seed."""
        if served[0].kind == "sglang":
            whole = server_engine.request_seed
            monkeypatch.setattr(server_engine, "request_seed", lambda *key: whole(*key) % (1 << 31))

    def test_published_weights_are_sampled_from(
        self,
        laboratory: LoadedModel,
        served: list[ServerProcess],
        prompts: list[Prompt],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self._short_seeds(served, monkeypatch)
        engine = engine_over(laboratory, served, tmp_path)
        engine.update_weights(changed(laboratory).items(), 7)
        assert engine.policy_version == 7
        completions = engine.generate(prompts, SAMPLES, SAMPLING, seed=SEED)
        assert_equal(completions, expected(other_model(laboratory), prompts), version=7)

        held = dict(engine.named_weights())
        assert held.keys() == changed(laboratory).keys()
        assert all(torch.equal(held[name], weight) for name, weight in changed(laboratory).items())
        engine.update_weights(laboratory.model.named_parameters(), 8)
        assert len(list(tmp_path.rglob("*.safetensors"))) == 1  # what came before is gone
        assert_equal(engine.generate(prompts, SAMPLES, SAMPLING, seed=SEED), expected(laboratory, prompts), version=8)
        engine.close()
        assert list(tmp_path.iterdir()) == []

    def test_log_probs_from_before_the_temperature_are_refused(
        self, laboratory: LoadedModel, served: list[ServerProcess], prompts: list[Prompt]
    ) -> None:
        warm = replace(SAMPLING, temperature=0.7)
        engine = engine_over(laboratory, served)
        assert len(engine.generate(prompts, 2, warm, seed=SEED)) == len(prompts)
        for one in served:
            one.configure(logp=-0.1)
        with pytest.raises(TrimtabError, match="from before the temperature"):
            engine_over(laboratory, served).generate(prompts, 2, warm, seed=SEED)


class TestKills:
    def call(self, engine: ServerEngine, prompts: list[Prompt], pool: ThreadPoolExecutor) -> Future[Any]:
        return pool.submit(engine.generate, prompts, SAMPLES, SAMPLING, seed=SEED)

    def test_other_servers_take_over_and_nothing_is_lost_or_answered_twice(
        self, laboratory: LoadedModel, servers: list[ServerProcess], prompts: list[Prompt]
    ) -> None:
        first, second = servers
        second.configure(after=3)
        # One at a time: when the third is asked, the second answer has arrived.
        engine = engine_over(laboratory, servers, concurrency=1)
        with ThreadPoolExecutor() as pool:
            call = self.call(engine, prompts, pool)
            second.wait_for_held()
            second.kill()
            assert_equal(call.result(), expected(laboratory, prompts))
        counted = first.logged("answered") + second.logged("answered")
        assert len(counted) == len(set(counted)) == len(prompts) * SAMPLES
        assert len(second.logged("answered")) == 2
        assert not set(second.logged("answered")) & set(first.logged("received"))  # answered ones are not asked again

    def test_a_server_that_returns_gets_its_weights_back(
        self, laboratory: LoadedModel, servers: list[ServerProcess], prompts: list[Prompt]
    ) -> None:
        """Both hold everything; one dies and comes back with its first weights, while the other still holds."""
        engine = engine_over(laboratory, servers, concurrency=2)
        engine.update_weights(changed(laboratory).items(), 3)
        first, second = servers
        first.configure(after=1)
        second.configure(after=1)
        with ThreadPoolExecutor() as pool:
            call = self.call(engine, prompts, pool)
            first.wait_for_held(2)
            second.wait_for_held(2)
            second.kill()
            second.start()  # knows nothing of publications; answers everything now
            while len(second.logged("answered")) < len(prompts) * SAMPLES - 2:
                assert not call.done()
                threading.Event().wait(0.05)
            first.configure(release=True)  # what it held comes back unfinished, and is asked for again
            assert_equal(call.result(), expected(other_model(laboratory), prompts), version=3)

    def test_without_other_servers_the_call_waits_for_a_restart(
        self, laboratory: LoadedModel, servers: list[ServerProcess], prompts: list[Prompt]
    ) -> None:
        alone = servers[0]
        engine = engine_over(laboratory, [alone], concurrency=2)
        engine.update_weights(changed(laboratory).items(), 3)
        alone.configure(after=6)
        warned = pytest.warns(TrimtabWarning, match="waiting 30 s for one to come back")
        with ThreadPoolExecutor() as pool, warned:
            call = self.call(engine, prompts, pool)
            alone.wait_for_held(2)
            alone.kill()
            while engine._servers[0].lost_at is None:
                assert not call.done()
                threading.Event().wait(0.05)
            alone.start()
            assert_equal(call.result(), expected(other_model(laboratory), prompts), version=3)
        assert len(alone.logged("answered")) == len(set(alone.logged("answered"))) == len(prompts) * SAMPLES

    @pytest.mark.filterwarnings("ignore:no inference server is left")
    def test_a_lost_call_can_be_repeated_after_a_restart(
        self, laboratory: LoadedModel, servers: list[ServerProcess], prompts: list[Prompt]
    ) -> None:
        alone = servers[0]
        engine = engine_over(laboratory, [alone], concurrency=2, reconnect_timeout=1.0)
        alone.configure(after=6)
        with ThreadPoolExecutor() as pool:
            call = self.call(engine, prompts, pool)
            alone.wait_for_held(2)
            alone.kill()
            with pytest.raises(EngineDeadError, match="no inference server is left"):
                call.result()
        assert len(alone.logged("answered")) == 5
        with pytest.raises(EngineDeadError):
            engine.update_weights(changed(laboratory).items(), 3)
        alone.start()
        engine.restart()
        engine.update_weights(changed(laboratory).items(), 4)
        completions = engine.generate(prompts, SAMPLES, SAMPLING, seed=SEED)
        assert_equal(completions, expected(other_model(laboratory), prompts), version=4)

    def test_another_model_in_its_place_is_refused(
        self, laboratory: LoadedModel, servers: list[ServerProcess], prompts: list[Prompt], tmp_path: Path
    ) -> None:
        alone = servers[0]
        engine = engine_over(laboratory, [alone])
        alone.kill()
        other = tmp_path / "other"
        load(str(laboratory_folder()), dtype=torch.float32).model.save_pretrained(other)
        laboratory.tokenizer.save_pretrained(other)
        with starter() as start:
            impostor = ServerProcess(start, "vllm", other, tmp_path / "server", alone.port)
            with pytest.raises(TrimtabError, match="came back with") as raised:
                engine.generate(prompts, 1, SAMPLING, seed=SEED)
            assert not isinstance(raised.value, EngineDeadError)
            with pytest.raises(TrimtabError, match="came back with"):
                engine.restart()
            with pytest.raises(TrimtabError, match="start all servers alike"):
                engine_over(laboratory, [impostor, servers[1]])
            impostor.kill()

    @pytest.mark.filterwarnings("ignore:waiting up to")
    def test_servers_that_do_not_answer_within_the_timeout_are_an_error(
        self, laboratory: LoadedModel, servers: list[ServerProcess]
    ) -> None:
        engine = engine_over(laboratory, servers[:1], reconnect_timeout=0.3)
        servers[0].kill()
        with pytest.raises(TrimtabError, match=r"1 of 1 inference servers did not answer within 0\.3 s"):
            engine.restart()
        with pytest.raises(TrimtabError, match="start them, or raise"):
            engine_over(laboratory, servers[:1], reconnect_timeout=0.3)


@pytest.mark.parametrize(("asked", "said"), [({"top_p": 0.9}, "which tokens"), ({"top_logprobs": 2}, "most probable")])
def test_what_servers_do_not_return_is_refused(
    laboratory: LoadedModel, servers: list[ServerProcess], prompts: list[Prompt], asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(TrimtabError, match=said):
        engine_over(laboratory, servers).generate(prompts, 1, replace(SAMPLING, **asked), seed=SEED)
