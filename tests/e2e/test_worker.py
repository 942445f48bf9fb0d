"""An engine in a process of its own: the same bits as in this one, and an error when a process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from tests.programs import stopped_trainer, stuck_worker
from tests.support.engines import After, assert_same, prompt, prompts
from tests.support.processes import gone
from tests.support.turns import ScriptedTurns

from trimtab.errors import DivergedError, EngineDeadError, TrimtabError
from trimtab.trainer.build_model import save_model_files
from trimtab.trainer.config import load_config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.embedded.weight_quantization import WeightQuantization, weight_quantization
from trimtab.trainer.engines.remote import process_transport, remote_engine
from trimtab.trainer.engines.remote.process_transport import ProcessTransport
from trimtab.trainer.engines.remote.remote_engine import RemoteEngine
from trimtab.trainer.engines.weight_transfer import SharedWeights, share
from trimtab.trainer.models import laboratory
from trimtab.trainer.models.load import load
from trimtab.types import Completion, SamplingParams, TurnResult

pytestmark = pytest.mark.slow

ASKED = [replace(one, ids=one.ids % 14) for one in prompts([5, 1, 17, 20])]
FREE = SamplingParams(max_tokens=30, ignore_stop=True)
STOPS = SamplingParams(max_tokens=30, stop=("3",), stop_ids=(7,))
TRUNCATED = SamplingParams(max_tokens=12, temperature=0.7, top_k=8, top_p=0.8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model files without weights, as a run has them."""
    path = tmp_path_factory.mktemp("model") / "files"
    save_model_files(*laboratory.build(0), path)
    assert not list(path.glob("*.safetensors"))
    return path


def transport(folder: Path, *sets: str) -> ProcessTransport:
    return ProcessTransport(load_config("laboratory", ["engine.dtype=float32", *sets]), folder, threads=1)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[RemoteEngine]:
    torch.set_num_threads(1)
    engine = RemoteEngine(transport(folder))
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: RemoteEngine) -> RemoteEngine:
    """The one process of this module, or its successor, with the weights of seed 1 as version 5."""
    shared.restart()
    shared.update_weights(laboratory.build(1)[0].named_parameters(), version=5)
    return shared


def local(dtype: str = "float32", rounding: WeightQuantization | None = None, seed: int = 1) -> EmbeddedEngine:
    """The same engine in this process."""
    model, tokenizer = load(laboratory.NAME, dtype=torch.float32)[:2]
    engine = EmbeddedEngine(model, tokenizer, getattr(torch, dtype), quantization=rounding or WeightQuantization())
    engine.update_weights(laboratory.build(seed)[0].named_parameters(), version=5)
    return engine


TURNS = SamplingParams(max_tokens=34, stop=("3", "12"), stop_ids=(7, 8))


def test_turns_have_the_bits_of_this_process(engine: RemoteEngine) -> None:
    own = local()
    for max_turn_tokens in (1000, 5):
        handlers = [ScriptedTurns(34, vocabulary=13, max_turn_tokens=max_turn_tokens) for _ in range(2)]
        completions = engine.generate(ASKED, 4, TURNS, seed=3, turns=handlers[0])
        assert_same(completions, own.generate(ASKED, 4, TURNS, seed=3, turns=handlers[1]))
        assert handlers[0].submitted == handlers[1].submitted
        assert any(one.loss_mask is not None for one in chain(*completions))
    assert (engine.policy_version, own.policy_version) == (5, 5)


def test_tokens_and_log_probs_have_the_bits_of_this_process(engine: RemoteEngine) -> None:
    own = local()
    before = engine.decoded_tokens, engine.prefilled_tokens
    for sampling in (FREE, STOPS, TRUNCATED):
        completions = engine.generate(ASKED, 4, sampling, seed=3)
        assert_same(completions, own.generate(ASKED, 4, sampling, seed=3))
        part = own.generate(ASKED, 4, sampling, seed=3, abort=After(3))
        again = engine.generate(ASKED, 4, sampling, seed=3, prefixes=part)
        assert_same(again, own.generate(ASKED, 4, sampling, seed=3, prefixes=part))
        own.decoded_tokens -= sum(max(0, len(one.response_ids) - 1) for one in chain(*part))
        own.prefilled_tokens -= sum(len(one.ids) for one in ASKED)
    assert (engine.decoded_tokens - before[0], engine.prefilled_tokens - before[1]) == (
        own.decoded_tokens,
        own.prefilled_tokens,
    )
    assert engine.policy_version == 5


def test_another_dtype_and_rounding_too(folder: Path) -> None:
    sets = ["engine.dtype=bfloat16", "engine.quantize=int3", "engine.noise=0.05", "seed=7"]
    rounding = weight_quantization(load_config("laboratory", sets))
    engine, own = RemoteEngine(transport(folder, *sets)), local("bfloat16", rounding)
    engine.update_weights(laboratory.build(1)[0].named_parameters(), version=5)
    assert_same(engine.generate(ASKED, 4, FREE, seed=3), own.generate(ASKED, 4, FREE, seed=3))
    weights = dict(engine.named_weights())
    assert list(weights) == [name for name, _ in own.named_weights()]
    assert all(torch.equal(weights[name], weight) for name, weight in own.named_weights())
    engine.update_weights(weights.items(), version=6, as_is=True)
    own.update_weights([(name, weight.clone()) for name, weight in own.named_weights()], version=6, as_is=True)
    assert_same(engine.generate(ASKED, 4, FREE, seed=3), own.generate(ASKED, 4, FREE, seed=3))
    engine.close()


