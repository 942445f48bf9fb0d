"""Turn handlers for tests of engines."""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.runs.trajectories import read
from trimtab.trainer.environments.formats import Call
from trimtab.types import EXTERNAL_VERSION, Completion, FinishReason, TurnResult


class ScriptedTurns:
    """Answers every turn with one to seven tokens that are a pure function of the response so far.

    Ends a response after `turns` turns, or where an observation would not fit into `max_tokens`.

    Args:
        late: prompt -> how often a result is asked for before it is known.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        turns: int = 3,
        max_turn_tokens: int = 1000,
        vocabulary: int = 80,
        late: dict[int, int] | None = None,
    ) -> None:
        self.max_turn_tokens = max_turn_tokens
        self.submitted: Counter[tuple[int, int]] = Counter()
        self._max_tokens, self._turns, self._vocabulary, self._late = max_tokens, turns, vocabulary, late or {}
        self._results: dict[tuple[int, int], TurnResult] = {}
        self._asked: Counter[tuple[int, int]] = Counter()

    def submit(self, prompt: int, sample: int, completion: Completion) -> FinishReason | None:
        self.submitted[prompt, sample] += 1
        self._asked[prompt, sample] = 0
        self._results[prompt, sample] = self.answer(completion)

    def result(self, prompt: int, sample: int, timeout: float) -> TurnResult | None:
        del timeout
        self._asked[prompt, sample] += 1
        return self._results[prompt, sample] if self._asked[prompt, sample] > self._late.get(prompt, 0) else None

    def answer(self, completion: Completion) -> TurnResult:
        ids = completion.response_ids
        rng = np.random.default_rng(zlib.crc32(ids.tobytes()))
        observation = rng.integers(2, self._vocabulary, rng.integers(1, 8))
        if int(completion.turn[-1]) + 1 == self._turns or len(ids) + len(observation) >= self._max_tokens:
            return TurnResult(np.empty(0, np.int64), "stop")
        return TurnResult(observation, None)


class FailingTurns(ScriptedTurns):
    """Raises when the first result is asked for."""

    def result(self, prompt: int, sample: int, timeout: float) -> TurnResult | None:
        raise ZeroDivisionError(prompt, sample, timeout)


class Counting:
    """An environment whose tool returns the number of its calls, as a digit."""

    def reset(self, **row: Any) -> None:
        del row
        self.calls = 0

    def count(self, text: str) -> str:
        """Counts.

        Args:
            text: anything.
        """
        del text
        self.calls += 1
        return str(self.calls % 10)


class AfterThree:
    """The format of a model that knows of no calls: every 3 is one."""

    stop = ("3",)

    def parse(self, text: str) -> Call | None:
        return Call(None, text) if text.endswith("3") else None

    def render(self, result: str) -> str:
        return f"{result} "


def check_episodes(run: Path) -> int:
    """Asserts that no token of a result is trained and every token has its turn; returns the number of results."""
    results = trained = 0
    for file in sorted((run / "trajectories").iterdir()):
        for row in read(file):
            one, outside = row.trajectory.completion, ~row.trajectory.completion.sampled
            assert not row.trajectory.loss_mask[outside].any()
            trained += row.trajectory.loss_mask[one.sampled].any()  # of a void response nothing is
            assert np.isnan(one.logp_behavior[outside]).all()
            assert np.isfinite(one.logp_behavior[one.sampled]).all()
            assert ((one.policy_version == EXTERNAL_VERSION) == outside).all()
            # A turn is sampled tokens, then those of its result: it ends where sampling begins again.
            begins = one.sampled & ~np.concatenate([[True], one.sampled[:-1]])
            assert (one.turn == np.cumsum(begins)).all()
            results += int(one.turn[-1])
    assert trained > 0
    return results
