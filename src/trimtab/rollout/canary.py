"""Checks after weight updates that the engine samples from the weights it was given.

Engines have many ways to report success and keep old weights: a tied head with a packed copy of its own, keys and
values cached under earlier weights, an update that was skipped. Training on such samples fails slowly and quietly. So
the trainer computes its own next-token distribution at each context, the engine samples one token there, and the two
log-probs of that token are compared.

Half of the contexts are the same at every look, so that a stale prefix cache answers for them; the other half begin
with the version's digits, so that nothing cached does. Which half is wrong says where to search.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from trimtab.config import CanaryConfig, Config
from trimtab.errors import DivergedError, TrimtabError
from trimtab.types import BoolArray, Completion, Engine, FloatArray, IntArray, Problem, Prompt, Sampling

# One token more than a block of any engine's prefix cache (16 to 128 tokens), so that at least one block is cached.
BASE = 129
SEED = 20_260_101
# Mean |difference| of a fresh engine above which it cannot be the same model: 8-bit engines stay below 0.3.
FRESH = 0.5
# Below this a difference is of no consequence, however exact the fresh engine was.
FLOOR = 1e-3
MARGIN = 3.0
# A share of the fresh engine's difference: weights that changed more than this cannot round to the same bits.
UNCHANGED = 0.5
STAMP = 6
# Share of the policy's way since the first look that the engine did not go, and how far that is beyond chance: the
# projection in units of the fresh engine's mean difference, single differences held within CLIP of them. That of a
# healthy bfloat16 engine spreads by 3.5 and was seen at 9.5 (docs/vllm.md); that of a stale head or cache grows.
LEFT, PULL, CLIP = 0.25, 16.0, 6.0

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
class Expected:
    """What the trainer's policy says at the contexts: log-probs (contexts, vocabulary) of the next token."""

    version: int
    contexts: tuple[IntArray, ...]
    fixed: BoolArray  # (contexts,): the same at every look
    logp: FloatArray


@dataclass(frozen=True, eq=False)
class _Answers:
    ids: IntArray
    logp: FloatArray

    def difference(self, expected: Expected, among: BoolArray | None = None) -> float:
        """Mean |log-prob of the engine - log-prob of the trainer|, over the contexts of `among`."""
        distance = np.abs(self.logp - expected.logp[np.arange(len(self.ids)), self.ids])
        return float(np.mean(distance if among is None else distance[among]))


@dataclass(frozen=True, eq=False)
class _Seen:
    """The last look at an engine, and what the trainer said when these answers were given for the first time.

    `first`: what it said at the first look at this engine.
    """

    answers: _Answers
    expected: Expected
    first: Expected