def test_killed_while_generating(engine: RemoteEngine) -> None:
    expected = engine.generate(ASKED, 4, FREE, seed=3)
    counted, pid = engine.decoded_tokens, engine.transport.pid
    with pytest.raises(EngineDeadError, match=r"was killed .* during generate") as lost:
        engine.generate(ASKED, 64, FREE, seed=3, abort=After(0, then=lambda: os.kill(pid, signal.SIGKILL)))
    assert "\n" not in str(lost.value)
    assert gone(pid)
    with pytest.raises(EngineDeadError, match="restart"):
        engine.generate(ASKED, 4, FREE, seed=3)
    engine.restart()
    assert engine.transport.pid not in (None, pid)
    with pytest.raises(TrimtabError, match="no weights yet"):
        engine.generate(ASKED, 4, FREE, seed=3)
    engine.update_weights(laboratory.build(1)[0].named_parameters(), version=5)
    assert_same(engine.generate(ASKED, 4, FREE, seed=3), expected)
    assert engine.decoded_tokens == counted + 4 * 4 * 29
    engine.restart()
    assert_same(engine.generate(ASKED, 4, FREE, seed=3), expected)  # a living engine keeps its weights


PATIENCE = 2.0  # seconds


def test_an_engine_that_stands_still_is_given_up_and_a_slow_one_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process lives in both cases, and the slow one takes longer than the patience."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(process_transport, "WORKER", "tests.programs.stuck_worker")
    engine = RemoteEngine(transport(folder))
    engine.update_weights(laboratory.build(1)[0].named_parameters(), 5)
    expected = engine.generate(ASKED, 4, FREE, seed=3)
    engine.hang_timeout = PATIENCE
    assert stuck_worker.TIME > PATIENCE
    engine.update_weights(laboratory.build(1)[0].named_parameters(), stuck_worker.SLOW)
    slow = engine.generate(ASKED, 1, FREE, seed=stuck_worker.SLOW, abort=threading.Event())
    assert [len(one.response_ids) for one in chain(*slow)] == [30] * 4
    with pytest.raises(EngineDeadError, match="gave no sign of life for 2 s"):
        engine.generate(ASKED, 4, FREE, seed=stuck_worker.STUCK, abort=threading.Event())
    engine.hang_timeout = remote_engine.HANG_TIMEOUT
    engine.restart()
    engine.update_weights(laboratory.build(1)[0].named_parameters(), 5)
    assert_same(engine.generate(ASKED, 4, FREE, seed=3), expected)
    engine.hang_timeout = PATIENCE
    with pytest.raises(EngineDeadError, match="gave no sign of life for 2 s"):
        engine.generate(ASKED, 4, FREE, seed=stuck_worker.STUCK)
    engine.close()


