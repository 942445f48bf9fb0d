"""The controlled one-iteration experiment of Adaptive Layerwise Perturbation (arXiv 2603.19470, Figure 2 middle/right).

The same checkpoint, the same rollouts, and 16 off-policy updates on them: once with token-bypass (no noise) and once
with token-alp for each initial standard deviation. Then log pi_final - log mu of those rollouts (the clean policy, in
the trainer's numerics) by bins of the behavior probability. The sampler runs in float32 and in bfloat16.
Bypass with half the learning rate is the control: it says what a smaller step alone does to the envelope.

    python docs/figures/alp_one_iteration.py                                    the laboratory model
    python docs/figures/alp_one_iteration.py --model smollm2-135m-instruct --seeds 2 --out smollm2.png
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from canvas import BLUE, GREEN, IMAGES, RC, VERMILLION, label, save, table
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from numpy.typing import NDArray

from trimtab.diagnosis.measure.trained_tokens import (
    FEWEST_IN_GROUP,
    PROBABILITY_BINS,
    PROBABILITY_EDGES,
    probability_bin,
)
from trimtab.diagnosis.tokens import k3
from trimtab.runs import trajectories
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.export import restore
from trimtab.trainer.models.logprobs import score
from trimtab.trainer.packing import micro_batches, to_tensors
from trimtab.trainer.run import train
from trimtab.types import Trajectory

Array = NDArray[np.float64]
RARE = 0.1  # behavior probability below which a token counts as unlikely
SETTINGS: dict[str, dict[str, Any]] = {
    "laboratory": {
        "model": {"path": "laboratory", "autocast": "none"},
        "task": {"name": "sort"},
        "optim": {"lr": 1e-4, "betas": [0.9, 0.99]},
        "trainer": {"steps": 1, "prompts": 64, "samples": 8, "minibatches": 16},
        "eval": {"problems": 512},
    },
    "smollm2-135m-instruct": {
        "model": {"path": "smollm2-135m-instruct", "autocast": "bfloat16"},
        "task": {"name": "arithmetic", "digits": 2, "examples": 2},
        "optim": {"lr": 1e-5},
        "trainer": {"steps": 1, "prompts": 16, "samples": 8, "minibatches": 16},
        "eval": {"problems": 192},
    },
}


@dataclass(frozen=True)
class Arm:
    """What is done to the batch: `std` None is bypass; `rate` multiplies the learning rate."""

    name: str
    std: float | None = None
    rate: float = 1.0

    def config(self, model: str, dtype: str, seed: int) -> Config:
        base = SETTINGS[model]
        recipe = {**base, "seed": seed, "threads": 1, "engine": {"dtype": dtype}}
        recipe["objective"] = {"name": "token-bypass" if self.std is None else "token-alp",
                               "clip_high": 0.28, "clip_dual": 10.0}  # fmt: skip
        recipe["optim"] = base["optim"] | {"lr": base["optim"]["lr"] * self.rate}
        if self.std is not None:
            recipe["perturbation"] = {"std": self.std}
        return load_config(recipe)


@dataclass(frozen=True, eq=False)
class Outcome:
    """One run. `behavior` and `ratio` are flat over tokens: log mu, and log pi_final - log mu, in nats."""

    behavior: Array
    ratio: Array
    clipped: float
    noise: float  # mean |log p perturbed - log p clean| of one draw, nats
    before: float
    after: float

    @property
    def kl(self) -> float:
        """KL(mu || pi_final) from tokens of mu: mean of r - 1 - ln r, which is never negative."""
        return float(np.mean(k3(self.ratio)))

    @property
    def largest(self) -> float:
        return float(np.abs(self.ratio).max())

    def width(self, below: float) -> float:
        """98th minus 2nd percentile of the log-ratio of tokens the sampler gave less than `below`."""
        low, high = np.quantile(self.ratio[np.exp(self.behavior) < below], (0.02, 0.98))
        return float(high - low)


def run(arm: Arm, model: str, dtype: str, seed: int) -> Outcome:
    config = arm.config(model, dtype, seed)
    with tempfile.TemporaryDirectory() as folder:
        result = train(config, out=Path(folder) / "run")
        file = result.run / "trajectories" / "step-000001.parquet"
        rows = [row.trajectory for row in trajectories.read(file)]
        final, tokenizer, _ = restore(result.run)
        pad_id: Any = tokenizer.pad_token_id
        logp = score_rows(final, rows, pad_id, config)
    behavior = np.concatenate([row.completion.logp_behavior for row in rows]).astype(np.float64)
    metrics, task = result.metrics, config.task.name
    return Outcome(
        behavior,
        logp - behavior,
        metrics["clip/low"] + metrics["clip/high"] + metrics["clip/dual"],
        metrics.get("perturbation/dlogp", 0.0),
        metrics[f"eval/{task}/before"],
        metrics[f"eval/{task}/greedy"],
    )


@torch.no_grad()
def score_rows(model: Any, rows: Sequence[Trajectory], pad_id: int, config: Config) -> Array:
    """Log-probs of all response tokens in the trainer's numerics, flat, in the order of `rows`."""
    found: dict[int, Array] = {}
    half = config.model.autocast == "bfloat16"
    budget = config.trainer.micro_batch_tokens
    for chosen in micro_batches(rows, [[index] for index in range(len(rows))], budget):
        micro = to_tensors(rows, chosen, pad_id, torch.device("cpu"))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            logp = score(model, micro.tokens).logp
        for row, values in zip(chosen, logp, strict=True):
            found[row] = values[: len(rows[row])].double().numpy()
    return np.concatenate([found[index] for index in range(len(rows))])


