"""Multi-turn responses: the environment of a recipe, and the way to get responses that runs its episodes."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass

from trimtab.errors import TrimtabError
from trimtab.trainer.config import Config
from trimtab.trainer.environments import BuiltEnvironment, EnvironmentSpec
from trimtab.trainer.environments.episodes import EpisodeRunner, reset_seed
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
        return 2 * self.runner.limits.timeout

    def respond(
        self,
        request: GroupRange,
        sampler: Sampler,
        stats: RolloutStats,  # noqa: ARG002
    ) -> tuple[list[Prompt], list[list[Completion]]]:
        prompts, samples = self.prompts(request), self.config.trainer.samples
        # A group's environments are the same, whatever request it belongs to.
        seeds = [reset_seed(self.config.seed, number) for number in request.numbers]
        with closing(self.runner.start(prompts, samples, reset_seeds=seeds)) as episodes:
            completions = sampler.generate(
                episodes.prompts, episodes.samples, self.sampling, seed=self.seed(request), turns=episodes
            )
            # Aborted episodes are not asked for rewards: calls of their tools may be in progress.
            if any(completion.finish_reason == "abort" for group in completions for completion in group):
                return prompts, completions
            return prompts, episodes.finish(completions)


def environment_spec(config: Config, kind: type | None = None) -> EnvironmentSpec | None:
    """Returns what the section `[environment]` says, or None without one; `kind` replaces the class it names.

    Raises:
        TrimtabError: the section is that of a run whose class was given in Python, and the class is not given here.
    """
    section = config.environment
    if section is None:
        return None
    if kind is None:
        _require_reachable(section.name)
    return EnvironmentSpec(
        name=kind or section.name,
        options=section.keywords,
        format=section.format,
        instructions=section.instructions,
        turns=section.max_turns,
        turn_tokens=section.max_turn_tokens,
        observation_tokens=section.max_observation_tokens,
        timeout=section.timeout,
        answer=section.answer,
    )


def refuse_unused_rewards(environment: BuiltEnvironment, given: str | None) -> None:
    """Raises `TrimtabError` if rewards were `given`, in these words, for episodes that the environment scores itself.

    The rewards that a task has by default are not given.
    """
    if given is None or not hasattr(environment.kind, "get_reward"):
        return
    name = environment.spec.name
    if name == "openenv":
        other = "set environment.reward = false, and the rewards score the last turn"
    else:
        other = "take get_reward() out of the class"
    label = name if isinstance(name, str) else name.__qualname__
    raise TrimtabError(
        f"environment {label!r} has get_reward(), which scores its episodes, so {given} would never be called: leave "
        f"it out, or {other}"
    )


def _require_reachable(name: str) -> None:
    """Raises `TrimtabError` for the name under which a run recorded a class of a script or of a function."""
    module, _, kind = name.partition(":")
    if "<locals>" in kind or (module == "__main__" and not hasattr(sys.modules["__main__"], kind)):
        last = kind.rpartition(".")[2]
        raise TrimtabError(
            f"environment {name!r} was given in Python, trimtab.train(environment={last}), and has no name that leads "
            f"to it from here: put the class into a module and add --set environment.name=MODULE:{last}, or pass it "
            "to trimtab.train again"
        )
