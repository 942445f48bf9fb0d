"""SOUP's relay sampling (arXiv 2601.21476): a checkpoint from earlier in a run begins every response of the last one.

python benchmarks/relay.py [--relay step-000080] [--samples 128] [--problems 256] [--out runs/relay] [--set seed=1]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from shared import options_of
from trimtab.trainer import rewards, tasks
from trimtab.trainer.config import load_config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.evaluation import pass_at_k
from trimtab.trainer.export import restore
from trimtab.trainer.rollout.prefixes import prefix_tokens
from trimtab.trainer.run import train
from trimtab.types import Completion, Prompt, SamplingParams

RUN = ("objective.name=soup", "trainer.steps=160", "checkpoint.every=40", "checkpoint.keep=5")


def passes(scorer: rewards.Scorer, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]) -> list[float]:
    pairs = [(prompt.problem, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
    right = [next(iter(score.parts.values()), 0.0) >= 1 for score in scorer.score(pairs)]
    counts, n = np.reshape(right, (len(prompts), -1)).sum(1).tolist(), len(groups[0])
    return [float(np.mean([pass_at_k(n, count, 1 << power) for count in counts])) for power in range(n.bit_length())]


def main() -> None:
    parser = options_of(__doc__, samples=128, problems=256, out=Path("runs/relay"))
    parser.add_argument("--relay", default="step-000080", help="a checkpoint of the run")
    parser.add_argument("--set", nargs="+", default=[], help="KEY=VALUE of the run")
    given = parser.parse_args()
    if not given.out.exists():
        train(load_config("laboratory", [*RUN, *given.set]), out=given.out)
    task = tasks.build((section := load_config(given.out).task).name, **section.keywords)
    (model, tokenizer, _), (older, *_) = restore(given.out), restore(given.out, given.relay)
    alone, relay = (EmbeddedEngine(one, tokenizer, torch.float32) for one in (model, older))
    prompts = [tasks.encode(task, problem, tokenizer) for problem in task.test[: given.problems]]
    sampling = SamplingParams(max_tokens=task.max_tokens, stop=task.stop)
    begun = relay.generate(prompts, given.samples, sampling, seed=1)
    halves = [[one.truncated(prefix_tokens(0.5, len(one.response_ids))) for one in group] for group in begun]
    with rewards.build([], task) as scorer:
        own = passes(scorer, prompts, alone.generate(prompts, given.samples, sampling, seed=0))
        both = passes(scorer, prompts, alone.generate(prompts, given.samples, sampling, seed=2, prefixes=halves))
    for power, (one, two) in enumerate(zip(own, both, strict=True)):
        print(f"pass@{1 << power}: alone {one:.3f}, with the relay {two:.3f}, gain {two - one:+.3f}")


if __name__ == "__main__":
    main()
