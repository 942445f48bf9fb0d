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
from trimtab.training.experts import Experts
from trimtab.training.prefixes import PrefixPool
from trimtab.training.seeds import derive
from trimtab.types import EXTERNAL, Completion, Engine, Prompt, Sampling, Task, Trajectory

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
        prompts = self.at(self.position, count)
        self.position += count
        return prompts

    def at(self, position: int, count: int) -> list[Prompt]:
        """The `count` prompts from `position` on, without moving."""
        return [self._prompt(position + offset) for offset in range(count)]

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
    decoded: int = 0
    prefilled: int = 0
    traces: int = 0
    traces_dropped: int = 0
    traces_missing: int = 0
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
    new is sampled and are part of every checkpoint, as are the prefixes that `prefixes` still holds.
    """

    config: Config
    stream: PromptStream
    engine: Engine
    scorer: Scorer
    sampling: Sampling
    prefixes: PrefixPool | None = None
    experts: Experts | None = None
    groups_drawn: int = 0
    pending: list[Group] = field(default_factory=list)
    discarded: int = 0

    def collect(self, now: int) -> tuple[list[Group], CollectStats]:
        """The groups of the step that starts after `now` updates; without dynamic sampling, the next `prompts` ones."""
        trainer, stats = self.config.trainer, CollectStats(stale=self.discarded)
        self.discarded = 0
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

    def discard_pending(self) -> None:
        """Empty the buffer; the next step reports what was in it as stale."""
        self.discarded += sum(len(group) for group in self.pending)
        self.pending = []

    def _sample(self, count: int, stats: CollectStats) -> list[Group]:
        start = time.perf_counter()
        decoded, prefilled = self.engine.decoded, self.engine.prefilled
        prompts, completions = self._generate(count, stats)
        stats.decoded += self.engine.decoded - decoded
        stats.prefilled += self.engine.prefilled - prefilled
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
        own = [len(answer.response_ids) for _, answer in pairs if not _is_external(answer)]
        stats.generated += len(own)
        stats.response_tokens += sum(own)
        stats.no_signal += sum(not has_signal(group) for group in groups)
        stats.seconds_generating += middle - start
        stats.seconds_scoring += time.perf_counter() - middle
        return groups

    def _generate(self, count: int, stats: CollectStats) -> tuple[list[Prompt], list[list[Completion]]]:
        """The next prompts with their responses: sampled whole, continued from prefixes, or joined by traces."""
        seed, samples = derive(self.config.seed, "rollout", self.groups_drawn), self.config.trainer.samples
        pool = self.prefixes
        if pool is not None and not pool.due:
            prompts, prefixes = pool.take(count)
            stats.response_tokens -= sum(len(prefix.response_ids) for group in prefixes for prefix in group)
            completions = self.engine.generate(prompts, samples, self.sampling, seed=seed, prefixes=prefixes)
            pool.observe([len(answer.response_ids) for answers in completions for answer in answers])
            return prompts, completions
        prompts = self.stream.take(count)
        if self.experts is not None:
            return prompts, self._join_traces(self.experts, prompts, seed, stats)
        completions = self.engine.generate(prompts, samples, self.sampling, seed=seed)
        if pool is not None:
            pool.observe([len(answer.response_ids) for answers in completions for answer in answers])
            # The weights of this moment are the historical policy of the batches to come: no second copy is kept.
            if pool.batches:
                stats.response_tokens += pool.refill(self.stream.take(count * pool.batches))
        return prompts, completions

    def _join_traces(
        self, experts: Experts, prompts: Sequence[Prompt], seed: int, stats: CollectStats
    ) -> list[list[Completion]]:
        """External traces take the place of sampled responses, so that every group has `trainer.samples` members."""
        assert self.config.expert is not None
        samples, wanted = self.config.trainer.samples, self.config.expert.per_group
        before = experts.dropped, experts.missing
        epoch = len(self.stream.task.train)
        traces = [
            experts.take(prompt, wanted, turn=(self.groups_drawn + index) // epoch)
            for index, prompt in enumerate(prompts)
        ]
        stats.traces += sum(len(found) for found in traces)
        stats.traces_dropped += experts.dropped - before[0]
        stats.traces_missing += experts.missing - before[1]
        if not any(traces):
            stats.errors.append(
                f"no external trace joined: {experts.dropped - before[0]} were too long, "
                f"{experts.missing - before[1]} of {len(prompts)} prompts have none"
            )
        most = samples - min(len(found) for found in traces)
        sampled = self.engine.generate(prompts, most, self.sampling, seed=seed)
        return [answers[: samples - len(found)] + found for answers, found in zip(sampled, traces, strict=True)]

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
            external = _is_external(answer)
            if not external and not np.isfinite(answer.logp_behavior).all():
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
                off_policy=external,
            )
            if not external:
                check_trajectory(trajectory)
            group.append(trajectory)
        return group


def _is_external(answer: Completion) -> bool:
    return bool(len(answer.policy_version)) and int(answer.policy_version[0]) == EXTERNAL


def _oldest(group: Group) -> float:
    """The oldest policy that wrote in the group; external traces have none and do not age."""
    return min((int(t.completion.policy_version.min()) for t in group if not t.off_policy), default=math.inf)


def has_signal(group: Group) -> bool:
    """Whether the first reward (correctness, by convention) tells the members apart; shaping rewards do not count."""
    if not group:
        return False
    name = next(iter(group[0].rewards))
    first = [trajectory.rewards[name] for trajectory in group]
    return max(first) > min(first)
