"""An environment of your own: a class whose methods are tools, and a run in which a model calls them.

    python examples/own_environment.py

The class is in TRL's `environment_factory` protocol, and runs there unchanged. docs/environments.md explains it.
"""

from __future__ import annotations

import sys
from typing import Any

import trimtab


class FewSwaps:
    """A row of digits with a tool that swaps two; sorted rows earn 1, less a tenth for each swap after the third."""

    def reset(self, **row: Any) -> None:
        """Begins an episode. `row` has the columns of the problem; a text returned here would follow the question."""
        self.digits, self.swaps = list(str(row["question"])), 0

    def swap(self, positions: str) -> str:
        """Swaps two digits and returns the row.

        Args:
            positions: the two positions, counted from 1, as two digits: "14".
        """
        first, second = (int(position) - 1 for position in positions)  # An error is an observation of the model.
        self.digits[first], self.digits[second] = self.digits[second], self.digits[first]
        self.swaps += 1
        return "".join(self.digits)

    def get_reward(self) -> float:
        """The reward of the episode. Without this method, the rewards of the recipe score the last turn."""
        return float(self.digits == sorted(self.digits)) * (1 - 0.1 * max(0, self.swaps - 3))


def main(out: str) -> None:
    """Two steps of the laboratory's tool model, which writes a call as `14?` (the recipe's format)."""
    short = ["trainer.steps=2", "trainer.prompts=4", "eval.problems=16"]
    result = trimtab.train("laboratory-tools", environment=FewSwaps, overrides=short, out=out)
    calls, errors = result.metrics["episode/calls"], result.metrics["episode/tool_errors"]
    print(f"reward {result.metrics['reward/mean']:.2f}, {calls:.1f} calls an episode, {errors:.0%} of them raised")
    print(f"its episodes, turn by turn: {result.run / 'report.html'}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/own-environment")
