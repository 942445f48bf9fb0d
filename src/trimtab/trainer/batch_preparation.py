"""Turns the groups of a step into a batch: packed, with proximal and reference log-probs and advantages.

groups -> rows -> mini-batches of micro-batches -> log-probs of the proximal and the reference policy
       -> without rows whose proximal log-probs are not finite -> advantages over whole groups
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from trimtab.objectives import advantages
from trimtab.objectives.advantages import distillation_advantages, optimal_token_advantages
from trimtab.runs.trajectories import Row
from trimtab.trainer.learner import Learner
from trimtab.trainer.memory import choose_micro_batch_tokens
from trimtab.trainer.packing import (
    MicroBatch,
    MiniBatch,
    micro_batches,
    rows_with_non_finite_proximal,
    split_minibatches,
    to_tensors,
)
from trimtab.trainer.rollout.collector import Group
from trimtab.trainer.step_statistics import StepStatistics
from trimtab.types import Trajectory


@dataclass
class Batch:
    """The data of one step."""

    trajectories: list[Trajectory]
    minibatches: list[MiniBatch]
    advantages: torch.Tensor  # (rows, 1); if each token has its own: the mean over a row's trained tokens
    dropped: int  # trajectories left out because a proximal log-prob was not finite
    seconds: float  # of packing and scoring, including repeats after rows were dropped

    def rows(self, stats: StepStatistics, policy: str) -> list[Row]:
        """Returns rows for the trajectory file, with the log-probs of `policy` that the mismatch metrics used.

        The log-probs are NaN at observations, as the sampler's log-probs are.
        """
        proximal = policy == "proximal"
        logps = {
            row: np.where(self.trajectories[row].completion.sampled, values, np.float32(np.nan))
            for row, values in stats.mismatch_logps.items()
        }
        return [
            Row(
                trajectory,
                logp_proximal=logps.get(index) if proximal else None,
                logp_current=None if proximal else logps.get(index),
                advantage=float(self.advantages[index]),
                proximal_version=stats.versions.get(index),
                drift=stats.drifts.get(index),
            )
            for index, trajectory in enumerate(self.trajectories)
        ]


def prepare_batch(groups: Sequence[Group], learner: Learner, pad_id: int) -> Batch:
    """Returns the groups as a packed batch, with fixed policies' log-probs and advantages, without non-finite rows."""
    rows = [trajectory for group in groups for trajectory in group]
    dropped = 0
    start = time.perf_counter()
    while True:  # dropping a row changes the packing: the other rows are packed and scored again
        minibatches = learner.score_fixed_policies(_pack(rows, learner, pad_id))
        seconds = time.perf_counter() - start
        bad = rows_with_non_finite_proximal(minibatches)
        if not bad:
            break
        dropped += len(bad)
        rows = [trajectory for index, trajectory in enumerate(rows) if index not in bad]
    per_token = learner.token_baseline or learner.distills
    values = torch.zeros(len(rows), 1) if per_token else _advantages(rows, learner)
    for minibatch in minibatches:
        if learner.token_baseline:
            scores = _token_advantages(minibatch, rows)
        elif learner.distills:
            scores = [
                distillation_advantages(micro.reference, micro.proximal, micro.mask)  # pyright: ignore[reportArgumentType]
                for micro in minibatch
            ]
        else:
            scores = [values[list(micro.rows)].to(learner.device) for micro in minibatch]
        for index, (micro, advantage) in enumerate(zip(list(minibatch), scores, strict=True)):
            minibatch[index] = micro.with_scores(advantage=advantage)
            if per_token:
                values[list(micro.rows)] = (advantage.sum(1) / micro.mask.sum(1).clamp(min=1))[:, None].cpu()
    return Batch(rows, minibatches, values, dropped, seconds)


def _token_advantages(minibatch: MiniBatch, rows: Sequence[Trajectory]) -> list[torch.Tensor]:
    """Returns (rows, time) advantages for each micro-batch. A group may be split over several micro-batches."""
    width = max(micro.mask.shape[1] for micro in minibatch)
    logp, squares, mask = (
        torch.cat([F.pad(getattr(micro, name), (0, width - micro.mask.shape[1])) for micro in minibatch])
        for name in ("proximal", "squares", "mask")
    )
    numbers = [row for micro in minibatch for row in micro.rows]
    rewards = torch.tensor([rows[row].reward for row in numbers], device=mask.device)
    groups = torch.tensor([rows[row].group for row in numbers], device=mask.device)
    values = optimal_token_advantages(rewards, groups, torch.where(mask, logp, 0.0), squares, mask)
    parts = values.split([len(micro.rows) for micro in minibatch])
    return [part[:, : micro.mask.shape[1]] for micro, part in zip(minibatch, parts, strict=True)]


def _pack(rows: Sequence[Trajectory], learner: Learner, pad_id: int) -> list[MiniBatch]:
    groups: dict[int, list[int]] = {}
    for index, trajectory in enumerate(rows):
        groups.setdefault(trajectory.group, []).append(index)
    config, trainer, perturbation = learner.config, learner.config.trainer, learner.config.perturbation
    if learner.micro_batch_tokens is None and rows:
        tokens = choose_micro_batch_tokens(
            config,
            learner.model,
            learner.device,
            prompt=max(len(trajectory.prompt.ids) for trajectory in rows),
            response=max(config.sampling.max_tokens or 1, *(len(trajectory) for trajectory in rows)),
            ranks=learner.ranks.size,
            update=sum(len(row.prompt.ids) + len(row) for row in rows) // trainer.minibatches,
        )
        # All ranks use the budget of the rank with the least free memory, so that they pack alike.
        learner.micro_batch_tokens = -int(learner.ranks.all_reduce_max(-tokens))
    share_prompts = perturbation is None or not perturbation.per_response

    def pack(chosen: Sequence[int]) -> MicroBatch:
        micro = to_tensors(
            rows,
            chosen,
            pad_id,
            learner.device,
            version=learner.updates,
            updates_per_step=trainer.updates_per_step,
            share_prompts=share_prompts,
        )
        for feature in learner.features:
            micro = feature.pack(micro, [rows[row] for row in chosen])
        return micro

    def units(part: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Returns the rows that share a copy of their prompt: whole groups, or single rows."""
        return part if share_prompts else [[row] for group in part for row in group]

    return [
        [pack(chosen) for chosen in micro_batches(rows, units(part), learner.micro_batch_tokens or 1)]
        for part in split_minibatches(list(groups.values()), trainer.minibatches)
    ]


def _advantages(rows: Sequence[Trajectory], learner: Learner) -> torch.Tensor:
    """Returns advantages (rows, 1) in float32, from the rewards of each group."""
    config = learner.config.advantage
    kind = learner.objective.advantage if config.kind is None else config.kind
    rewards = torch.tensor([trajectory.reward for trajectory in rows], dtype=torch.float64)
    if not rows:
        return rewards.view(0, 1).float()
    groups = torch.tensor([trajectory.group for trajectory in rows], dtype=torch.long)
    beta = {"value_beta": config.value_beta} if kind == "optimal" else {}
    return advantages(kind, rewards, groups, **beta).float()
