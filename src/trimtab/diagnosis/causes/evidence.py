"""The tokens that causes are detected from, with differences converted to logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.diagnosis.records import Chunk

NEAREST = -1e-7
"""The closest to 0 that a float32 log-prob tells apart; a logit is cut off there."""

MIDDLE = (-5.0, -0.05)
"""Log-probs, averaged over trainer and sampler, between which both probabilities have digits and noise shows."""


COLUMNS = ("behavior", "trainer", "row", "place", "turn", "entropy", "ids", "age", "inner")


def logit(logp: np.ndarray) -> np.ndarray:
    """log(p / (1 - p)) of log p, cut off where float32 has no more digits."""
    logp = np.minimum(logp, NEAREST)
    return logp - np.log(-np.expm1(logp))


@dataclass(frozen=True, eq=False)
class Tokens:
    """Trained tokens with finite log-probs, in order; arrays (tokens,), float64 where not said otherwise.

    behavior, trainer: log-probs, at most 0. row: int64, response; place: int64, position in its response, masked
    tokens counted. turn: int64, tokens since the last boundary (start of the response or end of a masked stretch).
    turns: whether any response has a boundary inside. entropy, ids, age: where the data has them.
    """

    chunk: Chunk
    behavior: np.ndarray
    trainer: np.ndarray
    row: np.ndarray
    place: np.ndarray
    turn: np.ndarray
    entropy: np.ndarray | None
    ids: np.ndarray | None
    age: np.ndarray | None
    inner: np.ndarray

    @classmethod
    def of(cls, chunk: Chunk) -> Tokens:
        """The usable tokens of a chunk."""
        behavior, trainer = chunk.behavior.astype(np.float64), chunk.trainer.astype(np.float64)
        rows = chunk.rows
        place = np.arange(chunk.tokens) - chunk.starts[rows]
        turn, inner = _since_boundary(chunk.mask, place)
        use = chunk.mask & np.isfinite(behavior) & np.isfinite(trainer)
        age = None
        if chunk.version is not None and chunk.proximal_version is not None:
            age = np.maximum(chunk.proximal_version[rows] - chunk.version, 0)[use]
        return cls(
            chunk,
            np.minimum(behavior, 0.0)[use],
            np.minimum(trainer, 0.0)[use],
            rows[use],
            place[use],
            turn[use],
            None if chunk.entropy is None else chunk.entropy.astype(np.float64)[use],
            None if chunk.ids is None else chunk.ids[use],
            age,
            inner[use],
        )

    def __len__(self) -> int:
        return len(self.behavior)

    @property
    def log_ratio(self) -> np.ndarray:
        return self.trainer - self.behavior

    @property
    def shift(self) -> np.ndarray:
        """The trainer's logit less the sampler's."""
        return logit(self.trainer) - logit(self.behavior)

    @property
    def middle(self) -> np.ndarray:
        """Tokens whose mean log-prob lies within `MIDDLE`."""
        mean = 0.5 * (self.behavior + self.trainer)
        return (mean > MIDDLE[0]) & (mean < MIDDLE[1])

    def kept(self, keep: np.ndarray) -> Tokens:
        """The tokens where `keep` holds."""
        return replace(self, **{n: v[keep] for n in COLUMNS if (v := getattr(self, n)) is not None})

    def repaired(self, trainer: np.ndarray, keep: np.ndarray) -> Tokens:
        """Other log-probs of the trainer, and only the tokens where `keep` holds."""
        return replace(self, trainer=trainer).kept(keep)

    def swapped(self) -> Tokens:
        """Trainer and sampler with their roles exchanged."""
        return replace(self, behavior=self.trainer, trainer=self.behavior)

    def of_response(self, values: np.ndarray | None) -> np.ndarray | None:
        """A column of responses, one value a token."""
        return None if values is None else values[self.row]


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Tokens of several selections of one chunk, as one."""
    first = parts[0]
    return replace(
        first,
        **{
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in COLUMNS
            if getattr(first, name) is not None
        },
    )


def _since_boundary(mask: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens since the last boundary, and whether that boundary lies inside the response."""
    index = np.arange(len(mask))
    begins = mask & ((place == 0) | ~np.concatenate([[False], mask[:-1]]))
    last = np.maximum.accumulate(np.where(begins, index, 0)) if len(mask) else index
    inside = begins & (place > 0)
    # A response that starts with masked tokens (a forced prefix) has its first trained token at no turn boundary.
    trained_before = np.concatenate([[0], np.cumsum(mask)[:-1]]) if len(mask) else index
    start = index - place
    inside &= trained_before > trained_before[start]
    return index - last, inside[last]


def share(values: np.ndarray) -> float:
    """The mean of a condition; 0 for no tokens."""
    return float(values.mean()) if len(values) else 0.0


def z_of(values: np.ndarray) -> float:
    """The mean over its standard error; 0 where fewer than 20 values cannot tell."""
    if len(values) < 20:
        return 0.0
    error = float(values.std()) / np.sqrt(len(values))
    return float(values.mean()) / max(error, 1e-12)


def sureness(strength: float, needed: float) -> float:
    """A confidence in (0.5, 0.99] that grows with how far a statistic is beyond what its rule asks for."""
    excess = max(strength / needed, 1.0)
    return round(float(min(0.99, 1.0 - 0.45 / excess)), 2)
