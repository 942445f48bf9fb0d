"""Multi-turn responses: the way to get responses that runs the episodes of an environment."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from trimtab.trainer.environments.episodes import EpisodeRunner, Episodes, reset_seed
from trimtab.trainer.rollout.responses import Responses, RolloutStats, Sampler
from trimtab.trainer.rollout.schedule import GroupRange
from trimtab.types import Completion, Prompt


@dataclass
class EpisodeResponses(Responses):
    """Every response is an episode: an environment answers between its turns."""

    runner: EpisodeRunner

    @property
    def seconds_to_end(self) -> float:
        """A call in progress, and then those of the environment's `close`."""
        return 2 * self.runner.section.timeout

    def respond(
        self,
        request: GroupRange,
        sampler: Sampler,
        stats: RolloutStats,  # noqa: ARG002
    ) -> tuple[list[Prompt], list[list[Completion]]]:
        prompts, samples = self.prompts(request), self.config.trainer.samples
        # A group's environments are the same, whatever request it belongs to.
        seeds = [reset_seed(self.config.seed, number) for number in request.numbers]
        with closing(Episodes(self.runner, prompts, samples, seeds)) as episodes:
            completions = sampler.generate(
                episodes.prompts, episodes.samples, self.sampling, seed=self.seed(request), turns=episodes
            )
            # Aborted episodes are not asked for rewards: calls of their tools may be in progress.
            if any(completion.finish_reason == "abort" for group in completions for completion in group):
                return prompts, completions
            return prompts, episodes.finish(completions)
