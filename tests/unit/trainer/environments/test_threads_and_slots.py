"""Where methods of environments run, when their time begins, and what their draws are derived from."""

from __future__ import annotations

import signal
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.trainer.environments.test_episodes import (
    LIMITS,
    Counter,
    answer,
    append,
    encode,
    finished,
    start,
    text_of,
)

from trimtab.errors import TrimtabError
from trimtab.trainer.environments.background import BackgroundCall, EnvironmentThread, in_background
from trimtab.trainer.environments.episodes import EpisodeRunner, Episodes, reset_seed
from trimtab.trainer.environments.formats import Tag
from trimtab.types import Problem

FOREVER = float("inf")


class Database(Counter):
    """Opens a connection that only the thread of `reset` may use, and uses it in every method."""

    def reset(self, **row: Any) -> None:
        super().reset(**row)
        self.connection = sqlite3.connect(":memory:")

    def word(self, text: str) -> str:
        return self.connection.execute("select ?", (text,)).fetchone()[0]

    word.__doc__ = Counter.word.__doc__

    def get_reward(self) -> float:
        return float(self.word("25"))

    def close(self) -> None:
        self.connection.close()


def test_what_is_bound_to_a_thread_works_in_every_method(tokenizer: Any, recwarn: pytest.WarningsRecorder) -> None:
    episodes = start(tokenizer, Database, samples=1)
    turn = append(tokenizer, None, "<word>20</word>")
    assert text_of(tokenizer, answer(episodes, turn)) == "<output>20</output>"
    [[completion]] = episodes.finish([[turn]])
    assert (completion.outcome.reward, completion.outcome.failure) == (25.0, None)
    episodes.close()
    assert not [warning for warning in recwarn if "close()" in str(warning.message)]


def test_constructors_run_one_after_another(tokenizer: Any) -> None:
    running, together = threading.Lock(), threading.Event()

    class Slow(Counter):
        def __init__(self) -> None:
            if not running.acquire(blocking=False):
                together.set()
                return
            together.wait(0.05)  # time for the next one to begin
            running.release()

    start(tokenizer, Slow, samples=4).close()
    assert not together.is_set()


def test_a_constructor_that_hangs_costs_its_own_episode(tokenizer: Any) -> None:
    numbers, release = iter(range(6)), threading.Event()

    class Hanging(Counter):
        def __init__(self) -> None:
            if next(numbers) == 3:
                release.wait()

    episodes = start(tokenizer, Hanging, samples=6, limits=LIMITS.model_copy(update={"timeout": 0.2}))
    release.set()
    turn = append(tokenizer, None, "5")
    failures = [completion.outcome.failure for completion in episodes.finish([[turn] * 6])[0]]
    assert failures == [None] * 3 + ["the constructor did not return within 0.2 s (environment.timeout)"] + [None] * 2
    episodes.close()


def test_an_environment_whose_reset_is_given_up_is_closed(tokenizer: Any) -> None:
    release, closed = threading.Event(), []

    class Slow(Counter):
        def reset(self, **row: Any) -> None:
            del row
            release.wait()

        def close(self) -> None:
            closed.append(release.is_set())

    start(tokenizer, Slow, samples=1, limits=LIMITS.model_copy(update={"timeout": 0.05})).close()
    release.set()
    assert closed == [False]


def test_close_waits_for_a_reset_that_is_interrupted(tokenizer: Any) -> None:
    """The text of the first `reset` ends the request while the second one still runs."""
    first, events = threading.Event(), []

    class Begins(Counter):
        def reset(self, **row: Any) -> str | None:
            if row["answer"] == "1":
                first.wait()
                return "text that no prompt shows"
            first.set()
            threading.Event().wait(0.3)  # still runs when the first one has returned
            events.append("reset")
            return None

        def close(self) -> None:
            events.append("close")

    fixed = encode(Problem("p", "How much?", ""), tokenizer)
    problems = [Problem(name, "How much?", name) for name in ("1", "2")]
    with pytest.raises(TrimtabError, match="is not in the prompt"):
        start(tokenizer, Begins, samples=1, problems=problems, encoder=lambda *_: fixed)
    assert events.index("reset") < len(events) - 1, "its close() came after it"
    assert sorted(events) == ["close", "close", "reset"]


def test_an_interrupted_construction_closes_what_was_made_and_what_is_being_made(tokenizer: Any) -> None:
    numbers, begun, release = iter(range(3)), threading.Event(), threading.Event()
    closed: list[int] = []

    class Numbered(Counter):
        def __init__(self) -> None:
            self.number = next(numbers)
            if self.number == 1:
                begun.set()
                release.wait()

        def close(self) -> None:
            closed.append(self.number)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.get_ident()

    def press() -> None:
        begun.wait()
        signal.pthread_kill(main, signal.SIGINT)
        release.set()

    interrupt = threading.Thread(target=press)
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            start(tokenizer, Numbered, samples=3)
    finally:
        signal.signal(signal.SIGINT, handler)
        interrupt.join()
    assert sorted(closed) == [0, 1], "the one in progress was waited for"


