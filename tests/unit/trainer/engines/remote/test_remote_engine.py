"""The engine in front of a transport: hangs, restarts and errors, which a test with a real process cannot time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.engines import prompts
from tests.support.turns import FailingTurns, ScriptedTurns

from trimtab.errors import EngineDeadError, TrimtabError
from trimtab.trainer.engines.remote import remote_engine
from trimtab.trainer.engines.remote.engine_host import EngineHost
from trimtab.trainer.engines.remote.hosted_turns import CallResult, EndedTurn, HandledTurn, HostedTurns
from trimtab.trainer.engines.remote.remote_engine import RemoteEngine, TransportLost
from trimtab.types import Completion, Problem, Prompt, SamplingParams, TurnResult


class Clock:
    """`time.monotonic`, which moves only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


class Scripted:
    """A transport whose answers, and waits before them, are planned. The call ends at the end of the plan."""

    pid = 0

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.progress = 0
        self.turns: list[EndedTurn] = []
        self.plan: list[Callable[[], None]] = []
        self.answer: CallResult = (None, None, (0, 0, 0))
        self.asked: list[tuple[Any, ...]] = []
        self.kills = self.restarts = 0

    def submit(self, call: int, method: str, *arguments: Any) -> None:
        self.call = call
        self.asked.append((method, *arguments))

    def wait(self, seconds: float) -> CallResult | None:
        if not self.plan:
            return self.answer
        self.clock.now += seconds
        self.plan.pop(0)()
        return None

    def send_result(self, turn: HandledTurn) -> None:
        self.asked.append(turn)

    def abort(self, call: int) -> None:
        self.asked.append(("abort", call))

    def describe(self, what: str) -> str:
        return f"it {what}"

    def kill(self) -> None:
        self.kills += 1

    def restart(self) -> None:
        self.restarts += 1

    def close(self) -> None:
        pass

    def beat(self) -> None:
        self.progress += 1

    def suspend(self, seconds: float) -> Callable[[], None]:
        def move() -> None:
            self.clock.now += seconds

        return move


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return Scripted(Clock(monkeypatch))


@pytest.fixture
def engine(transport: Scripted) -> RemoteEngine:
    engine = RemoteEngine(transport, hang_timeout=5)
    engine.update_weights([], 1)
    return engine


def nothing() -> None:
    pass


def generate(engine: RemoteEngine) -> Any:
    return engine.generate(prompts([5]), 1, SamplingParams(), seed=0)


def test_without_weights_nothing_is_sampled_or_scored(transport: Scripted) -> None:
    engine = RemoteEngine(transport, hang_timeout=5)
    for call in (lambda: generate(engine), lambda: engine.prefill_logps(prompts([5]), [Completion.empty()])):
        with pytest.raises(TrimtabError, match="no weights yet"):
            call()
    assert transport.asked == []


def test_without_heartbeats_it_is_lost_and_with_them_it_may_take_its_time(
    engine: RemoteEngine, transport: Scripted
) -> None:
    steps = round(5 / (remote_engine.STALL_THRESHOLD / 2))
    transport.plan = ([nothing] * (steps - 1) + [transport.beat]) * 3 + [nothing] * steps
    generate(engine)
    transport.plan = [nothing] * (steps + 1)
    with pytest.raises(
        EngineDeadError, match=r"^it gave no sign of life for 5 s \(engine.hang_timeout\) during generate$"
    ):
        generate(engine)
    assert transport.kills
    with pytest.raises(EngineDeadError, match="restart"):
        generate(engine)
    engine.restart()
    assert transport.restarts == 1
    with pytest.raises(TrimtabError, match="no weights yet"):
        generate(engine)
    engine.restart()  # alive: nothing to do
    assert transport.restarts == 1


def test_time_in_which_this_process_was_suspended_does_not_count(engine: RemoteEngine, transport: Scripted) -> None:
    transport.plan = [transport.suspend(100), nothing, transport.suspend(100), nothing]
    generate(engine)
    assert transport.kills == 0


def test_counters_go_on_after_a_restart(engine: RemoteEngine, transport: Scripted) -> None:
    transport.answer = (None, None, (1, 7, 3))
    generate(engine)
    transport.answer = (None, EngineDeadError("its own engine is dead"), (1, 9, 4))
    with pytest.raises(EngineDeadError, match=r"^its own engine is dead$"):
        generate(engine)
    engine.restart()
    assert engine.policy_version == 0
    transport.answer = (None, None, (2, 5, 1))
    engine.update_weights([], 2)
    assert (engine.policy_version, engine.decoded_tokens, engine.prefilled_tokens) == (2, 14, 5)


