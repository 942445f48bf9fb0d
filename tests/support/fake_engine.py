"""An engine that plays a script; no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trimtab.trainer.engines.request import Prefixes, validate_prefixes
from trimtab.types import AbortSignal, Completion, Prompt, SamplingParams, TurnHandler


class FakeEngine:
    """Returns scripted completions (`types.Engine`), without turns and aborts.

    Args:
        script: problem id -> the completions of successive samples, as `Completion` or as text for the tokenizer to
            encode; further samples start again at the first. A prefix replaces as many scripted tokens.
    """

    def __init__(self, script: Mapping[str, Sequence[str | Completion]], *, tokenizer: Any = None) -> None:
        self.policy_version = self.decoded_tokens = self.prefilled_tokens = 0
        self._script, self._tokenizer = script, tokenizer

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: SamplingParams,
        *,
        seed: int,
        prefixes: Prefixes | None = None,
        turns: TurnHandler | None = None,
        abort: AbortSignal | None = None,
    ) -> list[list[Completion]]:
        del seed, turns, abort
        validate_prefixes(prefixes, prompts, samples, sampling)
        starts = prefixes or [[Completion.empty()] * samples for _ in prompts]
        return [
            [
                _continued(prefix, self._play(script[sample % len(script)], sampling.max_tokens))
                for sample, prefix in enumerate(group)
            ]
            for group, script in zip(starts, (self._script[prompt.problem.id] for prompt in prompts), strict=True)
        ]

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, as_is: bool = False) -> None:
        del weights, as_is
        self.policy_version = version

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        return ()

    def restart(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _play(self, line: str | Completion, n: int) -> Completion:
        if isinstance(line, str):
            ids = np.array(self._tokenizer.encode(line, add_special_tokens=False), dtype=np.int64)
            logp, versions = np.full(len(ids), -1.0, dtype=np.float32), np.zeros(len(ids), dtype=np.int64)
            line = Completion(ids, logp, versions, "stop", line)
        return Completion(
            response_ids=line.response_ids[:n],
            logp_behavior=line.logp_behavior[:n],
            policy_version=np.full(min(n, len(line.response_ids)), self.policy_version, dtype=np.int64),
            finish_reason="length" if len(line.response_ids) > n else line.finish_reason,
            text=line.text,
        )


def _continued(prefix: Completion, whole: Completion) -> Completion:
    """Returns `whole` with the tokens of the prefix in place of its first ones."""
    both = {
        name: np.concatenate([getattr(prefix, name), getattr(whole, name)[len(prefix.response_ids) :]])
        for name in ("response_ids", "logp_behavior", "policy_version")
    }
    return replace(whole, **both)
