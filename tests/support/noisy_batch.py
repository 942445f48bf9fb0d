"""Batches of a noisy sampler, in the arguments of `Monitor.observe`."""

from __future__ import annotations

from typing import Any

import torch

ROWS, TIME = 32, 24


def batch(step: int, *, noise: float = 0.02, drift: float = 0.0) -> dict[str, Any]:
    """Tokens drawn from noisy logits, with the log-probs of the noisy sampler and of the trainer."""
    random = torch.Generator().manual_seed(step)
    logits = 2 * torch.randn(ROWS, TIME, 20, generator=random, dtype=torch.float64)
    rollout = (logits + noise * torch.randn(logits.shape, generator=random)).log_softmax(-1)
    train = (logits + drift * torch.randn(logits.shape, generator=random)).log_softmax(-1)
    ids = torch.multinomial(rollout.exp().view(-1, 20), 1, generator=random).view(ROWS, TIME, 1)
    lengths = torch.randint(1, TIME + 1, (ROWS, 1), generator=random)
    return {
        "logp_train": train.gather(-1, ids)[..., 0],
        "logp_rollout": rollout.gather(-1, ids)[..., 0],
        "mask": torch.arange(TIME) < lengths,
        "step": step,
        "version": step,
        "reward": torch.rand(ROWS, generator=random),
        "group": torch.arange(ROWS) // 4,
        "response_ids": ids[..., 0],
    }
