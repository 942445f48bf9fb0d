"""Threads of generation, scoring and the buffer, with engines scripted by each test. No test waits for a clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.scripted_engine import LENGTH, SAMPLING, TASK, TOKENIZER, Act, Desk, Scripted

from trimtab.errors import EngineDeadError, TrimtabError
from trimtab.trainer import rewards
from trimtab.trainer.config import EnvironmentConfig, load_config
from trimtab.trainer.config.training_sections import TrainerConfig
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.environments.episodes import EpisodeRunner
from trimtab.trainer.environments.formats import Tag
from trimtab.trainer.models.laboratory import build
from trimtab.trainer.rollout import async_source
from trimtab.trainer.rollout.async_source import AsyncSource
from trimtab.trainer.rollout.buffer import Buffer
from trimtab.trainer.rollout.collector import Collector, Group
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.trainer.rollout.responses import EpisodeSampler, ResponseSampler
from trimtab.trainer.rollout.schedule import GroupRequest
from trimtab.trainer.rollout.source import RolloutSource, SyncSource
from trimtab.trainer.tasks import encode
from trimtab.types import AbortSignal, Engine, Prompt, SamplingParams

Open = Callable[..., Desk]


@pytest.fixture
def desk(scorer: rewards.Scorer) -> Iterator[Open]:
    opened: list[Desk] = []

    def open_desk(*engines: Engine, environment: type | None = None, **trainer: Any) -> Desk:
        opened.append(Desk(engines, scorer, **trainer))
        if environment is not None:
            run_episodes(opened[-1], environment)
        opened[-1].publish(0)
        return opened[-1]

    yield open_desk
    for one in opened:
        one.feed.close()
    left = [thread for thread in threading.enumerate() if thread.name.startswith(("engine-", "scoring"))]
    for thread in left:
        thread.join(60)
    assert not [thread.name for thread in left if thread.is_alive()]


def until(interrupt: AbortSignal) -> None:
    """Stand still until interrupted."""
    assert interrupt.wait(30), "nobody interrupted"


def pausing(at: int, began: threading.Event, then: int = LENGTH) -> Act:
    """Stand still in call `at` until interrupted, and write `then` tokens."""

    def act(call: int, interrupt: AbortSignal) -> int:
        if call != at:
            return LENGTH
        began.set()
        until(interrupt)
        return then

    return act


def dead(_call: int, _interrupt: AbortSignal) -> int:
    raise EngineDeadError("gone")


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_batches_of_several_engines_come_in_order(desk: Open, engines: int) -> None:
    one = desk(*(Scripted() for _ in range(engines)))
    assert one.steps(6) == [list(range(4 * i, 4 * i + 4)) for i in range(6)]


def run_episodes(one: Desk, kind: type) -> None:
    """Makes its responses episodes without calls, in environments of a class."""
    limits = EnvironmentConfig(
        name="class", max_turns=2, max_turn_tokens=LENGTH, max_observation_tokens=8, timeout=30.0
    )
    runner = EpisodeRunner(
        kind, Tag(()), limits, TOKENIZER, LENGTH, lambda problem, _: encode(TASK, problem, TOKENIZER)
    )
    collector = one.feed.collector
    collector.responses = EpisodeSampler(collector.config, collector.stream, collector.sampling, runner)


def test_random_environments_do_not_depend_on_how_requests_are_cut(desk: Open) -> None:
    seen: list[dict[str, int]] = []

    class Drawing:
        def reset(self, id: str, seed: int, **row: Any) -> None:
            del row
            seen[-1][id] = seed

    responses = desk(Scripted(), environment=Drawing).feed.collector.responses
    for requests in ([GroupRequest(0, 4)], [GroupRequest(0, 1), GroupRequest(1, 3)]):
        seen.append({})
        for request in requests:
            responses.respond(request, Scripted().generate)
    assert len(set(seen[0].values())) == 4
    assert seen[0] == seen[1]


def test_generation_goes_on_while_the_trainer_trains(desk: Open) -> None:
    """Two batches more than the one that was taken, and not a third: it would be too old."""
    reached, third = threading.Event(), threading.Event()

    def act(call: int, _interrupt: AbortSignal) -> int:
        (third if call > 2 else reached if call == 2 else threading.Event()).set()
        return LENGTH

    one = desk(Scripted(act))
    one.feed.take(0, 9)
    assert reached.wait(30)
    with one.buffer.changed:
        assert one.buffer.changed.wait_for(lambda: one.buffer.schedule.ready() == list(range(4, 12)), 30)
    assert not third.is_set()
    one.publish(1)
    assert third.wait(30)


def test_a_lost_engine_comes_back_and_nothing_is_lost(desk: Open) -> None:
    def act(call: int, _interrupt: AbortSignal) -> int:
        if call in (0, 2):
            raise EngineDeadError("it fell over")
        return LENGTH

    engine = Scripted(act)
    one, consumed, restarts = desk(engine), [], 0
    for now in range(3):
        groups, stats = one.feed.take(now, 3 - now)
        consumed += [group[0].group for group in groups]
        restarts += stats.restarts
        one.publish(now + 1)
    assert consumed == list(range(12))
    assert engine.recovered == restarts == 2
    assert sum("it fell over" in line for line in one.notes) == 2


def test_other_engines_do_the_work_of_one_that_does_not_restart(desk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_source, "RESTART_BACKOFF", 0.0)

    one, now = desk(Scripted(dead), Scripted()), 0
    while not any("does not come back" in line for line in one.notes):
        assert one.steps(1, now, more=9) == [list(range(4 * now, 4 * now + 4))]
        now += 1
    assert one.steps(2, now) == [list(range(4 * step, 4 * step + 4)) for step in (now, now + 1)]


def test_losing_the_last_engine_ends_the_run(desk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread sees that all engines are lost before it sees the error."""
    monkeypatch.setattr(async_source, "RESTART_BACKOFF", 0.0)
    fail, free = AsyncSource.fail, []

    def look(state: AsyncSource) -> None:
        if state.buffer.changed.acquire(blocking=False):
            free.append(state)
            state.buffer.changed.release()

    def fail_slowly(state: AsyncSource, error: BaseException) -> None:
        other = threading.Thread(target=look, args=(state,))
        other.start()
        other.join()
        fail(state, error)

    monkeypatch.setattr(AsyncSource, "fail", fail_slowly)
    with pytest.raises(TrimtabError, match="gone; no engine is left"):
        desk(Scripted(dead)).feed.take(0, 1)
    assert not free


