"""Generates and scores groups: takes prompts, samples responses and computes their rewards."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from trimtab.trainer.config import Config
from trimtab.trainer.environments.episode import EpisodeCounts
from trimtab.trainer.environments.episodes import EpisodeRunner, reset_seed
from trimtab.trainer.rewards import Score, Scorer
from trimtab.trainer.rollout.demonstrations import Demonstrations
from trimtab.trainer.rollout.prefixes import PrefixPool
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.trainer.rollout.sampling_contract import check_trajectory
from trimtab.trainer.rollout.schedule import GroupRange
from trimtab.trainer.seeds import derive
from trimtab.types import MIN_BEHAVIOR, Completion, Engine, Prompt, SamplingParams, Trajectory

Group = list[Trajectory]


@dataclass
class RolloutStats:
    """Counts and durations of generation and scoring since the last batch."""

    generated: int = 0  # responses that the engines sampled
    response_tokens: int = 0  # their tokens
    decoded: int = 0  # tokens that the engines ran, by their own counters
    prefilled: int = 0
    traces: int = 0  # demonstrations that joined a group
    traces_dropped: int = 0  # demonstrations that were too long
    traces_missing: int = 0  # prompts without one
    failed_rewards: int = 0  # responses without a reward, because a reward failed or the environment did
    dropped: int = 0  # responses with a log-prob that is not finite
    stale: int = 0  # responses that became too old for every batch
    discarded_lengths: list[int] = field(default_factory=list)  # sampled tokens of each response that was given up
    groups: int = 0  # groups that were scored
    no_signal: int = 0  # those of equal rewards
    refilled: int = 0  # those sampled in their place
    restarts: int = 0  # engines that were started again
    interrupted: int = 0  # responses that new weights interrupted
    episodes: EpisodeCounts = field(default_factory=EpisodeCounts)  # multi-turn responses and their calls
    errors: list[str] = field(default_factory=list)  # messages for the user
    seconds_generating: float = 0.0
    seconds_scoring: float = 0.0
    seconds_waiting: float = 0.0

    def messages(self) -> list[str]:
        """What went wrong, each message once."""
        failed_calls = self.episodes.message()
        return [*dict.fromkeys(self.errors), *([] if failed_calls is None else [failed_calls])]

    def add(self, other: RolloutStats) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


@dataclass
class Collector:
    """Generates and scores the groups of a run.

    `engine` is used by `sample` only. `context` is the number of tokens of the smallest context; None if none is known.
    `episodes` runs multi-turn responses.
    """

    config: Config
    stream: PromptStream
    engine: Engine
    scorer: Scorer
    sampling: SamplingParams
    prefixes: PrefixPool | None = None
    demonstrations: Demonstrations | None = None
    context: int | None = None
    episodes: EpisodeRunner | None = None

    def sample(self, request: GroupRange, stats: RolloutStats) -> list[Group]:
        """Generates and scores the groups of a request, in this thread."""
        start = time.perf_counter()
        decoded, prefilled = self.engine.decoded_tokens, self.engine.prefilled_tokens
        prompts, completions = self._generate(request, stats)
        stats.decoded += self.engine.decoded_tokens - decoded
        stats.prefilled += self.engine.prefilled_tokens - prefilled
        stats.seconds_generating += time.perf_counter() - start
        return self.score_groups(request, prompts, completions, stats)

    def score_groups(
        self,
        request: GroupRange,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[Completion]],
        stats: RolloutStats,
    ) -> list[Group]:
        """Scores the responses of a request; returns the usable trajectories, one group for each prompt."""
        start = time.perf_counter()
        pairs = [
            (prompt.problem, completion)
            for prompt, responses in zip(prompts, completions, strict=True)
            for completion in responses
        ]
        scores = iter(self.scorer.score(pairs))
        groups = [
            self._group(prompt, number, [(completion, next(scores)) for completion in responses], stats)
            for number, prompt, responses in zip(request.numbers, prompts, completions, strict=True)
        ]
        lengths = [completion.sampled_tokens for _, completion in pairs if not completion.external]
        stats.generated += len(lengths)
        stats.response_tokens += sum(lengths)
        stats.seconds_scoring += time.perf_counter() - start
        return groups

    def seed(self, request: GroupRange) -> int:
        """Returns the random seed of a request."""
        return derive(self.config.seed, "rollout", request.first)

    def reset_seeds(self, request: GroupRange) -> list[int]:
        """Returns the seeds of the environments of each group, whatever request the group belongs to."""
        return [reset_seed(self.config.seed, number) for number in request.numbers]

    def _generate(self, request: GroupRange, stats: RolloutStats) -> tuple[list[Prompt], list[list[Completion]]]:
        """The next prompts and their responses: sampled whole, continued from prefixes, or with demonstrations."""
        seed, samples, count = self.seed(request), self.config.trainer.samples, request.count
        pool = self.prefixes
        if pool is not None and not pool.starts_cycle:
            prompts, prefixes = pool.take(count)
            stats.response_tokens -= sum(len(prefix.response_ids) for group in prefixes for prefix in group)
            completions = self.engine.generate(prompts, samples, self.sampling, seed=seed, prefixes=prefixes)
            pool.observe([len(completion.response_ids) for responses in completions for completion in responses])
            return prompts, completions
        prompts = self.stream.take(count)
        if self.demonstrations is not None:
            return prompts, self._join_demonstrations(self.demonstrations, request, prompts, stats)
        if self.episodes is not None:
            seeds = self.reset_seeds(request)
            return prompts, self.episodes.generate(
                self.engine, prompts, samples, self.sampling, seed=seed, reset_seeds=seeds
            )
        completions = self.engine.generate(prompts, samples, self.sampling, seed=seed)
        if pool is not None:
            pool.observe([len(completion.response_ids) for responses in completions for completion in responses])
            # The current weights are the historical policy of the next batches: no second copy of weights is needed.
            if pool.batches:
                stats.response_tokens += pool.refill(self.stream.take(count * pool.batches))
        return prompts, completions

    def _join_demonstrations(
        self, demonstrations: Demonstrations, request: GroupRange, prompts: Sequence[Prompt], stats: RolloutStats
    ) -> list[list[Completion]]:
        """Responses where demonstrations replace samples, so that every group has `trainer.samples` members."""
        assert self.config.demonstrations is not None
        samples, per_group = self.config.trainer.samples, self.config.demonstrations.per_group
        before = demonstrations.dropped, demonstrations.missing
        epoch = len(self.stream.task.train)
        traces = [
            demonstrations.take(prompt, per_group, turn=number // epoch)
            for number, prompt in zip(request.numbers, prompts, strict=True)
        ]
        stats.traces += sum(map(len, traces))
        stats.traces_dropped += demonstrations.dropped - before[0]
        stats.traces_missing += demonstrations.missing - before[1]
        if not any(traces):
            stats.errors.append(
                f"no external trace joined: {demonstrations.dropped - before[0]} were too long, "
                f"{demonstrations.missing - before[1]} of {len(prompts)} prompts have none"
            )
        max_sampled = samples - min(map(len, traces))
        sampled = self.engine.generate(prompts, max_sampled, self.sampling, seed=self.seed(request))
        return [responses[: samples - len(joined)] + joined for responses, joined in zip(sampled, traces, strict=True)]

    def _group(
        self, prompt: Prompt, number: int, scored: Sequence[tuple[Completion, Score]], stats: RolloutStats
    ) -> Group:
        """Returns the usable trajectories of one prompt; others are counted and reported with their reason."""
        group: Group = []
        outcomes = [completion.outcome for completion, _ in scored]
        stats.episodes += EpisodeCounts.of([outcome for outcome in outcomes if outcome is not None])
        for completion, score in scored:
            if score.total is None:
                stats.failed_rewards += 1
                stats.errors.append(score.error or "a reward failed")
                continue
            external, sampled = completion.external, completion.sampled
            logp = completion.logp_behavior[sampled]
            if not external and not (np.isfinite(logp) & (logp >= MIN_BEHAVIOR)).all():
                stats.dropped += 1
                stats.errors.append(f"problem {prompt.problem.id!r}: the engine reported a non-finite log-prob")
                continue
            truncated = self.config.trainer.mask_truncated and completion.finish_reason == "length"
            environment, outcome = self.config.environment, completion.outcome
            void = environment is not None and environment.void == "mask" and outcome is not None and outcome.void
            trajectory = Trajectory(
                prompt=prompt if outcome is None else outcome.prompt,
                group=number,
                completion=completion,
                sampling=self.sampling,
                loss_mask=sampled & (not truncated and not void),
                reward=score.total,
                rewards=score.parts,
                off_policy=external,
            )
            if not external:
                check_trajectory(trajectory)
            group.append(trajectory)
        return group


def oldest(group: Group) -> float:
    """Returns the oldest policy version of the group's sampled tokens; infinite without one, as in demonstrations."""
    versions = (t.completion.policy_version[t.completion.sampled] for t in group if not t.off_policy)
    return min((int(tokens.min()) for tokens in versions if len(tokens)), default=math.inf)


def has_reward_variance(group: Group) -> bool:
    """Whether the first reward (by convention correctness) differs within the group; other rewards do not count."""
    if not group:
        return False
    name = next(iter(group[0].rewards))
    first = [trajectory.rewards[name] for trajectory in group]
    return max(first) > min(first)
