"""Exact streams: tokens drawn from the softmax of random logits, scored by logits that differ in a known way.

The sampler's log-prob is that of the distribution the token was drawn from, so that the mean ratio is 1 by construction
whatever the trainer's logits are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from zoo.streams import Stream

VOCABULARY, POOL, LARGE_POOL, BLOCK = 80, 15_000, 200_000, 5_000
TRAINER_AT = {"trainer@0.9": 0.9, "trainer@1.3": 1.3, "trainer@0.7": 0.7}
"""Columns with a trainer at another temperature than the sampler, weakest first."""
COLD, CUT = (0.9, 0.8, 0.65), (0.97, 0.9, 0.8)
"""Temperature and top-p of sampling other than plain, weakest first."""
AGES, DRIFT = 4, (0.05, 0.15, 0.4)
"""Number of ages, and logits by which the trainer drifts in each update."""
STEPS, RESTART = 8, 4
"""Number of steps, and the one before which a sampler with a stale cache was restarted."""
ROUTED, ROUTED_SIZE, UNROUTED_SIZE = (0.015, 0.03, 0.06), 1.2, 0.03
"""Share of tokens that other experts answer, and noise of the logits with and without."""
HARD_PROMPTS, HARD_SIZE = 0.18, (0.3, 0.6, 1.0)

Change = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]


@dataclass(frozen=True, eq=False)
class Layout:
    """Where tokens lie: lengths of responses and their columns."""

    starts: np.ndarray
    tokens: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]

    @classmethod
    def of(cls, random: np.random.Generator, *, tokens: int = POOL, shortest: int = 14, longest: int = 60) -> Layout:
        lengths = random.integers(shortest, longest + 1, 2 * tokens // (shortest + longest))
        starts = np.append(0, np.cumsum(lengths))
        prompts = np.repeat(np.arange(1 + len(lengths) // 4), 4)[: len(lengths)]
        return cls(starts, {}, {"prompt": prompts, "prompt_length": 20 + 7 * (prompts % 11)})

    @property
    def row(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    @property
    def position(self) -> np.ndarray:
        return np.arange(self.starts[-1]) - self.starts[self.row]


def draw(
    layout: Layout, change: Change, random: np.random.Generator, *, temperature: float = 1.0, top_p: float = 1.0
) -> Stream:
    """Draws every token. `change(logits, index of the tokens, random)` returns the trainer's logits."""
    unigram = np.random.default_rng(1).normal(0, 0.8, VOCABULARY)
    parts: dict[str, list[np.ndarray]] = {}
    for start in range(0, int(layout.starts[-1]), BLOCK):
        index = np.arange(start, min(start + BLOCK, int(layout.starts[-1])))
        scale = np.exp(random.normal(1.1, 0.8, (len(index), 1)))
        logits = scale * (random.normal(size=(len(index), VOCABULARY)) + unigram)
        other = change(logits, index, random)
        kept = _kept(logits / temperature, top_p)
        sampler = _log_softmax(np.where(kept, logits / temperature, -np.inf))
        mass = np.exp(sampler).cumsum(-1)
        ids = (mass > random.random((len(index), 1)) * mass[:, -1:]).argmax(-1)
        at = (np.arange(len(index)), ids)
        block = {
            "ids": ids,
            "behavior": sampler[at],
            "top": sampler.max(-1),
            "trainer": _log_softmax(np.where(kept, other / temperature, -np.inf))[at],
        }
        if temperature != 1.0 or top_p != 1.0:
            block |= {"raw": _log_softmax(logits)[at], "trainer_raw": _log_softmax(other)[at]}
        else:
            block |= {name: _log_softmax(other / t)[at] for name, t in TRAINER_AT.items()}
        for name, values in block.items():
            parts.setdefault(name, []).append(values)
    tokens = {name: np.concatenate(values) for name, values in parts.items()}
    return Stream(layout.starts, {**tokens, **layout.tokens}, layout.rows)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _kept(logits: np.ndarray, top_p: float) -> np.ndarray:
    """The smallest set of most probable ids whose mass reaches `top_p`."""
    if top_p == 1.0:
        return np.ones(logits.shape, dtype=bool)
    order = np.argsort(-logits, axis=-1)
    mass = np.cumsum(np.take_along_axis(np.exp(_log_softmax(logits)), order, -1), -1)
    kept = np.empty(logits.shape, dtype=bool)
    np.put_along_axis(kept, order, np.concatenate([np.ones((len(logits), 1), bool), mass[:, :-1] < top_p], -1), -1)
    return kept


def noise(size: np.ndarray | float) -> Change:
    """Independent normal noise on every logit; `size` is one number or one per token."""

    def change(logits: np.ndarray, index: np.ndarray, random: np.random.Generator) -> np.ndarray:
        width = size[index, None] if isinstance(size, np.ndarray) else size
        return logits + width * random.normal(size=logits.shape)

    return change


