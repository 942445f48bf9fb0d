"""Counts over multi-turn responses, in training and in evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from trimtab.types import EpisodeOutcome


@dataclass(frozen=True)
class EpisodeCounts:
    """Counts over multi-turn responses: their number, calls, calls that raised, void responses, failed environments.

    `first_errors` has the first error of a call of each batch.
    """

    episodes: int = 0
    calls: int = 0
    tool_errors: int = 0
    void: int = 0
    failed: int = 0
    first_errors: tuple[str, ...] = ()

    @classmethod
    def of(cls, outcomes: Sequence[EpisodeOutcome]) -> EpisodeCounts:
        return cls(
            episodes=len(outcomes),
            calls=sum(outcome.calls for outcome in outcomes),
            tool_errors=sum(outcome.tool_errors for outcome in outcomes),
            void=sum(outcome.void for outcome in outcomes),
            failed=sum(outcome.failure is not None for outcome in outcomes),
            first_errors=tuple(outcome.tool_error for outcome in outcomes if outcome.tool_error is not None)[:1],
        )

    def __add__(self, other: EpisodeCounts) -> EpisodeCounts:
        return EpisodeCounts(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))

    def message(self) -> str | None:
        """Returns what the first call raised where all calls failed, else None."""
        if not self.first_errors or self.tool_errors < self.calls:
            return None
        return f"all {self.calls} calls of tools failed, the first: {self.first_errors[0]}"

    def as_dict(self) -> dict[str, float]:
        """Returns calls of an episode, the share of calls that raised, the share of void episodes, and failed ones.

        They are those of the metrics `episode/*` of training.
        """
        return {
            "calls": self.calls / max(self.episodes, 1),
            "tool_errors": self.tool_errors / max(self.calls, 1),
            "void": self.void / max(self.episodes, 1),
            "failed": self.failed,
        }

    def columns(self) -> dict[str, str]:
        """Returns the same numbers as text, by the titles of table columns."""
        shares = self.as_dict()
        return {
            "calls an episode": f"{shares['calls']:.2f}",
            "tool errors": f"{shares['tool_errors']:.1%}",
            "void": f"{shares['void']:.1%}",
            "failed episodes": str(self.failed),
        }
