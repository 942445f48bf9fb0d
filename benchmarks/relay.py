"""SOUP's relay sampling (arXiv 2601.21476): a checkpoint from earlier in a run begins every response of the last one.

    python benchmarks/relay.py [--relay step-000080] [--samples 128] [--problems 256] [--out runs/relay] [--set seed=1]

Trains the run if there is none; prints pass@k of its last checkpoint alone, and with the first half of the relay.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from trimtab.trainer import rewards, tasks
from trimtab.trainer.config import load_config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.evaluation import pass_at_k
from trimtab.trainer.export import restore
from trimtab.trainer.rollout.prefixes import prefix_tokens
from trimtab.trainer.run import train
from trimtab.types import Completion, Prompt, SamplingParams

RUN = ("objective.name=soup", "trainer.steps=160", "checkpoint.every=40", "checkpoint.keep=5")


def passes(
    scorer: rewards.Scorer, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]
) -> dict[int, float]:
    """Mean pass@k over problems, for powers of two."""
    pairs = [(prompt.problem, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
    right = np.array([next(iter(score.parts.values()), 0.0) >= 1 for score in scorer.score(pairs)])
    counts, n = right.reshape(len(prompts), -1).sum(1), len(groups[0])
    ks = [1 << power for power in range(n.bit_length())]
    return {k: float(np.mean([pass_at_k(n, int(count), k) for count in counts])) for k in ks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relay", default="step-000080", help="a checkpoint of the run")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("runs/relay"))
    parser.add_argument("--set", nargs="+", default=[], help="KEY=VALUE of the run")
    given = parser.parse_args()
    if not given.out.exists():
        train(load_config("laboratory", [*RUN, *given.set]), out=given.out)
    config = load_config(given.out)
    task = tasks.build(config.task.name, **config.task.keywords)
    (model, tokenizer, _), (older, *_) = restore(given.out), restore(given.out, given.relay)
    alone, relay = (EmbeddedEngine(one, tokenizer, torch.float32) for one in (model, older))
    prompts = [tasks.encode(task, problem, tokenizer) for problem in task.test[: given.problems]]
    sampling = SamplingParams(max_tokens=task.max_tokens, stop=task.stop)
    begun = relay.generate(prompts, given.samples, sampling, seed=1)
    halves = [[one.truncated(prefix_tokens(0.5, len(one.response_ids))) for one in group] for group in begun]
    with rewards.build([], task) as scorer:
        own = passes(scorer, prompts, alone.generate(prompts, given.samples, sampling, seed=0))
        joint = alone.generate(prompts, given.samples, sampling, seed=2, prefixes=halves)
        for k, value in passes(scorer, prompts, joint).items():
            print(f"pass@{k}: alone {own[k]:.3f}, with the relay {value:.3f}, gain {value - own[k]:+.3f}")


if __name__ == "__main__":
    main()
