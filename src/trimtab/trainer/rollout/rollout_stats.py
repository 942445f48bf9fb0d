"""What happened while the responses of a batch were generated and scored: counts, durations, messages."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from trimtab.trainer.environments.episode import EpisodeCounts


@dataclass
class RolloutStats:
    """Counts and durations of generation and scoring since the last batch."""

    response_tokens: int = 0  # that the engines sampled
    decoded: int = 0  # tokens that the engines ran, by their own counters
    prefilled: int = 0  # tokens that the engines prefilled, by their own counters
    traces: int = 0  # demonstrations that joined a group
    traces_dropped: int = 0  # demonstrations that were too long
    traces_missing: int = 0  # prompts without a demonstration
    failed_rewards: int = 0  # responses without a reward, because a reward failed or the environment did
    dropped: int = 0  # responses with a log-prob that is not finite
    stale: int = 0  # responses that became too old for every batch
    groups: int = 0  # groups that were scored
    no_signal: int = 0  # groups whose first rewards are equal
    restarts: int = 0  # engines that were started again
    interrupted: int = 0  # responses that new weights interrupted
    episodes: EpisodeCounts = field(default_factory=EpisodeCounts)  # multi-turn responses and their calls
    republished: list[str] = field(default_factory=list)  # weights that did not arrive the first time
    errors: list[str] = field(default_factory=list)  # messages for the user
    seconds_generating: float = 0.0
    seconds_scoring: float = 0.0
    seconds_waiting: float = 0.0

    def messages(self) -> list[str]:
        """Returns messages about what went wrong, each once."""
        failed_calls = self.episodes.message()
        return [*dict.fromkeys([*self.republished, *self.errors]), *([] if failed_calls is None else [failed_calls])]

    def add(self, other: RolloutStats) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))
