"""Trajectories written by hand, for tests of what happens between the engine and the objective."""

from __future__ import annotations

import numpy as np

from trimtab.types import Completion, FinishReason, Problem, Prompt, SamplingParams, Trajectory


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
