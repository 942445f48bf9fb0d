"""Checks that an engine samples from the weights that it was given last.

An engine may report success and keep old weights: a tied head with a packed copy, keys and values that were cached
under earlier weights, an update that was skipped. Training on such samples degrades slowly and without an error. So the
trainer computes the next-token distribution at fixed contexts, the engine samples one token at each, and the two
log-probs of that token are compared.

Half of the contexts are the same at every check, so that a stale prefix cache would be used for them. The other half
begin with the digits of the version, so that no cache contains them. The half that differs shows the cause.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from trimtab.errors import DivergedError, TrimtabError
from trimtab.trainer.config import Config
from trimtab.trainer.config.rollout_sections import CanaryConfig
from trimtab.types import BoolArray, Completion, Engine, FloatArray, IntArray, Problem, Prompt, SamplingParams

# Length of a context: one token more than the largest block of a prefix cache (16 to 128 tokens), so that at least one
# block is cached.
CONTEXT_TOKENS = 129
SEED = 20_260_101
# Largest mean |difference| of a new engine; beyond it the engine has another model. 8-bit engines stay below 0.3.
MAX_INITIAL_DIFFERENCE = 0.5
# Mean differences below this are accepted, even if the new engine was more exact.
MIN_BOUND = 1e-3
MARGIN = 3.0  # default bound, in units of the new engine's mean difference
# In units of the new engine's mean difference: if the policy changed by more, equal bits mean a skipped update.
UNCHANGED_SHARE = 0.5
VERSION_TOKENS = 6
# A check fails if more than 25% of the policy's change since the first check is missing in the engine's log-probs, and
# the projection of the differences onto that change exceeds 16 noise units. A noise unit is the new engine's mean
# difference; single differences are clipped to CLIP units. For a healthy bfloat16 engine the projection has a standard
# deviation of 3.5 and a largest observed value of 9.5 (docs/vllm.md); for a stale head or cache it grows.
UNMOVED_SHARE, UNMOVED_SIGMAS, CLIP = 0.25, 16.0, 6.0

CORPUS = """The sum of 27 and 45 is 72. A train leaves at 9:40 and arrives at 13:25, so the journey takes 225 minutes.
Question: What is 31 * 8?
Answer: 248

Water boils at 100 degrees; on a mountain of 3000 m it boils at about 90. 3141592653=1123345569.
def area(width, height):
    return width * height  # 12 * 7 = 84

She bought 3 pens for 2 dollars each, paid with 10 dollars, and received 4 dollars. 2718281828=1122278888.
If x + 5 = 12, then x = 7, because 12 - 5 = 7. The square root of 144 is 12, and 2 to the power of 10 is 1024.
Rivers carry sand to the sea; in 1000 years the shore has moved by 350 meters. 8675309124=0123456789.
Step 1: read the numbers 6, 1, 9, 4. Step 2: sort them. Step 3: write 1, 4, 6, 9. Done in 0.25 seconds.
"""


@dataclass(frozen=True, eq=False)
class CanaryPrediction:
    """The trainer's log-probs (contexts, vocabulary) of the next token at the canary's contexts."""

    version: int
    contexts: tuple[IntArray, ...]
    fixed: BoolArray  # (contexts,): True for contexts that are the same at every check
    logp: FloatArray

    def logp_of(self, ids: IntArray) -> FloatArray:
        """Returns the log-prob of one token at each context."""
        return self.logp[np.arange(len(ids)), ids]


@dataclass(frozen=True, eq=False)
class _EngineSamples:
    """One sampled token at each context, with the engine's log-prob of it."""

    ids: IntArray
    logp: FloatArray

    def difference(self, expected: CanaryPrediction, among: BoolArray | slice = slice(None)) -> float:
        """Returns the mean |engine's log-prob - trainer's log-prob| over all contexts, or those with `among` True."""
        return float(np.mean(np.abs(self.logp - expected.logp_of(self.ids))[among]))


class _LastCheck(NamedTuple):
    """The last check of an engine that gave new samples, with the log-probs of the trainer."""

    samples: _EngineSamples
    expected: CanaryPrediction  # when the engine first returned these samples
    first: CanaryPrediction  # at the engine's first check