def drift(size: np.ndarray, rest: float) -> Change:
    """Other weights: three quarters of the change of a logit depend on the token id alone. `size`: one per token."""
    direction = np.random.default_rng(2).normal(size=VOCABULARY)

    def change(logits: np.ndarray, index: np.ndarray, random: np.random.Generator) -> np.ndarray:
        own = random.normal(size=logits.shape)
        moved = size[index, None] * (np.sqrt(0.75) * direction + 0.5 * own)
        return logits + moved + rest * random.normal(size=logits.shape)

    return change


def synthetic(size: float, kind: str, level: int) -> Stream:
    """Returns a stream of a base whose trainer has noise of `size` logits; made once.

    kind: plain, turns (with observations), cold (another temperature), cut (top-p), aged, steps (weights that never
    arrive), cached (a prefix cache that outlives weights), routed, prompts (errors that repeat for a prompt).
    level: 0 to 2, its strength, which plain and turns do not have.
    """
    return _made(size, kind, 0 if kind in ("plain", "turns") else level)


@cache
def _made(size: float, kind: str, level: int) -> Stream:
    random = np.random.default_rng([len(kind), level, int(1e6 * size)])
    # Only the base without noise is used with 200,000 tokens, which must not be a few tokens many times.
    tokens = LARGE_POOL if size < 1e-5 else POOL
    layout = Layout.of(random, tokens=tokens)
    if kind == "plain":
        return draw(layout, noise(size), random)
    if kind == "cold":
        return draw(layout, noise(size), random, temperature=COLD[level])
    if kind == "cut":
        return draw(layout, noise(size), random, top_p=CUT[level])
    if kind == "routed":
        flipped = random.random(layout.starts[-1]) < ROUTED[level]
        return draw(layout, noise(np.where(flipped, ROUTED_SIZE, max(size, UNROUTED_SIZE))), random)
    if kind == "prompts":
        hard = random.random(layout.rows["prompt"].max() + 1) < HARD_PROMPTS
        return draw(layout, noise(np.where(hard[layout.rows["prompt"]][layout.row], HARD_SIZE[level], size)), random)
    return {"turns": _turns, "aged": _aged, "steps": _steps, "cached": _cached}[kind](layout, size, level, random)


def _turns(layout: Layout, size: float, _level: int, random: np.random.Generator) -> Stream:
    """Three turns with observations of six tokens between them; nothing is sampled there."""
    layout = Layout.of(random, tokens=int(layout.starts[-1]), shortest=36, longest=60)
    length = np.diff(layout.starts)[layout.row]
    turn = 3 * layout.position // length
    place = layout.position - -(-turn * length // 3)
    observed = (turn > 0) & (place < 6)
    stream = draw(layout, noise(size), random)
    shown = -np.abs(random.normal(2, 2, len(stream)))
    columns = {name: np.where(observed, shown, stream[name]) for name in ("behavior", "trainer", "top")}
    return stream.changed(**columns, mask=~observed, turn=turn - observed)


def _aged(layout: Layout, size: float, level: int, random: np.random.Generator) -> Stream:
    age = random.integers(0, AGES, len(layout.starts) - 1)
    layout.rows["step"] = np.sort(random.integers(10, 10 + STEPS, len(age)))
    layout.rows["proximal_version"] = layout.rows["step"]
    layout.tokens["version"] = (layout.rows["step"] - age)[layout.row]
    return draw(layout, drift(DRIFT[level] * age[layout.row], size), random)


def _steps(layout: Layout, size: float, level: int, random: np.random.Generator) -> Stream:
    """Versions say age 0, but the sampler keeps the weights of the first step."""
    step = np.sort(np.arange(len(layout.starts) - 1) % STEPS)
    layout.rows.update(step=step, proximal_version=step)
    layout.tokens["version"] = step[layout.row]
    return draw(layout, drift(DRIFT[level] * step[layout.row], size), random)


def _cached(layout: Layout, size: float, level: int, random: np.random.Generator) -> Stream:
    """Versions say age 0. Keys and values of a prompt are those of its first request since the engine's start."""
    count = len(layout.starts) - 1
    step = np.sort(np.arange(count) % STEPS)
    prompt = random.integers(0, count // 7, count)
    lengths = 20 + 11 * (prompt % 7)
    layout.rows.update(step=step, proximal_version=step, prompt=prompt, prompt_length=lengths, cluster=prompt)
    layout.tokens["version"] = step[layout.row]
    first: dict[tuple[int, int], int] = {}
    keys = [(int(p), int(s >= RESTART)) for p, s in zip(prompt, step, strict=True)]
    age = np.array([int(s) - first.setdefault(key, int(s)) for key, s in zip(keys, step, strict=True)])
    weight = np.sqrt(layout.rows["prompt_length"] / 50)
    return draw(layout, drift((2 * DRIFT[level] * age * weight)[layout.row], size), random)
