"""An engine whose calls are scripted by the test, and a source of batches over such engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from trimtab.trainer import rewards, tasks
from trimtab.trainer.config import load_config
from trimtab.trainer.models.laboratory import build
from trimtab.trainer.rollout.async_source import AsyncSource
from trimtab.trainer.rollout.buffer import Buffer
from trimtab.trainer.rollout.collector import Collector
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.trainer.rollout.responses import ResponseSampler
from trimtab.types import AbortSignal, Completion, Engine, Prompt, SamplingParams, TurnHandler

_, TOKENIZER = build(0)
TASK = tasks.build("sort", digits=3, holdout=8)
LENGTH = 4
SAMPLING = SamplingParams(max_tokens=LENGTH, stop=(".",))
# What one call does: (number of the call from 0, the interrupt) -> tokens to write in all. It may wait, and may raise.
Act = Callable[[int, AbortSignal], int]


def whole(_call: int, _interrupt: AbortSignal) -> int:
    return LENGTH


class Scripted:
    """Writes "12." and so on, token by token, up to as many as `act` says; the rest is interrupted."""

    def __init__(self, act: Act = whole) -> None:
        self.policy_version, self.decoded_tokens, self.prefilled_tokens = -1, 0, 0
        self.act = act
        self.calls = 0
        self.recovered = 0
        self.published: list[tuple[int, bool]] = []
        self.closed = threading.Event()

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: SamplingParams,
        *,
        seed: int,
        prefixes: Sequence[Sequence[Completion]] | None = None,
        turns: TurnHandler | None = None,
        abort: AbortSignal | None = None,
    ) -> list[list[Completion]]:
        del sampling, seed, turns
        call, self.calls = self.calls, self.calls + 1
        version = self.policy_version
        length = self.act(call, abort or threading.Event())
        begun = prefixes or [[None] * samples for _ in prompts]
        return [
            [self._write(prefix, length, version, sample) for sample, prefix in enumerate(group)] for group in begun
        ]

    def _write(self, prefix: Completion | None, length: int, version: int, sample: int) -> Completion:
        old = np.empty(0, np.int64) if prefix is None else prefix.policy_version
        if len(old) == LENGTH:
            assert prefix is not None
            return prefix
        versions = np.concatenate([old, np.full(max(0, length - len(old)), version)])
        text = f"{sample}12."[: len(versions)]
        return Completion(
            response_ids=np.array(TOKENIZER.encode(text, add_special_tokens=False), dtype=np.int64),
            logp_behavior=np.full(len(versions), -1.0, dtype=np.float32),
            policy_version=versions,
            finish_reason="stop" if len(versions) == LENGTH else "abort",
            text=text,
        )

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, as_is: bool = False) -> None:
        assert [name for name, _ in weights] == ["w"]
        self.policy_version = version
        self.published.append((version, as_is))

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        return ()

    def restart(self) -> None:
        self.recovered += 1
        self.policy_version = -1

    def close(self) -> None:
        self.closed.set()


class Desk:
    """A source of batches that a test controls; close it."""

    def __init__(
        self, engines: Sequence[Engine], scorer: rewards.Scorer, *, single_behavior: bool = False, **trainer: Any
    ) -> None:
        config = load_config({"trainer": {"prompts": 4, "samples": 2, "max_lag": 2, **trainer}})
        responses = ResponseSampler(config, PromptStream(TASK, TOKENIZER, seed=0), SAMPLING)
        collector = Collector(config, responses, scorer)
        self.notes: list[str] = []
        self.buffer = Buffer(config.trainer, single_behavior=single_behavior)
        self.feed = AsyncSource(collector, self.buffer, engines, self.notes.append)
        self.updates = config.trainer.minibatches * config.trainer.epochs

    def publish(self, version: int) -> None:
        self.feed.publish([("w", torch.zeros(1))], version)

    def steps(self, count: int, now: int = 0, more: int = 0) -> list[list[int]]:
        """The groups of so many batches, each followed by its updates and a publication; `more` are to come."""
        taken: list[list[int]] = []
        for left in range(count, 0, -1):
            groups, _ = self.feed.take(now, left + more)
            for trajectory in (trajectory for group in groups for trajectory in group):
                assert (now - trajectory.completion.policy_version <= 2).all()
            taken.append([group[0].group for group in groups])
            now += self.updates
            self.publish(now)
        return taken
