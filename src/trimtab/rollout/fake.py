"""An engine that says what it was told to: for tests and for documentation, without a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trimtab.errors import TrimtabError
from trimtab.rollout.prefixes import splice
from trimtab.rollout.rows import Prefixes, check_prefixes
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
        self.decoded = 0
        self.prefilled = 0
        self.published: list[tuple[int, list[str]]] = []
        self._script, self._tokenizer, self._logp = script, tokenizer, logp

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling,
        *,
        seed: int,
        prefixes: Prefixes | None = None,
    ) -> list[list[Completion]]:
        """The scripted completions, cut at `max_tokens`. `seed` changes nothing.

        A prefix takes the place of as many scripted tokens. Tokens are counted as a model would be run: each prompt and
        each prefix at once, all sampled tokens but the first one at a time.
        """
        del seed
        missing = [prompt.problem.id for prompt in prompts if not self._script.get(prompt.problem.id)]
        if missing:
            raise TrimtabError(f"no completion is scripted for prompt {missing[0]!r}; add it to the script")
        check_prefixes(prefixes, prompts, samples, sampling)
        played = []
        for p, prompt in enumerate(prompts):
            lines = self._script[prompt.problem.id]
            group = [self._play(lines[i % len(lines)], sampling) for i in range(samples)]
            self.prefilled += len(prompt.ids)
            self.decoded += sum(max(0, len(completion.response_ids) - 1) for completion in group)
            played.append(group if prefixes is None else self._continue(prefixes[p], group, prompt))
        return played

    def _continue(
        self, prefixes: Sequence[Completion], group: Sequence[Completion], prompt: Prompt
    ) -> list[Completion]:
        self.prefilled += sum(len(ids) for ids in {tuple(prefix.response_ids.tolist()) for prefix in prefixes})
        self.decoded -= sum(len(prefix.response_ids) for prefix in prefixes)
        short = any(len(a.response_ids) >= len(b.response_ids) > 0 for a, b in zip(prefixes, group, strict=True))
        if short:
            raise TrimtabError(f"a prefix of prompt {prompt.problem.id!r} leaves nothing of its script to play")
        return [splice(prefix, whole) for prefix, whole in zip(prefixes, group, strict=True)]

    def publish(self, weights: Iterable[tuple[str, Any]], version: int, *, exact: bool = False) -> None:
        """Note the version and the names of what was published; nothing is ever rounded, `exact` or not."""
        del exact
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
