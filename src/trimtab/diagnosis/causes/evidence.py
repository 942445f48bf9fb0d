"""The trained tokens that causes are inferred from, with differences of log-probs converted to logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.diagnosis.records import Chunk

NEAREST = -1e-7
"""The log-prob closest to 0 that float32 distinguishes from it; logits are clamped there."""

MIDDLE = (-5.0, -0.05)
"""Range of the mean log-prob of trainer and sampler in which both probabilities are precise and noise is visible."""


COLUMNS = ("behavior", "trainer", "row", "place", "turn", "entropy", "ids", "age", "inner")


def logit(logp: np.ndarray) -> np.ndarray:
    """Returns log(p / (1 - p)) of log p, clamped at `NEAREST`."""
    logp = np.minimum(logp, NEAREST)
    return logp - np.log(-np.expm1(logp))


@dataclass(frozen=True, eq=False)
class Tokens:
    """Trained tokens with finite log-probs, in order; arrays (tokens,), float64 unless stated.

    behavior, trainer: log-probs, at most 0. row: int64, response. place: int64, position in its response, masked tokens
    included. turn: int64, tokens since the last boundary (start of the response, or end of a masked stretch).
    entropy, ids, age: None where the data has none. inner: bool, whether that boundary lies inside the response.
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
        """Returns the usable tokens of a chunk."""
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
        """The trainer's logit minus the sampler's."""
        return logit(self.trainer) - logit(self.behavior)

    @property
    def middle(self) -> np.ndarray:
        """Tokens whose mean log-prob lies within `MIDDLE`."""
        mean = 0.5 * (self.behavior + self.trainer)
        return (mean > MIDDLE[0]) & (mean < MIDDLE[1])

    def kept(self, keep: np.ndarray) -> Tokens:
        """Returns the tokens where `keep` is True."""
        return replace(self, **{n: v[keep] for n in COLUMNS if (v := getattr(self, n)) is not None})

    def repaired(self, trainer: np.ndarray, keep: np.ndarray) -> Tokens:
        """Returns the tokens where `keep` is True, with other log-probs of the trainer."""
        return replace(self, trainer=trainer).kept(keep)

    def swapped(self) -> Tokens:
        """Returns the tokens with trainer and sampler exchanged."""
        return replace(self, behavior=self.trainer, trainer=self.behavior)

    def of_response(self, values: np.ndarray | None) -> np.ndarray | None:
        """Returns a column of responses at each token."""
        return None if values is None else values[self.row]


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Concatenates several selections of tokens of one chunk."""
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
    """Returns the number of tokens since the last boundary, and whether that boundary lies inside the response."""
    index = np.arange(len(mask))
    begins = mask & ((place == 0) | ~np.concatenate([[False], mask[:-1]]))
    last = np.maximum.accumulate(np.where(begins, index, 0)) if len(mask) else index
    inside = begins & (place > 0)
    # The first trained token after masked ones at the start of a response (a forced prefix) is not a turn boundary.
    trained_before = np.concatenate([[0], np.cumsum(mask)[:-1]]) if len(mask) else index
    start = index - place
    inside &= trained_before > trained_before[start]
    return index - last, inside[last]


def share(values: np.ndarray) -> float:
    """Returns the share of True values; 0 without values."""
    return float(values.mean()) if len(values) else 0.0


def z_of(values: np.ndarray) -> float:
    """Returns the mean divided by its standard error; 0 for fewer than 20 values."""
    if len(values) < 20:
        return 0.0
    error = float(values.std()) / np.sqrt(len(values))
    return float(values.mean()) / max(error, 1e-12)


def confidence(strength: float, needed: float) -> float:
    """Returns a confidence in (0.5, 0.99] that grows with the ratio of a statistic to its threshold."""
    excess = max(strength / needed, 1.0)
    return round(float(min(0.99, 1.0 - 0.45 / excess)), 2)
