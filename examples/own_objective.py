"""An objective of your own, in one file outside the package: a rejection rule, what it is called, and a run with it.

    python examples/own_objective.py
    trimtab explain examples.own_objective:gap:gap_max=0.1
    trimtab train laboratory --set objective.name=examples.own_objective:gap --set objective.gap_max=0.1

docs/objectives.md explains the parts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch import Tensor

import trimtab
from trimtab.objectives import Mask, Objective, Ratio, RuleInputs, Unclipped


@dataclass(frozen=True)
class Gap(Mask):
    """Leave a token out where the policy has moved its probability further than `max` from the sampler's."""

    max: float

    @property
    def rule(self) -> str:
        return "gap"  # logged as reject/gap

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"current", "behavior"})  # not `proximal`: no forward pass is spent on it

    def keep(self, inputs: RuleInputs) -> Tensor:
        behavior = inputs.behavior
        return ((behavior + inputs.policy.log).exp() - behavior.exp()).abs() <= self.max

    def equation(self) -> str:
        return f"|π(y_t) − μ(y_t)| ≤ {self.max:g}"


def gap(*, gap_max: float = 0.2) -> Objective:
    """REINFORCE with importance weights against the sampler, within the gap. Parameters are keywords of a recipe."""
    return Objective("gap", Ratio("token", "behavior"), Unclipped(), masks=(Gap(gap_max),))


def main(out: str) -> None:
    """Four steps of the laboratory model, whose sampler keeps its weights for 16 updates."""
    mine = gap(gap_max=0.1)
    print(mine.equation())
    result = trimtab.train(
        "laboratory",
        objective=mine,
        overrides=[
            "objective.name=gap",  # drops the keywords that the recipe has for its own objective
            "trainer.steps=4",
            "trainer.minibatches=4",
            "trainer.sync_every=16",
            "eval.problems=16",
        ],
        out=out,
    )
    print(f"reward {result.metrics['reward/mean']:.2f}, {result.metrics['reject/gap']:.1%} of the tokens left out")
    print(f"report: {result.run / 'report.html'}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/own-objective")
