"""The prompts of a run: their order, and the smallest context that they must fit."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from trimtab.errors import TrimtabError
from trimtab.trainer import tasks
from trimtab.trainer.config import Config
from trimtab.trainer.seeds import derive
from trimtab.types import Prompt, SamplingParams, Task


@dataclass
class PromptStream:
    """Prompts of the training split, in an order that is a pure function of (seed, position)."""

    task: Task
    tokenizer: Any
    seed: int
    max_prompt: int | None = None  # tokens; a longer prompt is replaced by another
    replaced: set[int] = field(default_factory=set)  # positions of replaced prompts
    logged: int = 0  # number of replaced prompts that metrics have counted
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # tokenizers are not thread-safe

    @property
    def pad_id(self) -> int:
        return int(self.tokenizer.pad_token_id)

    def at(self, position: int, count: int) -> list[Prompt]:
        """Returns the `count` prompts from `position` on."""
        with self._lock:
            return [self._prompt(position + offset) for offset in range(count)]

    def _prompt(self, position: int) -> Prompt:
        epoch, index = divmod(position, len(self.task.train))
        prompt = self._encode(int(_order(self.seed, epoch, len(self.task.train))[index]))
        if self.fits(prompt):
            return prompt
        self.replaced.add(position)
        return self._replacement(position)

    def _replacement(self, position: int) -> Prompt:
        """Returns a prompt that is short enough; a pure function of (seed, position), like the order."""
        rng = np.random.default_rng(derive(self.seed, "replacement", position))
        for index in rng.permutation(len(self.task.train)).tolist():
            prompt = self._encode(index)
            if self.fits(prompt):
                return prompt
        raise TrimtabError(
            f"no training problem has a prompt of at most {self.max_prompt} tokens (sampling.max_prompt_tokens): "
            "raise it, lower sampling.max_tokens, or take another task"
        )

    def newly_replaced(self) -> int:
        """Returns the number of positions replaced since the last call. A position that is read again counts once."""
        total = len(self.replaced)
        new, self.logged = total - self.logged, total
        return new

    def _encode(self, index: int) -> Prompt:
        return tasks.encode(self.task, self.task.train[index], self.tokenizer)

    def fits(self, prompt: Prompt) -> bool:
        """Returns whether a prompt is short enough."""
        return self.max_prompt is None or len(prompt.ids) <= self.max_prompt


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, problems: int) -> np.ndarray:
    """Returns the indices of all problems in the order of an epoch."""
    return np.random.default_rng(derive(seed, "order", epoch)).permutation(problems)


def smallest_context(config: Config, sampling: SamplingParams, contexts: Iterable[int | None]) -> int | None:
    """Returns the number of tokens of the smallest context; None if none is known.

    Raises `TrimtabError` if `sampling.max_tokens` leaves nothing for a prompt, or less than the recipe's
    `sampling.max_prompt_tokens`.
    """
    max_prompt, max_response = config.sampling.max_prompt_tokens, sampling.max_tokens
    context = min((context for context in contexts if context is not None), default=None)
    if context is None:
        return None
    if max_response >= context:
        raise TrimtabError(
            f"sampling.max_tokens = {max_response} leaves no room for a prompt in {context} tokens: lower it"
        )
    if max_prompt is not None and max_prompt + max_response > context:
        raise TrimtabError(
            f"sampling.max_prompt_tokens = {max_prompt} and max_tokens = {max_response} do not fit the model's context "
            f"of {context} tokens together: lower one of them"
        )
    return context
