"""The environment "python": calls wait for a worker without losing time, and errors of the code are counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.trainer.environments.test_episodes import answer, append, encode, text_of
from transformers import AutoTokenizer

from trimtab.errors import TrimtabError
from trimtab.trainer.environments import BuiltEnvironment, EnvironmentSpec, build
from trimtab.trainer.models import bundled
from trimtab.trainer.sandbox.python_pool import SandboxName, sandbox_unavailable
from trimtab.types import EpisodeOutcome, Problem

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(bundled.folder())


@pytest.fixture(scope="module", params=["monty", "bubblewrap"])
def environment(request: pytest.FixtureRequest) -> Iterator[BuiltEnvironment]:
    sandbox: SandboxName = request.param
    reason = sandbox_unavailable(sandbox)
    if reason is not None:
        pytest.skip(reason)
    built = build(EnvironmentSpec("python", timeout=5.5, options={"sandbox": sandbox, "seconds": 0.5, "workers": 1}))
    yield built
    built.close()


def run(environment: BuiltEnvironment, tokenizer: Any, codes: list[str]) -> list[tuple[str, EpisodeOutcome]]:
    """The result of each code, as the call of a response of its own, and the outcome of its episode."""
    runner = environment.runner(tokenizer, 400, encode)
    episodes = runner.start([encode(Problem("p", "How much?", ""), tokenizer)], len(codes), reset_seeds=[0])
    turns = [append(tokenizer, None, f"<python>{code}</python>") for code in codes]
    for sample, turn in enumerate(turns):
        episodes.submit(0, sample, turn)
    results = [text_of(tokenizer, answer(episodes, turn, sample)) for sample, turn in enumerate(turns)]
    [completions] = episodes.finish([turns])
    episodes.close()
    outcomes = [completion.outcome for completion in completions]
    return [(text, outcome) for text, outcome in zip(results, outcomes, strict=True) if outcome is not None]


def test_code_that_loops_costs_no_other_episode(environment: BuiltEnvironment, tokenizer: Any) -> None:
    """Twelve loops of half a second before one worker: the last call waits longer than `environment.timeout`."""
    results = run(environment, tokenizer, [*["while True: pass"] * 12, "6 * 7"])
    assert [outcome.failure for _, outcome in results] == [None] * 13
    assert results[-1][0] == "<output>42</output>"
    assert all(text.startswith("<output>Error: ") for text, _ in results[:-1])


@pytest.mark.parametrize(
    ("code", "text", "errors"),
    [
        ("6 * 7", "<output>42</output>", 0),
        (" 6 * 7 ", "<output>42</output>", 0),
        ("\n    x = 6\n    x * 7\n", "<output>42</output>", 0),
        ("1 / 0", "ZeroDivisionError", 1),
        ("nonsense(", "SyntaxError", 1),
        ("while True: pass", "Error: ", 1),
        ("print(5)\n1 / 0", "<output>Error: 5\n", 1),
    ],
)
def test_errors_of_the_code_are_counted(
    environment: BuiltEnvironment, tokenizer: Any, code: str, text: str, errors: int
) -> None:
    [(result, outcome)] = run(environment, tokenizer, [code])
    assert text in result
    assert (outcome.calls, outcome.tool_errors, outcome.failure) == (1, errors, None)


def test_a_sandbox_without_time_to_end_a_call_is_refused() -> None:
    with pytest.raises(TrimtabError, match=r"environment\.timeout = 10 s is below 11 s"):
        build(EnvironmentSpec("python", timeout=10.0, options={"seconds": 6.0}))