def test_an_interrupted_wait_leaves_no_answer_for_the_next_call(engine: RemoteEngine, transport: Scripted) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    transport.plan = [stop]
    with pytest.raises(KeyboardInterrupt):
        generate(engine)
    assert transport.kills
    with pytest.raises(EngineDeadError):
        generate(engine)


def test_a_lost_transport_is_named_with_the_call(engine: RemoteEngine, transport: Scripted) -> None:
    def lose() -> None:
        raise TransportLost("it was killed")

    transport.plan = [lose]
    with pytest.raises(EngineDeadError, match=r"^it was killed during named_weights$"):
        engine.named_weights()


def test_answers_stay_here(engine: RemoteEngine, transport: Scripted) -> None:
    asked = Prompt(Problem("name", "question", "answer", {"any": object()}), "text", prompts([3])[0].ids)
    engine.generate([asked], 1, SamplingParams(), seed=0)
    [sent] = transport.asked[-1][1]
    assert sent.problem == Problem("name", "", "")
    assert sent.text == "text"
    assert sent.ids is asked.ids


class Hosted:
    """In the place of the engine: checks its abort signal three times."""

    policy_version = decoded_tokens = prefilled_tokens = 0

    def __init__(self, host: EngineHost) -> None:
        self.host, self.seen = host, list[tuple[int, int, bool]]()

    def generate(self, *_: Any, abort: Any, **__: Any) -> list[Any]:
        for _check in range(3):
            before = self.host.progress()
            assert self.host.progress() == before
            self.seen.append((before, self.host.progress(), abort.is_set()))
        return []


def test_progress_is_that_of_the_process_but_while_it_generates_tokens() -> None:
    host = EngineHost()
    host.engine = engine = Hosted(host)  # pyright: ignore[reportAttributeAccessIssue]
    assert host.progress() != host.progress()
    host.abort(7)
    host.answer(8, "generate", ([], 1, SamplingParams(), 0, None, None))
    host.answer(7, "generate", ([], 1, SamplingParams(), 0, None, None))
    assert [aborted for *_, aborted in engine.seen] == [False] * 3 + [True] * 3
    before = [first for first, *_ in engine.seen[:3]]
    assert len(set(before)) == 3
    assert host.progress() != host.progress()


def turn(call: int) -> EndedTurn:
    return EndedTurn(call, 2, 0, replace(Completion.empty(), response_ids=np.array([3])))


def test_turns_go_to_the_handler_and_their_results_back_when_they_are_known(
    engine: RemoteEngine, transport: Scripted
) -> None:
    handler = ScriptedTurns(70, late={2: 2})
    # The first turn is that of an earlier call, which was aborted.
    transport.plan = [lambda: transport.turns.extend([turn(1), turn(2)]), nothing, nothing, nothing]
    engine.generate(prompts([5] * 3), 1, SamplingParams(), seed=0, turns=handler)
    [(call, prompt, sample, result)] = [asked for asked in transport.asked if isinstance(asked, HandledTurn)]
    assert (call, prompt, sample) == (transport.call, 2, 0) == (2, 2, 0)
    assert result.ids.tolist() == handler.answer(turn(2).completion).ids.tolist()
    assert handler.submitted == {(2, 0): 1}


def test_what_the_handler_raises_ends_the_call_and_not_the_engine(engine: RemoteEngine, transport: Scripted) -> None:
    transport.plan = [lambda: transport.turns.append(turn(2)), nothing, transport.beat]
    transport.answer = (None, None, (1, 9, 4))
    with pytest.raises(ZeroDivisionError):
        engine.generate(prompts([5]), 1, SamplingParams(), seed=0, turns=FailingTurns(70))
    assert transport.asked[-1] == ("abort", 2)
    assert (transport.plan, transport.kills, engine.decoded_tokens) == ([], 0, 9)
    generate(engine)


def test_an_engine_in_another_process_waits_for_the_result_of_its_own_call() -> None:
    sent: list[EndedTurn] = []
    turns = HostedTurns(4, 9, sent.append)
    turns.submit(2, 0, turn(4).completion)
    assert sent[0].call == 4
    expected = TurnResult(np.array([5]), None)
    turns.handled(HandledTurn(3, 2, 0, TurnResult(np.array([6]), None)))  # of a call that was aborted
    assert turns.result(2, 0, 0.0) is None
    arrives = threading.Timer(0.01, turns.handled, [HandledTurn(4, 2, 0, expected)])
    arrives.start()
    assert turns.result(2, 0, 60.0) is expected
    arrives.join()