@dataclass(eq=False)
class Canary:
    """Compares the log-probs of engines with the trainer's at fixed contexts. Shared by all engines of a run."""

    texts: IntArray  # token ids (prompts, length); the last `config.tokens` positions of each row are checked
    config: CanaryConfig
    tied: bool  # whether embedding and head share their weights
    temperature: float = 1.0
    autocast: str = "none"
    noise: float | None = None  # mean |difference| of the first engine at the first check: gives the default bound
    _difference: float | None = None
    _projection: float | None = None  # of the differences onto the policy's change, in noise units
    _published: int = 0  # number of publications
    _version: int = -1  # of the last publication
    _last_checks: WeakKeyDictionary[Engine, _LastCheck] = field(default_factory=WeakKeyDictionary)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def build(cls, config: Config, tokenizer: Any, model: nn.Module) -> Canary | None:
        """Returns the canary of a recipe, or None. Embedded engines have none by default."""
        canary = config.engine.canary
        every = canary.every if canary.every is not None else int(config.engine.type != "embedded")
        if every == 0:
            return None
        canary = canary.model_copy(update={"every": every})
        settings: Any = model.config
        limits = (getattr(settings, "max_position_embeddings", None), config.engine.context)
        context = min((limit for limit in limits if limit), default=CONTEXT_TOKENS + canary.tokens)
        length = min(CONTEXT_TOKENS + canary.tokens - 1, context - 1)
        if length < canary.tokens + VERSION_TOKENS:
            raise TrimtabError(f"engine.canary.tokens = {canary.tokens} does not fit a context of {context}: lower it")
        return cls(
            _texts(tokenizer, canary.prompts, length),
            canary,
            temperature=config.sampling.temperature,
            autocast=config.model.autocast,
            tied=bool(getattr(settings, "tie_word_embeddings", False)),
        )

    @torch.no_grad()
    def predict(self, model: nn.Module, version: int) -> CanaryPrediction | None:
        """Returns the log-probs expected of an engine with these weights; None if this update is not checked.

        Call it at every weight update, while `model` has exactly the published weights. A version that is published
        again, as by a resumed run, is checked if it was checked before.
        """
        if version != self._version:
            self._published, self._version = self._published + 1, version
        if (self._published - 1) % (self.config.every or 1):
            return None
        texts, checked = self._texts_with_version(version), self.config.tokens
        ids = torch.from_numpy(texts).to(next(model.parameters()).device)
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=self.autocast == "bfloat16"):
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=checked).logits
        logp = (logits.float() / self.temperature).log_softmax(-1).flatten(0, 1)
        if not bool(torch.isfinite(logp).all()):
            raise DivergedError(f"canary: the trained policy of version {version} is not finite; lower optim.lr")
        first = texts.shape[1] - checked + 1
        contexts = tuple(row[: first + offset] for row in texts for offset in range(checked))
        fixed = np.repeat(np.arange(len(texts)) % 2 == 0, checked)
        return CanaryPrediction(version, contexts, fixed, logp.cpu().numpy())

    def check(self, engine: Engine, expected: CanaryPrediction) -> float:
        """Returns the mean |log-prob difference| between `engine` and `expected`.

        Raises `TrimtabError` with the likely cause if the engine reports another policy version or values that are not
        finite, did not change although the policy did, or differs by more than the bound.
        """
        samples = self._sample(engine, expected)
        difference = samples.difference(expected)
        with self._lock:
            last = self._last_checks.get(engine)
            self._difference, bound = difference, self.config.bound
            if bound is None:
                bound = MAX_INITIAL_DIFFERENCE if self.noise is None else max(MARGIN * self.noise, MIN_BOUND)
            if difference > bound:
                cause = self._cause(samples, expected, last, bound)
                raise TrimtabError(
                    f"canary: at version {expected.version} the engine's log-probs differ from the trainer's by "
                    f"{difference:.3g} on average (bound {bound:.3g}): {cause}; engine.canary.bound sets another bound"
                )
            self._check_changed(samples, expected, last)
            if self.noise is None:
                self.noise = difference
            first = expected if last is None else last.first
            self._check_unmoved_part(samples, expected, first, self.noise)
            if last is None or not _equal(last.samples, samples, expected.fixed):
                self._last_checks[engine] = _LastCheck(samples, expected, first)
        return difference

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the last check."""
        values = {"canary/abs_diff": self._difference, "canary/pull": self._projection}
        return {name: value for name, value in values.items() if value is not None}

    def state(self) -> list[float | None]:
        """Returns the state for a checkpoint, without the engines' samples: a resumed run compares with new ones."""
        return [self.noise, self._published, self._version, self._difference, self._projection]

    def load_state(self, saved: Sequence[Any]) -> None:
        """Restores `state()`."""
        self.noise, self._published, self._version, self._difference, self._projection = saved

    def _sample(self, engine: Engine, expected: CanaryPrediction) -> _EngineSamples:
        """Samples one token at every context with `Engine.generate`."""
        prompts = [Prompt(Problem(f"canary {i}", "", ""), "", ids) for i, ids in enumerate(expected.contexts)]
        sampling = SamplingParams(temperature=self.temperature, max_tokens=1, ignore_stop=True)
        completions: list[Completion] = [
            group[0] for group in engine.generate(prompts, 1, sampling, seed=SEED, prefixes=None)
        ]
        versions = sorted({int(version) for completion in completions for version in completion.policy_version})
        if versions != [expected.version]:
            raise TrimtabError(
                f"canary: version {expected.version} was published, but the engine dates its tokens with "
                f"{', '.join(map(str, versions))}: the publication did not reach it"
            )
        logp = np.array([completion.logp_behavior[0] for completion in completions], dtype=np.float32)
        if not np.isfinite(logp).all():
            raise DivergedError(
                f"canary: the engine's log-probs at version {expected.version} are not finite: its weights are not "
                "(the trainer's are); a quantized engine may be unable to reload"
            )
        return _EngineSamples(np.array([completion.response_ids[0] for completion in completions]), logp)

    def _check_changed(self, samples: _EngineSamples, expected: CanaryPrediction, last: _LastCheck | None) -> None:
        """Raises `TrimtabError` if the engine's log-probs kept the same bits although the policy changed."""
        if last is None or self.noise is None or not _equal(last.samples, samples, expected.fixed):
            return
        change = expected.logp_of(samples.ids) - last.expected.logp_of(samples.ids)
        moved = float(np.mean(np.abs(change[expected.fixed])))
        if moved > max(UNCHANGED_SHARE * self.noise, 1e-6):
            raise TrimtabError(
                f"canary: the engine's samples at version {expected.version} are those of version "
                f"{last.expected.version} to the bit, although the policy's log-probs moved by {moved:.3g}: the update "
                "was skipped"
            )

    def _check_unmoved_part(
        self, samples: _EngineSamples, expected: CanaryPrediction, first: CanaryPrediction, noise: float
    ) -> None:
        """Raises `TrimtabError` if a part of the weights, or of a cache, is still that of the first check.

        Such a part shifts the engine's log-probs towards those of the first check, at first by less than the bound.
        """
        if noise < MIN_BOUND / MARGIN:
            return  # with exact numerics the bound detects this as well
        current = expected.logp_of(samples.ids)[expected.fixed]
        direction = first.logp_of(samples.ids)[expected.fixed] - current
        length = float(np.linalg.norm(direction))
        if length == 0:
            return
        projection = float(np.clip(samples.logp[expected.fixed] - current, -CLIP * noise, CLIP * noise) @ direction)
        self._projection = projection / (length * noise)
        if projection / length**2 > UNMOVED_SHARE and self._projection > UNMOVED_SIGMAS:
            raise TrimtabError(
                f"canary: at version {expected.version} the engine is {projection / length**2:.0%} of the policy's way "
                f"back towards version {first.version}: a part of its weights, or its prefix cache, is that old"
            )

    def _cause(self, samples: _EngineSamples, expected: CanaryPrediction, last: _LastCheck | None, bound: float) -> str:
        fixed, varying = (samples.difference(expected, among) for among in (expected.fixed, ~expected.fixed))
        if varying <= bound < fixed and varying < fixed / 2:
            return (
                f"only contexts it had seen before are wrong ({fixed:.3g}, new ones {varying:.3g}), so its prefix "
                "cache holds keys and values of earlier weights: reset it at every publication"
            )
        same = last is not None and _equal(last.samples, samples, expected.fixed)
        if last is not None and (same or samples.difference(last.expected, expected.fixed) < fixed / 2):
            return f"it still samples from the weights of version {last.expected.version}: the update was skipped"
        head = "most often a tied head with a separate packed copy" if self.tied else "or they were garbled"
        if last is None and self.noise is None:
            return f"it holds another model, or a part of the weights was not taken over ({head})"
        return f"a part of the weights was not taken over ({head})"

    def _texts_with_version(self, version: int) -> IntArray:
        """Returns the texts; every second one begins with `version`, written in tokens of the text."""
        texts = self.texts.copy()
        alphabet = np.unique(texts)
        digits = [version // len(alphabet) ** index % len(alphabet) for index in range(VERSION_TOKENS)]
        texts[1::2, :VERSION_TOKENS] = alphabet[digits]
        return texts


def _equal(old: _EngineSamples, new: _EngineSamples, among: BoolArray) -> bool:
    return bool(
        np.array_equal(old.ids[among], new.ids[among])
        and np.array_equal(old.logp[among].view(np.int32), new.logp[among].view(np.int32))
    )


def _texts(tokenizer: Any, count: int, length: int) -> IntArray:
    """Returns token ids (count, length): excerpts of the corpus with different starts."""
    ids = np.array(tokenizer.encode(CORPUS, add_special_tokens=False), dtype=np.int64)
    starts = np.arange(count) * len(ids) // count
    return ids[(starts[:, None] + np.arange(length)) % len(ids)]
