"""How the responses to a request are obtained. `ResponseSampler` samples each response as a whole.

Its subclasses are `EpisodeSampler` (tools answer between turns), `PrefixedSampler` in `prefixes.py` (prefixes from
an older policy) and `DemonstratedSampler` in `demonstrations.py` (external traces). `Collector` knows none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.trainer.config import Config
from trimtab.trainer.environments.episodes import EpisodeRunner, reset_seed
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.trainer.rollout.schedule import GroupRequest
from trimtab.trainer.seeds import derive
from trimtab.types import Completion, Prompt, SamplingParams

Generate = Callable[..., list[list[Completion]]]
"""`Engine.generate`, without `abort`. Responses to a request that was given up meanwhile end in "abort"."""


@dataclass(frozen=True, slots=True)
class GeneratedGroups:
    """The responses to a request, not scored yet: the prompt and the responses of each of its groups."""

    request: GroupRequest
    prompts: Sequence[Prompt]
    completions: Sequence[Sequence[Completion]]
    stats: RolloutStats = field(default_factory=RolloutStats)


@dataclass
class ResponseSampler:
    """Obtains the responses of a run: samples each as a whole. Subclasses change that."""

    config: Config
    stream: PromptStream
    sampling: SamplingParams

    @property
    def seconds_to_end(self) -> float:
        """Longest time in seconds until `respond` returns after its engine was aborted."""
        return 0.0

    def respond(self, request: GroupRequest, generate: Generate) -> GeneratedGroups:
        """Returns the responses to a request."""
        prompts, samples = self.prompts(request), self.config.trainer.samples
        return GeneratedGroups(request, prompts, generate(prompts, samples, self.sampling, seed=self.seed(request)))

    def prompts(self, request: GroupRequest) -> list[Prompt]:
        """Returns the prompts of a request, one for each group."""
        return self.stream.at(request.first, request.count)

    def seed(self, request: GroupRequest) -> int:
        """Returns the random seed of a request."""
        return derive(self.config.seed, "rollout", request.first)

    def state(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Returns the state for a checkpoint, as JSON and files."""
        return {}, {}

    def restore(self, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Restores `state()` from all JSON and files of a rollout source."""


@dataclass
class EpisodeSampler(ResponseSampler):
    """Samples episodes: an environment answers between the turns of a response."""

    runner: EpisodeRunner

    @property
    def seconds_to_end(self) -> float:
        """An environment call in progress, and then the calls of the environment's `close`."""
        return 2 * self.runner.section.timeout

    def respond(self, request: GroupRequest, generate: Generate) -> GeneratedGroups:
        prompts, samples = self.prompts(request), self.config.trainer.samples
        # A group's environments are the same, whatever request it belongs to.
        seeds = [reset_seed(self.config.seed, number) for number in request.numbers]
        completions = self.runner.generate(
            generate, prompts, samples, self.sampling, seed=self.seed(request), reset_seeds=seeds
        )
        return GeneratedGroups(request, prompts, completions)
