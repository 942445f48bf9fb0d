"""From problems to scored groups: draw prompts, sample, reward, and (DAPO) replace groups that teach nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimtab import tasks
from trimtab.config import Config
from trimtab.rewards import Score, Scorer
from trimtab.rollout.contract import check_trajectory
from trimtab.training.seeds import derive
from trimtab.types import Completion, Engine, Prompt, Sampling, Task, Trajectory

Group = list[Trajectory]


@dataclass
class PromptStream:
    """Problems of the training split in an order that is a pure function of (seed, position)."""

    task: Task
    tokenizer: Any
    seed: int
    position: int = 0
    _order: tuple[int, np.ndarray] | None = field(default=None, repr=False)

    @property
    def pad_id(self) -> int:
        return int(self.tokenizer.pad_token_id)

    def take(self, count: int) -> list[Prompt]:
        prompts = [self._prompt(self.position + offset) for offset in range(count)]
        self.position += count
        return prompts

    def _prompt(self, position: int) -> Prompt:
        epoch, index = divmod(position, len(self.task.train))
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng(derive(self.seed, "order", epoch))
            self._order = (epoch, rng.permutation(len(self.task.train)))
        return tasks.encode(self.task, self.task.train[int(self._order[1][index])], self.tokenizer)


@dataclass
class CollectStats:
    """What happened while a batch was collected; all counts are of this step."""

    generated: int = 0
    response_tokens: int = 0
    failed_rewards: int = 0
    dropped: int = 0
    stale: int = 0
    no_signal: int = 0
    refilled: int = 0
    errors: list[str] = field(default_factory=list)
    seconds_generating: float = 0.0
    seconds_scoring: float = 0.0


@dataclass
class Collector:
    """Keeps the data side of a run: where the stream stands, how many groups were drawn, and what is still pending.

    `pending` holds groups sampled but not yet trained on (surplus of oversampling). They are consumed before anything
    new is sampled and are part of every checkpoint.
    """

    config: Config
    stream: PromptStream
    engine: Engine
    scorer: Scorer
    sampling: Sampling
    groups_drawn: int = 0
    pending: list[Group] = field(default_factory=list)

    def collect(self, now: int) -> tuple[list[Group], CollectStats]:
        """The groups of the step that starts after `now` updates; without dynamic sampling, the next `prompts` ones."""
        trainer, stats = self.config.trainer, CollectStats()
        if not trainer.dynamic_sampling:
            return self._sample(trainer.prompts, stats), stats
        ready, spare = self._fresh(now, stats), []
        for round_ in range(trainer.refill_rounds):
            missing = trainer.prompts - len(ready)
            if missing <= 0:
                break
            sampled = self._sample(math.ceil(missing * trainer.oversample), stats)
            stats.refilled += len(sampled) if round_ else 0
            for group in sampled:
                (ready if has_signal(group) else spare).append(group)
        # A batch of nothing but equal rewards still carries KL and entropy: better than an empty step.
        batch = ready[: trainer.prompts] or spare[: trainer.prompts]
        self.pending = ready[trainer.prompts :]
        return batch, stats

    def _fresh(self, now: int, stats: CollectStats) -> list[Group]:
        """Take what was left over, without what has become too old to be consumed."""
        limit, groups = self.config.trainer.max_lag, self.pending
        self.pending = []
        if limit is None:
            return groups
        fresh = [group for group in groups if now - _oldest(group) <= limit]
        stats.stale += sum(len(group) for group in groups) - sum(len(group) for group in fresh)
        return fresh

    def _sample(self, count: int, stats: CollectStats) -> list[Group]:
        prompts = self.stream.take(count)
        start = time.perf_counter()
        seed = derive(self.config.seed, "rollout", self.groups_drawn)
        completions = self.engine.generate(prompts, self.config.trainer.samples, self.sampling, seed=seed)
        middle = time.perf_counter()
        pairs = [
            (prompt.problem, answer) for prompt, answers in zip(prompts, completions, strict=True) for answer in answers
        ]
        scores = iter(self.scorer.score(pairs))
        groups = [
            self._group(prompt, self.groups_drawn + index, [(answer, next(scores)) for answer in answers], stats)
            for index, (prompt, answers) in enumerate(zip(prompts, completions, strict=True))
        ]
        self.groups_drawn += count
        stats.generated += len(pairs)
        stats.response_tokens += sum(len(answer.response_ids) for _, answer in pairs)
        stats.no_signal += sum(not has_signal(group) for group in groups)
        stats.seconds_generating += middle - start
        stats.seconds_scoring += time.perf_counter() - middle
        return groups

    def _group(
        self, prompt: Prompt, number: int, scored: Sequence[tuple[Completion, Score]], stats: CollectStats
    ) -> Group:
        """The usable trajectories of one prompt. What cannot be used is counted with its reason, never guessed."""
        group: Group = []
        for answer, score in scored:
            if score.total is None:
                stats.failed_rewards += 1
                stats.errors.append(score.error or "a reward failed")
                continue
            if not np.isfinite(answer.logp_behavior).all():
                stats.dropped += 1
                stats.errors.append(f"problem {prompt.problem.id!r}: the engine reported a non-finite log-prob")
                continue
            cut = self.config.trainer.mask_truncated and answer.finish == "length"
            trajectory = Trajectory(
                prompt=prompt,
                group=number,
                completion=answer,
                sampling=self.sampling,
                loss_mask=np.full(len(answer.response_ids), not cut, dtype=np.bool_),
                reward=score.total,
                rewards=score.parts,
            )
            check_trajectory(trajectory)
            group.append(trajectory)
        return group


def _oldest(group: Group) -> int:
    return min(int(trajectory.completion.policy_version.min()) for trajectory in group)


def has_signal(group: Group) -> bool:
    """Whether the first reward (correctness, by convention) tells the members apart; shaping rewards do not count."""
    if not group:
        return False
    name = next(iter(group[0].rewards))
    first = [trajectory.rewards[name] for trajectory in group]
    return max(first) > min(first)
