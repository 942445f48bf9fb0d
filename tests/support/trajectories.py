"""Trajectories written by hand, for tests of what happens between the engine and the objective."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimtab.types import EXTERNAL_VERSION, Completion, FinishReason, Problem, Prompt, SamplingParams, Trajectory


def multi_turn(group: int, tokens: str, *, reward: float = 0.0, version: int = 0, logp: float = -1.0) -> Trajectory:
    """A response whose letters are sampled tokens and whose dots are those of observations, as an engine returns it."""
    sampled = np.array([letter != "." for letter in tokens])
    plain = trajectory(group, [ord(letter) for letter in tokens], reward=reward)
    completion = replace(
        plain.completion,
        logp_behavior=np.where(sampled, np.float32(logp), np.float32(np.nan)),
        policy_version=np.where(sampled, version, EXTERNAL_VERSION),
        entropy=np.where(sampled, np.float32(0.5), np.float32(np.nan)),
        loss_mask=None if sampled.all() else sampled,
    )
    return replace(plain, completion=completion, loss_mask=sampled)


def trajectory(
    group: int,
    response: list[int],
    *,
    prompt: list[int] | None = None,
    reward: float = 0.0,
    logp: float = -1.0,
    finish: FinishReason = "stop",
    kept: list[list[int]] | None = None,
) -> Trajectory:
    sampling = SamplingParams(top_k=2) if kept else SamplingParams()
    return Trajectory(
        prompt=Prompt(Problem(f"p{group}", "q", "a"), "q", np.array(prompt or [1, 2], dtype=np.int64)),
        group=group,
        completion=Completion(
            response_ids=np.array(response, dtype=np.int64),
            logp_behavior=np.full(len(response), logp, dtype=np.float32),
            policy_version=np.zeros(len(response), dtype=np.int64),
            finish_reason=finish,
            text="",
            sampling_mask=tuple(np.array(ids, dtype=np.int64) for ids in kept) if kept else None,
        ),
        sampling=sampling,
        loss_mask=np.ones(len(response), dtype=np.bool_),
        reward=reward,
        rewards={"exact": reward},
    )
