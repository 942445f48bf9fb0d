"""Relay sampling (SOUP 5.1): another model begins every response, the evaluated one completes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.errors import TrimtabError
from trimtab.rollout.prefixes import portion
from trimtab.types import Completion, Engine, Prompt, Sampling, cut


@dataclass(frozen=True)
class Relay:
    """The model that begins. Its own whole response is cut after `ratio` of its tokens (length truncation).

    The paper says "the first half" and leaves the symbol out: half of the relay's own response, so ratio .5. It must
    share the vocabulary of the model that completes.

    A model that relays itself samples as it does alone only where all responses are equally long: the place of the cut
    knows how long the relay's response became.
    """

    engine: Engine
    ratio: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise TrimtabError(f"relay ratio {self.ratio} is not in [0, 1): it is the share the relay model writes")

    def prefixes(
        self, prompts: Sequence[Prompt], samples: int, sampling: Sampling, *, seed: int
    ) -> list[list[Completion]]:
        """One prefix for each sample of each prompt, each cut from a response of its own; a stop is never in it."""
        answers = self.engine.generate(prompts, samples, sampling, seed=seed)
        return [[cut(answer, portion(self.ratio, len(answer.response_ids))) for answer in group] for group in answers]
