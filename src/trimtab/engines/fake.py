"""A scripted engine for tests and documentation; no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trimtab.engines.embedded.decoding_rows import Prefixes, is_complete, validate_prefixes
from trimtab.engines.request import refuse_turns
from trimtab.errors import TrimtabError
from trimtab.types import AbortSignal, Completion, Prompt, SamplingParams, TurnHandler


class FakeEngine:
    """An engine that returns scripted completions.

    Args:
        script: problem id -> the completions of successive samples, as `Completion` or as text for the tokenizer to
            encode; further samples start again at the first.
        logp: the log-prob of every token that the script gives as text.
        tokenizer: required where the script gives text.
    """

    def __init__(
        self, script: Mapping[str, Sequence[str | Completion]], *, tokenizer: Any = None, logp: float = -1.0
    ) -> None:
        self.policy_version = 0
        self.decoded_tokens = 0
        self.prefilled_tokens = 0
        self.published: list[tuple[int, list[str]]] = []
        self._script, self._tokenizer, self._logp = script, tokenizer, logp

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
        """Returns the scripted completions, cut at `max_tokens`. `seed` has no effect.

        A prefix replaces as many scripted tokens. All responses grow token by token together, and `abort` is
        checked before each token. `prefilled_tokens` and `decoded_tokens` count tokens as a model would run them: each
        prompt and each distinct prefix in one pass, all sampled tokens but the first one at a time.
        """
        refuse_turns(turns)
        del seed
        missing = [prompt.problem.id for prompt in prompts if not self._script.get(prompt.problem.id)]
        if missing:
            raise TrimtabError(f"no completion is scripted for prompt {missing[0]!r}; add it to the script")
        validate_prefixes(prefixes, prompts, samples, sampling)
        starts = prefixes or [[Completion.empty()] * samples for _ in prompts]
        whole = [self._whole(prompt, group, sampling) for prompt, group in zip(prompts, starts, strict=True)]
        remaining = [
            [len(full.response_ids) - len(prefix.response_ids) for prefix, full in zip(*pair, strict=True)]
            for pair in zip(starts, whole, strict=True)
        ]
        steps = max((max(group) for group in remaining if group), default=0)
        if abort is not None:
            steps = next((step for step in range(steps) if abort.is_set()), steps)
        self._count(prompts, starts, remaining, steps)
        return [
            [_grown(prefix, full, steps) for prefix, full in zip(*pair, strict=True)]
            for pair in zip(starts, whole, strict=True)
        ]

    def _whole(self, prompt: Prompt, prefixes: Sequence[Completion], sampling: SamplingParams) -> list[Completion]:
        script, completions = self._script[prompt.problem.id], []
        for sample, prefix in enumerate(prefixes):
            full = self._play(script[sample % len(script)], sampling)
            if is_complete(prefix, sampling.max_tokens):
                full = prefix
            elif len(prefix.response_ids) >= len(full.response_ids) > 0:
                raise TrimtabError(f"a prefix of prompt {prompt.problem.id!r} leaves nothing of its script to play")
            completions.append(prefix.continued_by(full))
        return completions

    def _count(
        self, prompts: Sequence[Prompt], starts: Prefixes, remaining: Sequence[Sequence[int]], steps: int
    ) -> None:
        if steps == 0:
            return
        for prompt, prefixes, sizes in zip(prompts, starts, remaining, strict=True):
            distinct = {tuple(prefix.response_ids.tolist()) for prefix, n in zip(prefixes, sizes, strict=True) if n}
            self.prefilled_tokens += len(prompt.ids) * bool(distinct) + sum(len(ids) for ids in distinct)
            self.decoded_tokens += sum(max(0, min(n, steps) - 1) for n in sizes)

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, as_is: bool = False) -> None:
        """Records the version and the weight names. `as_is` has no effect, because nothing is quantized."""
        del as_is
        self.published.append((version, [name for name, _ in weights]))
        self.policy_version = version

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        """Returns nothing: a script has no weights."""
        return ()

    def restart(self) -> None:
        """Does nothing: a scripted engine cannot fail."""

    def close(self) -> None:
        """Does nothing."""

    def _play(self, line: str | Completion, sampling: SamplingParams) -> Completion:
        if isinstance(line, Completion):
            ids, logp, text, finish = line.response_ids, line.logp_behavior, line.text, line.finish_reason
            entropy, kept, routes = line.entropy, line.sampling_mask, line.routed_experts
        else:
            if self._tokenizer is None:
                raise TrimtabError("the script gives text: FakeEngine needs a tokenizer to encode it")
            ids = np.array(self._tokenizer.encode(line, add_special_tokens=False), dtype=np.int64)
            logp, text, finish = np.full(len(ids), self._logp, dtype=np.float32), line, "stop"
            entropy = kept = routes = None
        n = sampling.max_tokens
        return Completion(
            response_ids=ids[:n],
            logp_behavior=logp[:n],
            policy_version=np.full(min(n, len(ids)), self.policy_version, dtype=np.int64),
            finish_reason="length" if len(ids) > n else finish,
            text=text,
            entropy=None if entropy is None else entropy[:n],
            sampling_mask=None if kept is None else kept[:n],
            routed_experts=None if routes is None else routes[: len(routes) - max(0, len(ids) - n)],
        )


def _grown(prefix: Completion, whole: Completion, steps: int) -> Completion:
    """Returns `whole`, or its part up to `steps` tokens after the prefix, marked as aborted."""
    n = len(prefix.response_ids) + steps
    return whole if n >= len(whole.response_ids) else replace(whole.truncated(n), finish_reason="abort")
