"""A reward of your own: a function of the response's text and the problem. Either way takes seconds on one core:

trimtab train examples/own_recipe.toml --set 'reward=[{name="examples.own_reward:in_place"}]' --out runs/own-reward
python examples/own_reward.py
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import trimtab

if TYPE_CHECKING:
    from trimtab.types import Problem


def in_place(completion: str, problem: Problem) -> float:
    """Share of the digits that stand where they belong; 1 counts as correct in evaluations."""
    given, wanted = completion.removesuffix("."), problem.answer
    return sum(a == b for a, b in zip(given, wanted, strict=False)) / max(len(given), len(wanted))


if __name__ == "__main__":
    recipe = Path(__file__).with_name("own_recipe.toml")
    result = trimtab.train(recipe, reward=in_place, out="runs/own-reward-python")
    print(f"reward {result.metrics['reward/mean']:.2f}, page: {result.run / 'report.html'}")