def test_a_bug_in_one_engine_ends_the_run_of_two(desk: Open) -> None:
    called = threading.Event()

    def broken(_call: int, _interrupt: AbortSignal) -> int:
        called.set()
        raise ZeroDivisionError

    def second(_call: int, _interrupt: AbortSignal) -> int:
        assert called.wait(30)  # otherwise it might do all the work, and the broken engine would get no request
        return LENGTH

    with pytest.raises(ZeroDivisionError):
        desk(Scripted(broken), Scripted(second)).feed.take(0, 9)


class Gold(Scripted):
    """The first sample of every group is right, but for the group of `dull`, which has no signal."""

    def __init__(self, act: Act, dull: str) -> None:
        super().__init__(act)
        self.dull = dull
        self.asked: list[str] = []

    def generate(self, prompts: Sequence[Prompt], samples: int, sampling: SamplingParams, **keywords: Any) -> Any:
        self.asked = [prompt.problem.id for prompt in prompts]
        groups = super().generate(prompts, samples, sampling, **keywords)
        for prompt, group in zip(prompts, groups, strict=True):
            if prompt.problem.id != self.dull and group[0].finish_reason == "stop":
                ids = np.array(TOKENIZER.encode(TASK.gold(prompt.problem), add_special_tokens=False), dtype=np.int64)
                group[0] = replace(group[0], response_ids=ids, text=TASK.gold(prompt.problem))
        return groups