def test_an_engine_that_waits_for_a_tool_longer_than_its_patience_lives(
    engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(ScriptedTurns):
        """Its first result comes after a second more than the patience."""

        begun: float | None = None

        def result(self, prompt: int, sample: int, timeout: float) -> TurnResult | None:
            self.begun = self.begun or time.monotonic()
            late = time.monotonic() - self.begun < PATIENCE + 1
            return None if late else super().result(prompt, sample, timeout)

    monkeypatch.setattr(engine, "hang_timeout", PATIENCE)
    completions = engine.generate(ASKED, 1, TURNS, seed=3, turns=Slow(34, vocabulary=13))
    assert any(one.loss_mask is not None for one in chain(*completions))


def test_a_trainer_that_stood_still_itself_keeps_its_engine(folder: Path) -> None:
    """Alone, as after Ctrl-Z, and together with its engine, as in a frozen container: longer than its patience."""
    with stopped_trainer.started(folder, calls=[True, True, False], patience=3) as trainer:
        assert trainer.stdout is not None
        expected = trainer.stdout.readline()
        for together in (False, True, True):
            pid = int(trainer.stdout.readline())
            stopped_trainer.stand_still(trainer.pid, [pid] * together, seconds=4)
            assert trainer.stdout.readline() == expected


def test_the_process_is_not_a_rank_of_the_trainer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"}
    variables |= {"MASTER_PORT": "1", "GROUP_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_CACHE": "kept"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    engine = RemoteEngine(transport(folder))
    engine.update_weights(laboratory.build(1)[0].named_parameters(), 5)  # once it answers, its environment is there
    environment = psutil.Process(engine.transport.pid).environ()
    engine.close()
    assert variables.keys() & environment.keys() == {"LOCAL_CACHE"}


def test_killed_while_publishing(engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[SharedWeights] = []

    def remembered(weights: Iterable) -> SharedWeights:
        copies.append(share(weights))
        return copies[-1]

    def weights():
        for index, item in enumerate(laboratory.build(1)[0].named_parameters()):
            if index == 3:
                os.kill(pid, signal.SIGKILL)
            yield item

    monkeypatch.setattr(process_transport, "share", remembered)
    pid = engine.transport.pid
    with pytest.raises(EngineDeadError, match="during update_weights"):
        engine.update_weights(weights(), version=6)
    engine.restart()
    # Stopped, it cannot take what it was sent: it dies with the weights on their way.
    pid = engine.transport.pid
    os.kill(pid, signal.SIGSTOP)
    caught: list[Exception] = []

    def publish() -> None:
        try:
            engine.update_weights(laboratory.build(1)[0].named_parameters(), version=6)
        except EngineDeadError as error:
            caught.append(error)

    caller = threading.Thread(target=publish)
    caller.start()
    os.kill(pid, signal.SIGKILL)
    caller.join()
    assert "update_weights" in str(caught[0])
    assert [copy.close.alive for copy in copies] == [False, False]  # though the error, and its frames, are still held


@pytest.mark.parametrize("state", ["busy", "forked"])
def test_the_child_ends_with_its_parent(folder: Path, state: str) -> None:
    script = Path(__file__).parents[1] / "programs" / "worker_parent.py"
    command = [sys.executable, str(script), str(folder), state]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as parent:
        assert parent.stdout is not None
        child, helper = map(int, parent.stdout.readline().split())
        assert psutil.pid_exists(child)
        parent.kill()
    try:
        assert gone(child)
    finally:
        if helper != parent.pid:
            os.kill(helper, signal.SIGKILL)


def test_a_users_mistake_is_the_same_line_as_in_this_process(engine: RemoteEngine) -> None:
    own = local()
    twice = [*laboratory.build(1)[0].named_parameters()] * 2
    calls = [
        lambda e: e.generate(ASKED, 0, FREE, seed=0),
        lambda e: e.generate([prompt([99])], 1, FREE, seed=0),
        lambda e: e.generate([prompt([1] * 60)], 1, FREE, seed=0),
        lambda e: e.generate(ASKED, 1, FREE, seed=0, prefixes=[[Completion.empty()]]),
        lambda e: e.update_weights(twice, version=8),
        lambda e: e.update_weights([("unknown", torch.zeros(1))], version=8),
    ]
    for call in calls:
        lines = []
        for one in (own, engine):
            with pytest.raises(TrimtabError) as caught:
                call(one)
            assert type(caught.value) is TrimtabError
            lines.append(str(caught.value))
        assert lines[0] == lines[1]
    assert engine.policy_version == 5
    assert_same(engine.generate(ASKED, 2, FREE, seed=1), own.generate(ASKED, 2, FREE, seed=1))


def test_a_diverged_model_keeps_its_name(engine: RemoteEngine) -> None:
    weights = {name: weight.detach().clone() for name, weight in laboratory.build(1)[0].named_parameters()}
    weights["lm_head.weight"].fill_(3e38)
    engine.update_weights(weights.items(), version=6)
    with pytest.raises(DivergedError, match="not finite"):
        engine.generate(ASKED, 1, FREE, seed=0)


def test_a_defect_shows_its_traceback_and_is_survived(engine: RemoteEngine) -> None:
    with pytest.raises(RuntimeError, match="Traceback") as caught:
        engine.generate(ASKED, 1, replace(FREE, temperature="warm"), seed=0)  # pyright: ignore[reportArgumentType]
    assert not isinstance(caught.value, TrimtabError)
    assert len(engine.generate(ASKED, 1, FREE, seed=0)) == 4


def test_a_recipe_that_the_engine_refuses_is_one_line(folder: Path) -> None:
    engine = RemoteEngine(transport(folder, "routing.replay=rollout"))
    for _ in range(2):
        with pytest.raises(TrimtabError, match="it is dense") as caught:
            engine.update_weights(laboratory.build(1)[0].named_parameters(), version=1)
        assert type(caught.value) is TrimtabError
    engine.close()


def test_another_engine_with_the_same_weights_samples_alike_until_it_is_closed(
    engine: RemoteEngine, folder: Path
) -> None:
    weights = share(laboratory.build(1)[0].named_parameters())
    other = RemoteEngine(transport(folder))
    for one in (engine, other):
        one.update_weights(weights, version=5)
    expected = local().generate(ASKED, 4, FREE, seed=3)
    for one in (engine, other):
        assert_same(one.generate(ASKED, 4, FREE, seed=3), expected)
    pid, busy, caught = other.transport.pid, threading.Event(), []

    def generate() -> None:
        try:
            # Never set; reports that a caller waits for an answer.
            other.generate(ASKED * 8, 64, FREE, seed=3, abort=SimpleNamespace(is_set=busy.set))
        except EngineDeadError as error:
            caught.append(error)

    caller = threading.Thread(target=generate)
    caller.start()
    busy.wait()
    other.close()
    caller.join()
    assert len(caught) == 1
    assert gone(pid)
    other.close()
    with pytest.raises(EngineDeadError):
        other.generate(ASKED, 1, FREE, seed=3)
    with pytest.raises(TrimtabError, match="closed"):
        other.restart()
