"""An engine that says what it was told to: for tests and for documentation, without a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trimtab.errors import TrimtabError
from trimtab.types import Completion, Prompt, Sampling


class FakeEngine:
    """Plays back completions, each given as response ids with their log-probs, or as text for a tokenizer to encode.

    Args:
        script: problem id -> the completions of successive samples; asking for more starts over.
        logp: the log-prob of every token that the script gives as text.
        tokenizer: needed where the script gives text.
    """

    def __init__(
        self, script: Mapping[str, Sequence[str | Completion]], *, tokenizer: Any = None, logp: float = -1.0
    ) -> None:
        self.policy_version = 0
        self.published: list[tuple[int, list[str]]] = []
        self._script, self._tokenizer, self._logp = script, tokenizer, logp

    def generate(
        self, prompts: Sequence[Prompt], samples: int, sampling: Sampling, *, seed: int
    ) -> list[list[Completion]]:
        """The scripted completions, cut at `max_tokens`. `seed` changes nothing."""
        del seed
        missing = [prompt.problem.id for prompt in prompts if not self._script.get(prompt.problem.id)]
        if missing:
            raise TrimtabError(f"no completion is scripted for prompt {missing[0]!r}; add it to the script")
        return [
            [self._play(lines[i % len(lines)], sampling) for i in range(samples)]
            for lines in (self._script[prompt.problem.id] for prompt in prompts)
        ]

    def publish(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Note the version and the names of what was published."""
        self.published.append((version, [name for name, _ in weights]))
        self.policy_version = version

    def weights(self) -> Iterable[tuple[str, Any]]:
        """A script has no weights."""
        return ()

    def _play(self, line: str | Completion, sampling: Sampling) -> Completion:
        if isinstance(line, Completion):
            ids, logp, text, finish = line.response_ids, line.logp_behavior, line.text, line.finish
            entropy, kept = line.entropy, line.kept
        else:
            if self._tokenizer is None:
                raise TrimtabError("the script gives text: FakeEngine needs a tokenizer to encode it")
            ids = np.array(self._tokenizer.encode(line, add_special_tokens=False), dtype=np.int64)
            logp, text, finish = np.full(len(ids), self._logp, dtype=np.float32), line, "stop"
            entropy = kept = None
        n = sampling.max_tokens
        return Completion(
            response_ids=ids[:n],
            logp_behavior=logp[:n],
            policy_version=np.full(min(n, len(ids)), self.policy_version, dtype=np.int64),
            finish="length" if len(ids) > n else finish,
            text=text,
            entropy=None if entropy is None else entropy[:n],
            kept=None if kept is None else kept[:n],
        )
