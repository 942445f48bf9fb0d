"""Scores the responses to a request and makes groups of trajectories from them.

Data that would bias the importance ratios is refused (`check_trajectory`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.errors import TrimtabError
from trimtab.trainer.config import Config
from trimtab.trainer.environments.episode import EpisodeCounts
from trimtab.trainer.rewards import Score, Scorer
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.trainer.rollout.responses import GeneratedGroups, ResponseSampler
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.types import MIN_BEHAVIOR, Completion, Prompt, SamplingParams, Trajectory

Group = list[Trajectory]


@dataclass
class Collector:
    """Makes scored groups from responses. `context`: length of the smallest context in tokens, or None if unknown."""

    config: Config
    responses: ResponseSampler
    scorer: Scorer
    context: int | None = None

    @property
    def stream(self) -> PromptStream:
        return self.responses.stream

    @property
    def sampling(self) -> SamplingParams:
        return self.responses.sampling

    def score_groups(self, generated: GeneratedGroups) -> list[Group]:
        """Returns the usable trajectories of the responses to a request, scored, one group for each prompt."""
        start, stats = time.perf_counter(), generated.stats
        answered = list(zip(generated.prompts, generated.completions, strict=True))
        pairs = [(prompt.problem, completion) for prompt, responses in answered for completion in responses]
        scores = iter(self.scorer.score(pairs))
        groups = [
            self._group(prompt, number, [(completion, next(scores)) for completion in responses], stats)
            for number, (prompt, responses) in zip(generated.request.numbers, answered, strict=True)
        ]
        stats.response_tokens += sum(completion.sampled_tokens for _, completion in pairs if not completion.external)
        stats.seconds_scoring += time.perf_counter() - start
        return groups

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
    """Returns the oldest policy version of the group's sampled tokens; infinite if it has none (demonstrations)."""
    versions = (t.completion.policy_version[t.completion.sampled] for t in group if not t.off_policy)
    return min((int(tokens.min()) for tokens in versions if len(tokens)), default=math.inf)


def has_reward_variance(group: Group) -> bool:
    """Returns whether the first reward (by convention correctness) differs within the group."""
    if not group:
        return False
    name = next(iter(group[0].rewards))
    first = [trajectory.rewards[name] for trajectory in group]
    return max(first) > min(first)


def check_trajectory(trajectory: Trajectory) -> None:
    """Raises `TrimtabError` if the importance ratios of a trajectory would be biased.

    Greedy data has no sampling probabilities. With "raw" log-probs of a processed distribution, pi/mu is off by the
    temperature and by the mass that truncation removed. With truncated sampling but without sampling masks, the trainer
    would normalize over the whole vocabulary, and every ratio would be low by the kept mass. The masks must be those of
    the tokens.
    """
    sampling, masks = trajectory.sampling, trajectory.completion.sampling_mask
    if sampling.temperature == 0:
        raise TrimtabError(
            "these tokens were decoded greedily (temperature 0) and carry no sampling probabilities; "
            "sample with temperature > 0"
        )
    drawn = f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g} and top_k {sampling.top_k}"
    if sampling.logprobs == "raw" and (sampling.temperature != 1 or sampling.truncated):
        raise TrimtabError(
            f'log-probs are "raw" but the tokens were drawn under {drawn}: the ratio to the policy that really sampled '
            'would be biased; have the engine return "processed" log-probs, or sample at temperature 1 without '
            "truncation"
        )
    if not sampling.truncated:
        return
    if masks is None:
        raise TrimtabError(
            f"the tokens were drawn under {drawn} but carry no sampling masks: ratios over the whole vocabulary would "
            "be biased by the kept mass; use an engine that records them, or set top_p = 1 and top_k = 0"
        )
    ids, name = trajectory.completion.response_ids, f"response to {trajectory.prompt.problem.id!r}"
    if len(masks) != len(ids):
        raise TrimtabError(
            f"{name}: {len(masks)} sampling masks for {len(ids)} tokens; the engine must report one each"
        )
    for token, (id_, mask) in enumerate(zip(ids, masks, strict=True)):
        if id_ not in mask:
            raise TrimtabError(f"{name}, token {token}: id {id_} is not in its own sampling mask")
        if 0 < sampling.top_k < len(mask):
            raise TrimtabError(
                f"{name}, token {token}: {len(mask)} ids in its sampling mask under top_k {sampling.top_k}"
            )