def test_a_group_that_a_batch_without_signal_made_too_old_is_ended(desk: Open) -> None:
    """Group 1 has no signal, so 3 is begun early; 1 takes a step all the same, as 2 is not ready: 3 is too old."""
    names = [prompt.problem.id for prompt in PromptStream(TASK, TOKENIZER, seed=0).at(0, 4)]
    assert len(set(names)) == 4
    gates = {names[1]: threading.Event(), names[2]: threading.Event()}
    began, ended = threading.Event(), threading.Event()
    crew: list[Gold] = []

    def act(engine: int) -> Act:
        def slow(_call: int, interrupt: AbortSignal) -> int:
            (name,) = crew[engine].asked
            if name != names[3]:
                assert name not in gates or gates[name].wait(30)
                return LENGTH
            began.set()
            until(interrupt)
            ended.set()
            return 1

        return slow

    crew += [Gold(act(0), names[1]), Gold(act(1), names[1])]
    one = desk(*crew, prompts=1, dynamic_sampling=True, refill_rounds=1)
    taken, stale = [], 0
    for now in range(4):
        groups, stats = one.feed.take(now, 9)
        taken += [group[0].group for group in groups]
        stale += stats.stale
        assert (now - np.array(versions(groups)) <= 2).all()
        if now < 2:
            gates[names[now + 1]].set()
        assert began.wait(30)  # under the first weights
        one.publish(now + 1)
    assert ended.wait(30)
    assert taken == [0, 1, 2, 4]
    assert stale == 2


def versions(groups: Sequence[Group]) -> list[list[int]]:
    return [trajectory.completion.policy_version.tolist() for group in groups for trajectory in group]


class Counting(Scripted):
    """Decodes ten tokens in a call, and one after new weights, as for a check of them."""

    def generate(self, *args: Any, **keywords: Any) -> Any:
        self.decoded_tokens += 10
        return super().generate(*args, **keywords)

    def update_weights(self, *args: Any, **keywords: Any) -> None:
        self.decoded_tokens += 1
        super().update_weights(*args, **keywords)


def test_continue_goes_on_under_the_new_weights(desk: Open) -> None:
    began = threading.Event()
    one = desk(Counting(pausing(1, began, then=3)), in_flight="continue")  # in the batch after the first one
    one.feed.take(0, 2)
    assert began.wait(30)
    one.publish(1)
    groups, stats = one.feed.take(1, 1)
    assert versions(groups) == [[0, 0, 0, 1]] * 8
    assert stats.decoded == 20
    assert stats.interrupted == 8
    assert {t.completion.finish_reason for group in groups for t in group} == {"stop"}


def test_finish_writes_every_response_under_one_version(desk: Open) -> None:
    began, published = threading.Event(), threading.Event()

    def act(call: int, interrupt: AbortSignal) -> int:
        if call == 1:
            began.set()
            assert published.wait(30)
            assert not interrupt.is_set()
        return LENGTH

    one = desk(Scripted(act))
    one.feed.take(0, 2)
    assert began.wait(30)
    one.publish(1)
    published.set()
    groups, _ = one.feed.take(1, 1)
    assert versions(groups) == [[0] * LENGTH] * 8