class Canary:
    """Compares an engine with the trainer at fixed contexts. One object serves all engines of a run.

    `noise` is the mean |difference| of the first engine at the first look, which the default bound is made from; a run
    that is resumed must get it back.
    """

    def __init__(
        self, texts: IntArray, config: CanaryConfig, *, temperature: float = 1.0, autocast: str = "none", tied: bool
    ) -> None:
        """`texts` (prompts, length): the last `config.tokens` positions of each row are looked at."""
        self.noise: float | None = None
        self._difference: float | None = None
        self._pull: float | None = None
        self._texts, self._config, self._temperature = texts, config, temperature
        self._autocast, self._tied = autocast, tied
        self._published = 0
        self._seen: WeakKeyDictionary[Engine, _Seen] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @classmethod
    def build(cls, config: Config, tokenizer: Any, model: nn.Module) -> Canary | None:
        """None where the recipe wants no canary (and for embedded engines, unless it asks for one)."""
        canary = config.engine.canary
        every = canary.every if canary.every is not None else int(config.engine.type != "embedded")
        if every == 0:
            return None
        canary = canary.model_copy(update={"every": every})
        settings: Any = model.config
        limits = (getattr(settings, "max_position_embeddings", None), config.engine.vllm.context)
        context = min((limit for limit in limits if limit), default=BASE + canary.tokens)
        length = min(BASE + canary.tokens - 1, context - 1)
        if length < canary.tokens + STAMP:
            raise TrimtabError(f"engine.canary.tokens = {canary.tokens} does not fit a context of {context}: lower it")
        return cls(
            _texts(tokenizer, canary.prompts, length),
            canary,
            temperature=config.sampling.temperature,
            autocast=config.model.autocast,
            tied=bool(getattr(settings, "tie_word_embeddings", False)),
        )

    @torch.no_grad()
    def expect(self, model: nn.Module, version: int) -> Expected | None:
        """What an engine with these weights should say; None at publications that are not looked at.

        Call it at every publication, while `model` holds exactly the published weights.
        """
        self._published += 1
        if (self._published - 1) % (self._config.every or 1):
            return None
        texts, looked = self._stamped(version), self._config.tokens
        ids = torch.from_numpy(texts).to(next(model.parameters()).device)
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=self._autocast == "bfloat16"):
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=looked).logits
        logp = (logits.float() / self._temperature).log_softmax(-1).flatten(0, 1)
        if not bool(torch.isfinite(logp).all()):
            raise DivergedError(f"canary: the trained policy of version {version} is not finite; lower optim.lr")
        first = texts.shape[1] - looked + 1
        contexts = tuple(row[: first + place] for row in texts for place in range(looked))
        fixed = np.repeat(np.arange(len(texts)) % 2 == 0, looked)
        return Expected(version, contexts, fixed, logp.cpu().numpy())

    def check(self, engine: Engine, expected: Expected) -> float:
        """The mean |log-prob difference| between `engine` and `expected`, which was published to it.

        Raises:
            TrimtabError: the engine dates its tokens with another version, reports numbers that are not finite, did not
                change although the policy did, or differs by more than the bound. The line names the likely cause.
        """
        answers = self._ask(engine, expected)
        difference = answers.difference(expected)
        with self._lock:
            seen = self._seen.get(engine)
            self._check_changed(answers, expected, seen)
            self._difference, bound = difference, self._bound()
            if difference > bound:
                cause = self._cause(answers, expected, seen, bound)
                raise TrimtabError(
                    f"canary: at version {expected.version} the engine's log-probs differ from the trainer's by "
                    f"{difference:.3g} on average (bound {bound:.3g}): {cause}; engine.canary.bound sets another bound"
                )
            if self.noise is None:
                self.noise = difference
            first = expected if seen is None else seen.first
            self._check_way(answers, expected, first, self.noise)
            if seen is None or not _equal(seen.answers, answers, expected.fixed):
                self._seen[engine] = _Seen(answers, expected, first)
        return difference

    def metrics(self) -> dict[str, float]:
        """The last look, for the metrics of a step."""
        found = {"canary/abs_diff": self._difference, "canary/pull": self._pull}
        return {name: value for name, value in found.items() if value is not None}

    def _ask(self, engine: Engine, expected: Expected) -> _Answers:
        """One token at every context, through the engine's ordinary way."""
        prompts = [Prompt(Problem(f"canary {i}", "", ""), "", ids) for i, ids in enumerate(expected.contexts)]
        sampling = Sampling(temperature=self._temperature, max_tokens=1, ignore_stop=True)
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
        return _Answers(np.array([completion.response_ids[0] for completion in completions]), logp)

    def _bound(self) -> float:
        if self._config.bound is not None:
            return self._config.bound
        return FRESH if self.noise is None else max(MARGIN * self.noise, FLOOR)

    def _check_changed(self, answers: _Answers, expected: Expected, seen: _Seen | None) -> None:
        """Equal to the bit is what an engine says twice under the same weights, and never under others."""
        if seen is None or self.noise is None or not _equal(seen.answers, answers, expected.fixed):
            return
        places, ids = np.flatnonzero(expected.fixed), answers.ids[expected.fixed]
        moved = float(np.mean(np.abs(expected.logp[places, ids] - seen.expected.logp[places, ids])))
        if moved > max(UNCHANGED * self.noise, 1e-6):
            raise TrimtabError(
                f"canary: the engine's answers at version {expected.version} are those of version "
                f"{seen.expected.version} to the bit, although the policy's log-probs moved by {moved:.3g}: the update "
                "was skipped"
            )

    def _check_way(self, answers: _Answers, expected: Expected, first: Expected, noise: float) -> None:
        """A part that stays behind pulls the engine back towards where the policy began, below any bound at first."""
        if noise < FLOOR / MARGIN:
            return  # exact numerics: the bound is as sharp
        places, ids = np.flatnonzero(expected.fixed), answers.ids[expected.fixed]
        now = expected.logp[places, ids]
        way = first.logp[places, ids] - now
        length = float(np.linalg.norm(way))
        if length == 0:
            return
        back = float(np.clip(answers.logp[places] - now, -CLIP * noise, CLIP * noise) @ way)
        self._pull = back / (length * noise)
        if back / length**2 > LEFT and self._pull > PULL:
            raise TrimtabError(
                f"canary: at version {expected.version} the engine is {back / length**2:.0%} of the policy's way back "
                f"towards version {first.version}: a part of its weights, or its prefix cache, is that old"
            )

    def _cause(self, answers: _Answers, expected: Expected, seen: _Seen | None, bound: float) -> str:
        fixed, fresh = (answers.difference(expected, among) for among in (expected.fixed, ~expected.fixed))
        if fresh <= bound < fixed:
            return (
                f"only contexts it had seen before are wrong ({fixed:.3g}, new ones {fresh:.3g}), so its prefix cache "
                "holds keys and values of earlier weights: reset it at every publication"
            )
        same = seen is not None and _equal(seen.answers, answers, expected.fixed)
        if seen is not None and (same or answers.difference(seen.expected, expected.fixed) < fixed / 2):
            return f"it still samples from the weights of version {seen.expected.version}: the update was skipped"
        head = "most often a tied head with a packed copy of its own" if self._tied else "or they were garbled"
        if seen is None and self.noise is None:
            return f"it holds another model, or a part of the weights was not taken over ({head})"
        return f"a part of the weights was not taken over ({head})"

    def _stamped(self, version: int) -> IntArray:
        """The texts, every second one beginning with `version` written in tokens of the text."""
        texts = self._texts.copy()
        alphabet = np.unique(texts)
        digits = [version // len(alphabet) ** place % len(alphabet) for place in range(STAMP)]
        texts[1::2, :STAMP] = alphabet[digits]
        return texts


def _equal(old: _Answers, new: _Answers, among: BoolArray) -> bool:
    return bool(
        np.array_equal(old.ids[among], new.ids[among])
        and np.array_equal(old.logp[among].view(np.int32), new.logp[among].view(np.int32))
    )


def _texts(tokenizer: Any, count: int, length: int) -> IntArray:
    """`count` stretches of the corpus that begin at different places, (count, length)."""
    ids = np.array(tokenizer.encode(CORPUS, add_special_tokens=False), dtype=np.int64)
    starts = np.arange(count) * len(ids) // count
    return ids[(starts[:, None] + np.arange(length)) % len(ids)]
