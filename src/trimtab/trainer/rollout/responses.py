"""How the responses to a request are obtained. `Responses` samples each response as a whole.

Its subclasses are `EpisodeResponses` (tools answer between turns), `PrefixedResponses` in `prefixes.py` (prefixes from
an older policy) and `DemonstratedResponses` in `demonstrations.py` (external traces). `Collector` knows none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from trimtab.trainer.config import Config
from trimtab.trainer.environments.episode import EpisodeCounts
from trimtab.trainer.environments.episodes import EpisodeRunner, reset_seed
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.trainer.rollout.schedule import GroupRange
from trimtab.trainer.seeds import derive
from trimtab.types import Completion, Prompt, SamplingParams

Generate = Callable[..., list[list[Completion]]]
"""`Engine.generate`, without `abort`. Responses to a request that was given up meanwhile end in "abort"."""


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
    refilled: int = 0  # groups sampled in place of groups without signal
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


@dataclass
class Responses:
    """The way a run obtains responses: samples each as a whole. Subclasses change that."""

    config: Config
    stream: PromptStream
    sampling: SamplingParams

    @property
    def seconds_to_end(self) -> float:
        """Longest time in seconds until `respond` returns after its engine was aborted."""
        return 0.0

    def respond(
        self,
        request: GroupRange,
        generate: Generate,
        stats: RolloutStats,  # noqa: ARG002
    ) -> tuple[list[Prompt], list[list[Completion]]]:
        """Returns the prompts of a request and the responses to each."""
        prompts = self.prompts(request)
        return prompts, generate(prompts, self.config.trainer.samples, self.sampling, seed=self.seed(request))

    def prompts(self, request: GroupRange) -> list[Prompt]:
        """Returns the prompts of a request, one for each group."""
        return self.stream.at(request.first, request.count)

    def seed(self, request: GroupRange) -> int:
        """Returns the random seed of a request."""
        return derive(self.config.seed, "rollout", request.first)

    def state(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Returns the state for a checkpoint, as JSON and files."""
        return {}, {}

    def restore(self, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Restores `state()` from all JSON and files of a rollout source."""


@dataclass
class EpisodeResponses(Responses):
    """Every response is an episode: an environment answers between its turns."""

    runner: EpisodeRunner

    @property
    def seconds_to_end(self) -> float:
        """An environment call in progress, and then the calls of the environment's `close`."""
        return 2 * self.runner.section.timeout

    def respond(
        self,
        request: GroupRange,
        generate: Generate,
        stats: RolloutStats,  # noqa: ARG002
    ) -> tuple[list[Prompt], list[list[Completion]]]:
        prompts, samples = self.prompts(request), self.config.trainer.samples
        # A group's environments are the same, whatever request it belongs to.
        seeds = [reset_seed(self.config.seed, number) for number in request.numbers]
        return prompts, self.runner.generate(
            generate, prompts, samples, self.sampling, seed=self.seed(request), reset_seeds=seeds
        )