def test_a_buffer_for_one_sampler_is_empty_after_every_publication(desk: Open) -> None:
    """The bound of 9 updates alone would let responses of version 0 into every batch below."""
    one = desk(Scripted(), Scripted(), single_behavior=True, sync_every=3, max_lag=9)
    for now in range(9):
        groups, stats = one.feed.take(now, 9 - now)
        assert versions(groups) == [[now // 3 * 3] * LENGTH] * 8, now
        assert stats.stale == 0  # what could not be consumed was never begun
        if now % 3 == 2:
            one.publish(now + 1)


@pytest.mark.parametrize("max_lag", [None, 9])
def test_what_older_weights_wrote_is_stale_after_a_publication(max_lag: int | None) -> None:
    """Without a lag too: a batch of groups without signal leaves groups over that were generated for it."""
    buffer = Buffer(TrainerConfig(prompts=2, samples=2, sync_every=3, max_lag=max_lag), single_behavior=True)
    buffer.schedule.reserve(2, version=0)
    for now, stale in ((2, 0), (3, 2 * 2)):
        buffer.schedule.wait(now)
        buffer.expire()
        assert buffer.state()[0]["stale"] == stale


@pytest.mark.parametrize(("length", "asked"), [(LENGTH, 4), (1, 0)])
def test_aborted_episodes_are_not_asked_for_rewards(desk: Open, length: int, asked: int) -> None:
    calls: list[str] = []

    class Asked:
        def reset(self, id: str, **row: Any) -> None:
            del row
            self.id = id

        def get_reward(self) -> float:
            calls.append(self.id)
            return 0.0

    one = desk(Scripted(), environment=Asked)
    one.feed.collector.responses.respond(GroupRequest(0, 2), Scripted(lambda *_: length).generate)
    assert len(calls) == asked


def test_closing_waits_until_environments_are_closed(desk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_source, "SHUTDOWN_TIMEOUT", 0.01)
    began, opened, closed = threading.Event(), [], []

    class Slow:
        def reset(self, id: str, **row: Any) -> None:
            del row
            opened.append(id)

        def close(self) -> None:
            threading.Event().wait(0.3)  # longer than the threads of a run without environments get
            closed.append(self)

    one = desk(Scripted(pausing(0, began, then=1)), environment=Slow)
    threading.Thread(target=lambda: began.wait(30) and one.feed.fail(TrimtabError("later"))).start()
    with pytest.raises(TrimtabError, match="later"):
        one.feed.take(0, 1)
    one.feed.close()
    assert len(opened) == len(closed) == 8


def test_generation_pauses_while_an_engine_is_used_for_something_else(desk: Open) -> None:
    engine = Scripted()
    one = desk(engine)
    one.steps(2)
    calls = engine.calls

    def through(result: Engine) -> int:
        assert result is engine
        assert engine.published[-1] == (7, True)
        assert one.feed._is_paused()  # pyright: ignore[reportPrivateUsage]
        return engine.calls

    rested = one.feed.evaluate_with([("w", torch.zeros(1))], 7, through)
    assert rested >= calls
    assert one.steps(1, now=2) == [[8, 9, 10, 11]]
    assert (2, False) in engine.published[engine.published.index((7, True)) :]


def test_an_engine_lost_while_it_is_used_for_something_else_is_restarted_and_then_replaced(
    desk: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first engine never comes back, the second one at its third attempt."""
    first, second = Scripted(), Scripted()
    one, attempts = desk(first, second), list[int]()
    monkeypatch.setattr(one.feed, "sleep", lambda _: None)

    def through(result: Engine) -> int:
        attempts.append(result.policy_version)
        if result is first or second.recovered < 2:
            raise EngineDeadError("fell over")
        return 5

    assert one.feed.evaluate_with([("w", torch.zeros(1))], 7, through) == 5
    assert set(attempts) == {7}
    assert (first.recovered, second.recovered) == (async_source.MAX_RESTARTS, 2)


def test_the_state_of_responses_is_saved_and_restored(desk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    one, restored = desk(Scripted()), list[Any]()
    responses = one.feed.collector.responses
    monkeypatch.setattr(responses, "state", lambda: ({"of_responses": 5}, {"responses.bin": b"x"}))
    monkeypatch.setattr(responses, "restore", lambda meta, files: restored.append((meta, files)))
    tensors, meta, files = one.feed.state(0)
    assert (meta["of_responses"], meta["published"], files["responses.bin"]) == (5, 0, b"x")
    one.feed.restore(tensors, meta, files)
    assert restored == [(meta, files)]


def test_closing_ends_a_call_in_progress(desk: Open) -> None:
    began = threading.Event()
    engine = Scripted(pausing(1, began))
    one = desk(engine)
    one.feed.take(0, 5)
    assert began.wait(30)
    one.feed.close()
    assert engine.closed.is_set()


def test_a_restored_feed_goes_on_with_what_was_ready_and_asks_again_for_the_rest(desk: Open) -> None:
    """Killed with one batch ready and one half written: both are consumed, each group once."""
    began = threading.Event()
    one = desk(Scripted(pausing(2, began)))
    assert [group[0].group for group in one.feed.take(0, 4)[0]] == [0, 1, 2, 3]
    one.publish(1)
    assert began.wait(30)
    with one.buffer.changed:
        assert one.buffer.changed.wait_for(lambda: one.buffer.schedule.ready() == [4, 5, 6, 7], 30)
    tensors, meta, files = one.feed.state(1)
    assert (meta["ready"], meta["unfinished"], meta["drawn"]) == ([4, 5, 6, 7], [8, 9, 10, 11], 12)
    assert not tensors
    engine = Scripted()
    again = desk(engine)
    again.publish(1)
    again.feed.restore(tensors, meta, files)
    assert again.steps(3, now=1) == [list(range(4 * i, 4 * i + 4)) for i in range(1, 4)]
    assert engine.calls == 2


def test_published_weights_that_lag_are_part_of_the_state(desk: Open) -> None:
    one = desk(Scripted(), sync_every=3)
    one.feed.publish([("w", torch.arange(3.0)), ("x", torch.ones(2))], 4)
    tensors, meta, _ = one.feed.state(5)
    assert meta["published"] == 4
    assert tensors["engine"]["w"].tolist() == [0.0, 1.0, 2.0]


def test_without_a_lag_asynchronous_generation_gives_the_tokens_of_synchronous_generation(
    scorer: rewards.Scorer,
) -> None:
    """Synchronous is asynchronous with lag 0: the same groups with the same bits, from either feed."""
    model, _ = build(0)
    config = load_config({"trainer": {"prompts": 4, "samples": 4}})

    def source_of(kind: str) -> RolloutSource:
        engine = EmbeddedEngine(model, TOKENIZER, torch.float32)
        responses = ResponseSampler(config, PromptStream(TASK, TOKENIZER, seed=0), SAMPLING)
        collector = Collector(config, responses, scorer)
        buffer = Buffer(config.trainer)
        return (
            SyncSource(collector, buffer, engine)
            if kind == "synchronous"
            else AsyncSource(collector, buffer, [engine], print)
        )

    def take(feed: RolloutSource, steps: range) -> list[tuple[int, list[int], list[float], float]]:
        taken = []
        for now in steps:
            if feed.published != now:
                feed.publish(model.state_dict().items(), now)
            groups, _ = feed.take(now, 4 - now)
            taken += [
                (t.group, t.completion.response_ids.tolist(), t.completion.logp_behavior.tolist(), t.reward)
                for group in groups
                for t in group
            ]
        return taken

    synchronous, asynchronous = source_of("synchronous"), source_of("asynchronous")
    taken = take(synchronous, range(4))
    assert take(asynchronous, range(4)) == taken
    # What one has begun the other goes on with (a run moves to a cluster): the same groups again.
    half, rest = source_of("synchronous"), source_of("asynchronous")
    first = take(half, range(2))
    half.publish(model.state_dict().items(), 2)
    state = half.state(2)
    rest.publish(model.state_dict().items(), 2)
    rest.restore(*state)
    assert first + take(rest, range(2, 4)) == taken
    for feed in (synchronous, asynchronous, half, rest):
        feed.close()