def test_closing_waits_for_a_call_in_progress_and_drops_one_that_waits(tokenizer: Any) -> None:
    events: list[str] = []
    begun, release = threading.Event(), threading.Event()

    class Slow(Counter):
        def add(self, step: int) -> int:
            """Adds.

            Args:
                step: what is added.
            """
            begun.set()
            release.wait()
            events.append(f"add {step}")
            return step

        def close(self) -> None:
            events.append("close")

    runner = EpisodeRunner(Slow, Tag(("add",)), LIMITS, tokenizer, 200, encode, concurrent_calls=1)
    episodes = Episodes(runner, [encode(Problem("p1", "How much?", "3"), tokenizer)], 2, [0])
    episodes.submit(0, 0, append(tokenizer, None, "<add>1</add>"))
    assert begun.wait(10.0)
    episodes.submit(0, 1, append(tokenizer, None, "<add>2</add>"))
    closing = threading.Thread(target=episodes.close)
    closing.start()
    release.set()
    closing.join()
    assert events == ["add 1", "close", "close"]
    assert runner.slots.acquire(timeout=10.0)


def test_a_call_that_waits_for_a_slot_uses_up_no_time() -> None:
    slots, begun, release = threading.Semaphore(1), threading.Event(), threading.Event()

    def hold() -> bool:
        begun.set()
        return release.wait()

    first = EnvironmentThread().start(BackgroundCall(hold, 30.0, slots=slots))
    assert begun.wait(30.0)
    second = EnvironmentThread().start(BackgroundCall(lambda: "ran", 0.2, slots=slots))
    assert not first.wait(0.5)
    assert not second.wait(0.0), "it waited .5 s, longer than its time, and has not begun"
    release.set()
    assert second.wait(FOREVER)
    assert (first.value(), second.value()) == (True, "ran")


def test_a_thread_whose_call_hangs_is_replaced() -> None:
    thread, release = EnvironmentThread(), threading.Event()
    hanging = thread.start(BackgroundCall(release.wait, 0.1))
    later = thread.start(BackgroundCall(threading.get_ident, 30.0))
    assert later.wait(10.0)
    again = thread.start(BackgroundCall(threading.get_ident, 30.0))
    assert again.wait(10.0)
    assert later.value() == again.value(), "and the new one is kept"
    release.set()
    assert hanging.wait(10.0)


def test_a_thread_ends_after_its_last_call() -> None:
    call = in_background(threading.current_thread, 30.0)
    assert call.wait(10.0)
    call.value().join(10.0)
    assert not call.value().is_alive()


def seeds_of(tokenizer: Any, seed: int, problems: list[Problem]) -> list[int]:
    seen: list[int] = []

    class Drawing(Counter):
        def reset(self, seed: int, **row: Any) -> None:
            del row
            seen.append(seed)

    runner = EpisodeRunner(Drawing, Tag(("add",)), LIMITS, tokenizer, 200, encode)
    prompts = [encode(problem, tokenizer) for problem in problems]
    Episodes(runner, prompts, 2, [reset_seed(seed, number) for number in range(len(prompts))]).close()
    return sorted(seen)


def test_reset_gets_a_seed_that_repeats_and_differs_between_problems_and_requests(tokenizer: Any) -> None:
    problems = [Problem("a", "How much?", "3"), Problem("b", "How many?", "4")]
    seeds = seeds_of(tokenizer, 1, problems)
    assert seeds == seeds_of(tokenizer, 1, problems)
    assert len(seeds) == 4
    assert len(set(seeds)) == 2, "one for both responses to a problem"
    assert not set(seeds) & set(seeds_of(tokenizer, 2, problems))
    own = [replace(problem, extra={"seed": 7}) for problem in problems]
    assert seeds_of(tokenizer, 1, own) == [7] * 4, "a column of the task counts"


def test_reset_without_keywords_gets_the_columns_only(tokenizer: Any) -> None:
    class Strict(Counter):
        def reset(self, id: str, question: str, answer: str, level: int) -> None: ...

    turn = append(tokenizer, None, "5")
    assert finished(start(tokenizer, Strict), turn) == ("stop", None)


def delegate(broken: bool) -> type:
    """A class that passes unknown attributes on to what its `reset` makes; without it each look-up recurses."""

    class Delegating:
        def reset(self, **row: Any) -> None:
            del row
            if broken:
                raise OSError("no server")
            self.inner = Counter()

        def add(self, step: int) -> int:
            """Adds.

            Args:
                step: what is added.
            """
            return step

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        @property
        def close(self) -> Callable[[], None]:
            raise ValueError("closed twice")

    return Delegating


@pytest.mark.parametrize(("broken", "failure"), [(True, "reset raised OSError: no server"), (False, None)])
def test_attributes_that_raise_cost_no_run(tokenizer: Any, broken: bool, failure: str | None) -> None:
    episodes = start(tokenizer, delegate(broken))
    assert finished(episodes, append(tokenizer, None, "5")) == ("stop", failure)
    with pytest.warns(UserWarning, match=r"close\(\) of an environment raised ValueError: closed twice"):
        episodes.close()


def test_a_text_of_reset_whose_last_blank_the_template_removes(tokenizer: Any) -> None:
    class Board(Counter):
        def reset(self, **row: Any) -> str:
            del row
            return "\n. . x\n"

    def trimmed(problem: Problem, tokenizer: Any) -> Any:
        return encode(replace(problem, question=problem.question.strip()), tokenizer)

    episodes = start(tokenizer, Board, samples=1, problems=[Problem("a", "Play.", "")], encoder=trimmed)
    assert episodes.prompts[0].text == "Question: Play.\n. . x\nAnswer:"
    episodes.close()