def check_same_rollouts(outcomes: Mapping[str, Outcome]) -> None:
    """The experiment is controlled only if every arm was given the same tokens with the same log-probs."""
    first = next(iter(outcomes.values()))
    for name, outcome in outcomes.items():
        if not np.array_equal(first.behavior, outcome.behavior) or first.before != outcome.before:
            raise SystemExit(f"{name}: its rollouts or its checkpoint differ, so nothing can be compared")


def rows_of(found: Mapping[str, Sequence[Outcome]], dtype: str) -> list[list[str]]:
    """One line per arm; the widths are relative to the first arm, seed by seed, with the range over seeds."""
    bypass = next(iter(found.values()))
    return [
        [
            dtype,
            name,
            f"{np.mean([o.noise for o in outcomes]):.1e}" if outcomes[0].noise else "",
            *[_relative(outcomes, bypass, below) for below in (1.1, RARE)],
            f"{np.mean([o.kl for o in outcomes]):.4f}",
            f"{np.mean([o.largest for o in outcomes]):.2f}",
            f"{100 * np.mean([o.clipped for o in outcomes]):.1f}%",
            _rewards(outcomes),
        ]
        for name, outcomes in found.items()
    ]


def _relative(outcomes: Sequence[Outcome], bypass: Sequence[Outcome], below: float) -> str:
    if outcomes is bypass:
        return f"{np.mean([o.width(below) for o in bypass]):.2f} nats"
    ratio = [o.width(below) / b.width(below) for o, b in zip(outcomes, bypass, strict=True)]
    return f"x {np.mean(ratio):.2f} ({min(ratio):.2f} to {max(ratio):.2f})"


def _rewards(outcomes: Sequence[Outcome]) -> str:
    after = [o.after for o in outcomes]
    return f"{np.mean([o.before for o in outcomes]):.3f} → {np.mean(after):.3f} ({min(after):.3f} to {max(after):.3f})"


