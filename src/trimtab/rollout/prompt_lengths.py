"""Prompt lengths: how many tokens the context leaves, and the distribution over a task."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trimtab import tasks
from trimtab.config import Config
from trimtab.errors import TrimtabError
from trimtab.rollout.collector import PromptStream
from trimtab.seeds import derive
from trimtab.types import Sampling

LOOKS = 2000
"""Problems looked at, at most: a task may have a million."""
KEY = "sampling.max_prompt_tokens"


def prompt_room(config: Config, sampling: Sampling, contexts: Iterable[int | None]) -> int | None:
    """How many tokens of the smallest context `sampling.max_tokens` leaves to a prompt; None: no context is known.

    Raises `TrimtabError` where nothing is left, or less than the recipe's `sampling.max_prompt_tokens`.
    """
    given, most = config.sampling.max_prompt_tokens, sampling.max_tokens
    context = min((context for context in contexts if context is not None), default=None)
    if context is None:
        return None
    if most >= context:
        raise TrimtabError(f"sampling.max_tokens = {most} leaves no room for a prompt in {context} tokens: lower it")
    if given is not None and given + most > context:
        raise TrimtabError(
            f"{KEY} = {given} and max_tokens = {most} do not fit the model's context of {context} tokens together: "
            "lower one of them"
        )
    return context - most


@dataclass(frozen=True)
class Survey:
    """Lengths of prompts, ascending, of all `total` problems or of a sample of them."""

    lengths: np.ndarray
    total: int
    limit: int | None

    @classmethod
    def of(cls, stream: PromptStream) -> Survey:
        """Raises `TrimtabError` if no prompt that was looked at is short enough."""
        task, limit = stream.task, stream.longest
        chosen: Iterable[int] = range(len(task.train))
        if len(task.train) > LOOKS:
            rng = np.random.default_rng(derive(stream.seed, "lengths"))
            chosen = rng.integers(len(task.train), size=LOOKS).tolist()
        lengths = [len(tasks.encode(task, task.train[index], stream.tokenizer).ids) for index in chosen]
        survey = cls(np.sort(lengths), len(task.train), limit)
        if survey.too_long == len(survey.lengths):
            raise TrimtabError(
                f"every prompt is longer than the {limit} tokens it may have, the shortest has {survey.lengths[0]}: "
                f"lower sampling.max_tokens, raise {KEY}, or take a model of a longer context"
            )
        return survey

    @property
    def too_long(self) -> int:
        return 0 if self.limit is None else int((self.lengths > self.limit).sum())

    def lines(self) -> list[str]:
        """For people: the distribution, and what is left out."""
        looked = f"{len(self.lengths):,} of {self.total:,}" if len(self.lengths) < self.total else f"all {self.total:,}"
        low, middle, high, top = (f"{value:,}" for value in self._quantiles())
        span = f"{low} tokens" if low == top else f"{low} to {top} tokens, median {middle}, 95 % up to {high}"
        found = [f"prompts    {span} ({looked} problems)"]
        if self.too_long:
            found.append(
                f"{self.too_long:,} of them are longer than {self.limit:,} tokens ({KEY}) and are never asked; "
                "others take their place (prompt/dropped)"
            )
        return found

    def metrics(self) -> dict[str, float]:
        low, middle, high, top = self._quantiles()
        share = self.too_long / len(self.lengths)
        return {
            "prompt/min": low,
            "prompt/median": middle,
            "prompt/q95": high,
            "prompt/max": top,
            "prompt/too_long": share,
        }

    def _quantiles(self) -> list[int]:
        return [int(value) for value in np.quantile(self.lengths, [0, 0.5, 0.95, 1], method="higher")]
