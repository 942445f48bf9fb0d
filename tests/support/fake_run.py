"""A run directory as a trainer would leave it, without training: documented formats, plausible numbers.

Not a test. `fake_run(folder)` is used by tests of the report and the command line, and from the command line to
view the page: `python tests/support/fake_run.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.runs import trajectories
from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import METRICS
from trimtab.trainer.config import load_config
from trimtab.types import Completion, Problem, Prompt, SamplingParams, Trajectory

EVIL = '<script>alert("x")</script> & <img src=x onerror=alert(1)> \u202eabc'


def relog(run: Path, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Writes every step of a run anew, as `change` of what it logged returns it."""
    steps = map(change, read_metrics(run / METRICS))
    (run / METRICS).write_text("".join(json.dumps(step) + "\n" for step in steps))


def fake_run(
    folder: Path,
    *,
    steps: int = 30,
    seed: int = 0,
    objective: str = "token-tis",
    final_reward: float = 0.8,
    noise: float = 0.05,
    every: int = 5,
    text: str | None = None,
    keys: Collection[str] | None = None,
) -> Path:
    """Write config.toml, metrics.jsonl and every `every`-th trajectory file into `folder`.

    `noise` is the standard deviation of the token log-ratio, so k3 is about noise²/2; `text` replaces what the model
    says; `keys` are the only ones logged (fewer figures).
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    changes = [f"seed={seed}", f"objective.name={objective}", f"trainer.steps={steps}"]
    base = {
        "description": "Two-digit addition with a small model",
        "task": {"name": "arithmetic", "digits": 2},
        "optim": {"lr": 1e-5},
    }
    (folder / "config.toml").write_text(load_config(base, changes).dump())
    rows = [_step(rng, step, steps, final_reward, noise) for step in range(1, steps + 1)]
    logged = [{key: row[key] for key in row if keys is None or key in keys} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    for step in range(every, steps + 1, every):
        path = folder / "trajectories" / f"step-{step:06d}.parquet"
        trajectories.write(path, _rows(rng, step, rows[step - 1]["reward/mean"], text, noise), step)
    return folder


def _step(rng: np.random.Generator, step: int, steps: int, final_reward: float, noise: float) -> dict[str, Any]:
    done = step / steps
    reward = 0.2 + (final_reward - 0.2) / (1 + np.exp(-8 * (done - 0.45))) + rng.normal(0, 0.025)
    sigma = noise * (1 + 0.4 * done) * np.exp(rng.normal(0, 0.15))
    quantiles = {name: float(np.exp(sigma * z)) for name, z in zip(_NAMES, (-2.33, -1.64, 0, 1.64, 2.33), strict=True)}
    bounded = {name: min(value, 2.0) for name, value in quantiles.items()}
    collect, update = rng.normal(1.6, 0.1), rng.normal(1.9, 0.1)
    row = {
        "step": step,
        "updates": step,
        "policy_version": step,
        "lag/mean": 0.0,
        "lag/max": 0,
        "trajectories/consumed": 128,
        "reward/mean": float(reward),
        "reward/std": float(np.sqrt(max(reward * (1 - reward), 1e-4))),
        "reward/exact": float(reward),
        "reward/failed": 0,
        "groups/no_signal": int(rng.integers(2, 9)),
        "groups/sampled": 16,
        "trajectories/dropped": 0,
        "length/mean": float(5 + rng.normal(0, 0.2)),
        "length/max": int(rng.integers(7, 12)),
        "length/truncated": float(max(0.0, 0.06 * (1 - done) + rng.normal(0, 0.01))),
        "mismatch/k1": float(rng.normal(sigma**2 / 2, sigma / 25)),
        "mismatch/k2": float(sigma**2 / 2),
        "mismatch/k3": float(sigma**2 / 2 * np.exp(rng.normal(0, 0.1))),
        "mismatch/chi2_token": float(sigma**2),
        "mismatch/chi2_seq": float(np.exp(5 * sigma**2) - 1),
        "mismatch/ess_token": float(1 / (1 + sigma**2)),
        "mismatch/ess_seq": float(np.exp(-5 * sigma**2)),
        "mismatch/ratio_mean": float(1 + rng.normal(0, sigma / 25)),
        "mismatch/ppl_ratio": float(1 + rng.normal(0, sigma / 25)),
        "mismatch/pearson": float(1 - sigma**2 / 5),
        "mismatch/abs_diff_mean": float(0.8 * sigma),
        "mismatch/abs_diff_max": float(3.5 * sigma),
        "mismatch/log_ratio_seq_max": float(5 * sigma),
        "mismatch/tokens": 640,
        "mismatch/sequences": 128,
        "mismatch/anchor": "current",
        **{f"mismatch/ratio_{name}": value for name, value in quantiles.items()},
        **{f"weight_raw/{name}": value for name, value in quantiles.items()},
        **{f"weight/{name}": value for name, value in bounded.items()},
        **{f"ratio/{name}": 1.0 for name in _NAMES},
        "weight/mean": 1.0,
        "weight/changed": float(np.mean(rng.normal(0, sigma, 640) > np.log(2))),
        "clip/low": 0.0,
        "clip/high": 0.0,
        "clip/dual": 0.0,
        "loss/policy": float(rng.normal(0, 0.01)),
        "entropy/mean": float(0.9 * np.exp(-1.2 * done) + rng.normal(0, 0.02)),
        "optim/lr": 1e-5,
        "optim/grad_norm": (norm := float(np.exp(rng.normal(-0.5, 0.25)))),
        "optim/grad_clipped": float(norm > 1),
        "optim/skipped": 0,
        "time/collect": collect,
        "time/score": 0.02,
        "time/proximal": 0.0,
        "time/update": update,
        "time/publish": 0.03,
        "time/step": collect + update + 0.06,
        "tokens/rollout": 640,
        "tokens/train": 640,
        "tokens_per_second/rollout": 640 / collect,
        "tokens_per_second/train": 640 / update,
        "memory/rss": 4_800_000_000,
    }
    if step == 1:
        row |= {"eval/arithmetic/greedy": 0.21, "eval/arithmetic/before": 0.21}
    if step == steps:
        row["eval/arithmetic/greedy"] = round(final_reward * 0.95, 3)
    return row


_NAMES = ("q01", "q05", "q50", "q95", "q99")


def _rows(rng: np.random.Generator, step: int, reward: float, text: str | None, noise: float) -> list[trajectories.Row]:
    rows = []
    for group in range(6):
        a, b = rng.integers(10, 100, 2)
        problem = Problem(f"train/{step}-{group}", f"What is {a} + {b}?", str(a + b))
        shots = "Question: What is 12 + 30?\nAnswer: 42\n\nQuestion: What is 58 + 27?\nAnswer: 85\n\n"
        prompt = Prompt(problem, f"{shots}Question: {problem.question}\nAnswer:", np.arange(40))
        for _ in range(8):
            right = bool(rng.random() < reward)
            answer = text if text is not None else f" {a + b if right else a + b + rng.integers(1, 12)}\n"
            length = max(len(answer), 1)
            completion = Completion(
                response_ids=np.arange(length),
                logp_behavior=rng.normal(-0.4, 0.2, length).astype(np.float32),
                policy_version=np.full(length, step - 1),
                finish_reason="stop" if right else "length",
                text=answer,
            )
            scored = Trajectory(
                prompt=prompt,
                group=step * 100 + group,
                completion=completion,
                sampling=SamplingParams(),
                loss_mask=np.ones(length, dtype=np.bool_),
                reward=float(right),
                rewards={"exact": float(right)},
            )
            noisy = completion.logp_behavior + rng.normal(0, noise, length).astype(np.float32)
            rows.append(trajectories.Row(scored, logp_current=noisy, advantage=float(right) - reward))
    return rows


if __name__ == "__main__":
    print(fake_run(Path(sys.argv[1])))