def draw(found: Mapping[str, Mapping[str, Sequence[Outcome]]], out: Path) -> None:
    """Rows: precision of the sampler; columns: what was changed. The plain bypass is in every panel; seeds pooled."""
    first = next(iter(found.values()))
    plain, *others = first
    with plt.rc_context(RC):
        figure, axes = plt.subplots(
            len(found), len(others), figsize=(2.7 * len(others), 2.9 * len(found)), sharex=True, sharey=True,
            squeeze=False, constrained_layout=True,
        )  # fmt: skip
        for line, (dtype, arms) in zip(axes, found.items(), strict=True):
            for place, name in zip(line, others, strict=True):
                color = BLUE if "σ" in name else GREEN
                _band(place, arms[plain], VERMILLION, filled=False)
                _band(place, arms[name], color, filled=True)
                place.axhline(0, color="#bbbbbb", linewidth=0.8)
                place.set(xscale="log")
                place.margins(y=0.14)
                reward = f"held-out {_mean(arms[name], 'before'):.2f} → {_mean(arms[name], 'after'):.2f}"
                label(place, 0.03, 0.03, reward, color, transform=place.transAxes)
            line[0].set_ylabel(f"{dtype} sampler\nlog π final - log μ, nats")
            words = f"held-out {_mean(arms[plain], 'before'):.2f} → {_mean(arms[plain], 'after'):.2f}"
            label(
                line[0],
                0.03,
                0.97,
                f"plain bypass (dashed),\n{words}",
                VERMILLION,
                va="top",
                transform=line[0].transAxes,
            )
        for place, name in zip(axes[0], others, strict=True):
            place.set_title(name.removeprefix("token-bypass, ").replace("token-alp, σ", "noise, σ"))
        for place in axes[-1]:
            place.set_xlabel("sampler's probability μ of the token")
        save(figure, out)


def _mean(outcomes: Sequence[Outcome], name: str) -> float:
    return float(np.mean([getattr(outcome, name) for outcome in outcomes]))


def _band(axes: Axes, outcomes: Sequence[Outcome], color: str, *, filled: bool) -> None:
    ratio, bins = (
        np.concatenate([o.ratio for o in outcomes]),
        probability_bin(np.concatenate([o.behavior for o in outcomes])),
    )
    kept = np.flatnonzero(np.bincount(bins, minlength=PROBABILITY_BINS) >= FEWEST_IN_GROUP)
    probability = np.sqrt(PROBABILITY_EDGES[kept] * PROBABILITY_EDGES[kept + 1])
    low, median, high = np.array([np.quantile(ratio[bins == one], (0.02, 0.5, 0.98)) for one in kept]).T
    style = "-" if filled else "--"
    if filled:
        axes.fill_between(probability, low, high, color=color, alpha=0.25, linewidth=0)
    for curve, width in ((low, 1.6), (median, 1.1), (high, 1.6)):
        axes.plot(probability, curve, color=color, linewidth=width, linestyle=style)


def main() -> None:
    parser = argparse.ArgumentParser(description="16 updates on one batch, with and without layerwise noise.")
    parser.add_argument("--model", choices=list(SETTINGS), default="laboratory")
    parser.add_argument("--seeds", type=int, default=4, help="0, 1, ...: each has its own rollouts and noise")
    parser.add_argument("--std", type=float, nargs="+", default=[1e-4, 1e-3, 1e-2, 1e-1])
    parser.add_argument("--samplers", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rate", type=float, default=1.0, help="multiplies the learning rate of every arm")
    parser.add_argument("--out", type=Path, default=IMAGES / "alp-one-iteration.png")
    args = parser.parse_args()
    arms = [Arm("token-bypass", rate=args.rate), Arm("token-bypass, half the learning rate", rate=args.rate / 2)]
    arms += [Arm(f"token-alp, σ = {std:g}", std, args.rate) for std in args.std]
    found: dict[str, dict[str, list[Outcome]]] = {}
    for dtype in args.samplers:
        found[dtype] = {arm.name: [] for arm in arms}
        for seed in range(args.seeds):
            outcomes = {arm.name: run(arm, args.model, dtype, seed) for arm in arms}
            check_same_rollouts(outcomes)
            for name, outcome in outcomes.items():
                found[dtype][name].append(outcome)
    head = ["sampler", "16 updates with", "noise on log p, nats", "width of envelope", f"width, μ < {RARE:g}",
            "KL(μ‖π final)", "max log-ratio", "clipped", "held-out reward"]  # fmt: skip
    print(table(head, [row for dtype in args.samplers for row in rows_of(found[dtype], dtype)]))
    draw(found, args.out)


if __name__ == "__main__":
    main()
