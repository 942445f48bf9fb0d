"""Engines with a planted fault: each wraps a healthy one and reports success."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from trimtab.trainer.engines.embedded.shared_prompt_decoder import SharedPromptDecoder
from trimtab.types import Completion, Engine, Prompt, SamplingParams, TopTokens


class Wrapped:
    """Passes everything on; a fault overrides `weights` or `answer`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, as_is: bool = False) -> None:
        self.engine.update_weights(self.weights(dict(weights)).items(), version, as_is=as_is)

    def generate(
        self, prompts: Sequence[Prompt], samples: int, sampling: SamplingParams, **rest: Any
    ) -> list[list[Completion]]:
        asked = self.asked(sampling)
        groups = self.engine.generate(prompts, samples, asked, **rest)
        return [[self.answer(one, asked, len(prompts)) for one in group] for group in groups]

    def weights(self, given: dict[str, Any]) -> dict[str, Any]:
        return given

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        return sampling

    def answer(self, one: Completion, sampling: SamplingParams, batch: int) -> Completion:  # noqa: ARG002
        return one


class LosesWeights(Wrapped):
    """Keeps its weights from one version on, until a publication is repeated; reports the new version.

    says: whether it says which weights it has, as embedded engines do. updates: how often it was given any.
    """

    def __init__(self, engine: Engine, first: int, *, for_good: bool = False, says: bool = True) -> None:
        super().__init__(engine)
        self.first, self.for_good, self.repaired, self.updates = first, for_good, False, 0
        if not says:
            self.weight_checksums = None

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, as_is: bool = False) -> None:
        self.updates += 1
        repeated = version == self.engine.policy_version >= self.first and not as_is
        self.repaired |= repeated and not self.for_good
        if version >= self.first and not self.repaired and not as_is:
            weights = [(name, weight.clone()) for name, weight in self.engine.named_weights()]
        self.engine.update_weights(weights, version, as_is=as_is)


class StaleTensors(Wrapped):
    """Keeps the first value of the tensors whose names contain `part`; reports success."""

    def __init__(self, engine: Engine, part: str) -> None:
        super().__init__(engine)
        self.part = part
        self.first: dict[str, Any] = {}

    def weights(self, given: dict[str, Any]) -> dict[str, Any]:
        for name, tensor in given.items():
            if self.part in name:
                self.first.setdefault(name, tensor.detach().clone())
        return given | self.first


class ChangedTensors(StaleTensors):
    """Loads the tensors whose names contain `part` with `factor` times their values."""

    def __init__(self, engine: Engine, part: str, factor: float) -> None:
        super().__init__(engine, part)
        self.factor = factor

    def weights(self, given: dict[str, Any]) -> dict[str, Any]:
        return {name: self.factor * tensor if self.part in name else tensor for name, tensor in given.items()}


class PerturbedCache(Wrapped):
    """Changes the cached value of the first token of every prompt: decoding reads it, a prefill does not."""

    def __init__(self, engine: Engine, size: float) -> None:
        super().__init__(engine)
        self.size = size

    def generate(self, *args: Any, **rest: Any) -> list[list[Completion]]:
        run = SharedPromptDecoder._prefill

        def perturbed(decoder: Any, prompts: Any) -> Any:
            last = run(decoder, prompts)
            decoder._prompts[1][:, :, :, 0] += self.size
            return last

        with mock.patch.object(SharedPromptDecoder, "_prefill", perturbed):
            return super().generate(*args, **rest)


class TopToken(Wrapped):
    """Reports the log-prob of the most probable token instead of the sampled one."""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, top_logprobs=max(1, sampling.top_logprobs))

    def answer(self, one: Completion, sampling: SamplingParams, batch: int) -> Completion:  # noqa: ARG002
        assert one.top is not None
        return replace(one, logp_behavior=one.top.logps[:, 0])


class RawLogprobs(Wrapped):
    """Samples at the temperature and reports the model's own log-probs, from all of the processed ones."""

    def asked(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, top_logprobs=10**6)

    def answer(self, one: Completion, sampling: SamplingParams, batch: int) -> Completion:  # noqa: ARG002
        assert one.top is not None
        raw = one.top.logps * sampling.temperature
        raw = (raw - np.logaddexp.reduce(raw, axis=1, keepdims=True)).astype(np.float32)
        at = one.top.ids == one.response_ids[:, None]
        return replace(one, logp_behavior=np.where(at, raw, 0).sum(1), top=TopTokens(one.top.ids, raw))


class BatchDependent(Wrapped):
    """A kernel whose results depend on the size of the batch."""

    def answer(self, one: Completion, sampling: SamplingParams, batch: int) -> Completion:  # noqa: ARG002
        noise = 0.01 * np.random.default_rng(batch).standard_normal(len(one.logp_behavior))
        moved = one.logp_behavior + (batch > 1) * noise * -np.expm1(one.logp_behavior)  # by this noise on a logit
        return replace(one, logp_behavior=np.minimum(moved, 0.0).astype(np.float32))


class OtherEnd(Wrapped):
    """Writes the end token of another template where the model sampled its own."""

    def __init__(self, engine: Engine, token: int) -> None:
        super().__init__(engine)
        self.token = token

    def answer(self, one: Completion, sampling: SamplingParams, batch: int) -> Completion:  # noqa: ARG002
        if one.finish_reason != "stop":
            return one
        return replace(one, response_ids=np.append(one.response_ids[:-1], self.token))


class StaleCache(Wrapped):
    """Answers a prompt from the weights under which it was first asked."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.known: dict[tuple[Any, ...], Completion] = {}

    def generate(
        self, prompts: Sequence[Prompt], samples: int, sampling: SamplingParams, **rest: Any
    ) -> list[list[Completion]]:
        groups = super().generate(prompts, samples, sampling, **rest)
        if rest.get("prefixes") is not None:
            return groups
        kept = []
        for prompt, group in zip(prompts, groups, strict=True):
            key = (tuple(prompt.ids.tolist()), sampling)
            old = self.known.setdefault(key, group[0])
            kept.append([replace(old, policy_version=group[0].policy_version[:1].repeat(len(old.response_ids)))])
        return kept
