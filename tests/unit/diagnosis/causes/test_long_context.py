"""`long-context`: planted at several strengths, and every other cause and clean runs in responses just as long.

A token is one of two outcomes: the sampler's logit is drawn, the outcome follows it, and the trainer's logit is the
sampler's plus a fault. So the log-probs satisfy all that sampled ones do. Later tokens are less certain than early
ones, which by itself makes log-ratios grow with depth; that is no cause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support import planted_causes as plant

from trimtab.diagnosis.causes.detector import logit
from trimtab.diagnosis.tokens import TokenTable

RESPONSES, LONGEST = 24, 2600


class Long:
    """Responses of 1,400 to 2,600 tokens whose uncertainty grows with the position."""

    def __init__(self, seed: int, responses: int = RESPONSES, shortest: int = 1400, longest: int = LONGEST) -> None:
        self.random = np.random.default_rng(seed)
        lengths = self.random.integers(shortest, longest, responses)
        self.starts = np.append(0, np.cumsum(lengths))
        self.row = np.repeat(np.arange(responses), lengths)
        self.position = np.arange(len(self.row)) - self.starts[self.row]
        self.depth = self.position / longest
        self.logit = self.random.normal(4 - 2.5 * self.depth, 2.0)
        self.yes = self.random.random(len(self.row)) < 1 / (1 + np.exp(-self.logit))
        self.ids = self.random.integers(0, 2000, len(self.row))

    def logp(self, logits: np.ndarray) -> np.ndarray:
        """The log-prob of the outcome."""
        return -np.logaddexp(0, np.where(self.yes, -logits, logits))

    def noise(self, size: np.ndarray | float) -> np.ndarray:
        return self.logit + size * self.random.standard_normal(len(self.logit))

    def table(self, trainer: np.ndarray, **columns: Any) -> TokenTable:
        columns = {"mask": np.ones(len(trainer), dtype=bool), "ids": self.ids, **columns}
        behavior = columns.pop("behavior", self.logp(self.logit))
        return TokenTable(
            starts=self.starts, behavior=behavior.astype(np.float32), proximal=trainer.astype(np.float32), **columns
        )


@pytest.mark.parametrize(
    ("size", "named"),
    [
        (lambda long: 0.02 + 0.14 * long.depth, {"long-context"}),
        (lambda long: 0.02 + 0.06 * long.depth, {"long-context"}),
        (lambda long: 1.5 * long.depth, {"long-context"}),
        (lambda long: np.where(long.position > 1500, 0.2, 0.02), {"long-context"}),  # a jump
        (lambda long: 0.06 * (1 + 2.2 * long.depth), {"long-context", "precision"}),  # on top of much larger noise
    ],
)
def test_noise_that_grows_with_depth(size: Callable[[Long], np.ndarray], named: set[str]) -> None:
    long = Long(0)
    causes = plant.causes(long.table(long.logp(long.noise(size(long)))))
    assert {cause.name for cause in causes} == named
    assert "of the response (z =" in causes[0].evidence
    assert "24 responses" in causes[0].evidence


def test_short_responses_to_prompts_of_all_lengths() -> None:
    long = Long(0, responses=600, shortest=80, longest=120)
    prompt = long.random.integers(100, 60_000, 600).astype(np.float64)
    grown = long.table(long.logp(long.noise((0.01 + 0.2 * prompt / 60_000)[long.row])), prompt_length=prompt)
    (cause,) = plant.causes(grown)
    assert cause.name == "long-context"
    assert "of the context, compared between responses" in cause.evidence
    unknown = replace(grown, prompt_length=None)
    assert "long-context" not in plant.names(unknown)


def stale(long: Long) -> dict[str, Any]:
    """Every second response is of weights that are 4 updates older."""
    old = long.row % 2
    version, count = np.where(old, 0, 4), len(long.starts) - 1
    drift = np.random.default_rng(5).normal(0, 0.1, 2000)[long.ids]
    columns = {"version": version, "proximal_version": np.full(count, 4)}
    return {"trainer": long.logp(long.logit + old * drift), **columns}


def stale_and_longer(long: Long) -> dict[str, Any]:
    """The age grows with the length of the response, as where long ones take several updates; ages are not known."""
    lengths = np.diff(long.starts)[long.row] / LONGEST
    return {"trainer": long.logp(long.noise(0.3 * lengths**2))}


def shifted(long: Long) -> dict[str, Any]:
    return {"trainer": plant.shifted(long.starts, long.logp(long.logit), 1)}


def turned(long: Long) -> dict[str, Any]:
    """A turn begins at token 1,000, and from there on lists are one place off."""
    mask = np.abs(long.position - 996) > 4
    return {"trainer": plant.shifted(long.starts, long.logp(long.logit), 1, since=1000), "mask": mask}


def jumps(long: Long) -> dict[str, Any]:
    trainer = long.logp(long.logit)
    hit = long.random.random(len(trainer)) < 0.001 * (1 + long.depth)
    trainer[hit] -= 12
    return {"trainer": trainer}


def rounded(long: Long) -> dict[str, Any]:
    """Log-probs of three digits: the rounding is larger where they are, and nothing grows at equal probability."""
    return {"trainer": np.array([float(f"{value:.3g}") for value in long.logp(long.noise(1e-4))])}


def truncated(long: Long) -> dict[str, Any]:
    """The sampler leaves out outcomes below .1, the trainer does not."""
    kept = np.where(np.abs(long.logit) > logit(np.log(0.9)), np.sign(long.logit) * 40, long.logit)
    long.yes = long.random.random(len(kept)) < 1 / (1 + np.exp(-kept))
    return {"trainer": long.logp(long.logit), "behavior": np.minimum(long.logp(kept), 0)}


PLANTS: dict[str, tuple[Callable[[Long], dict[str, Any]], set[str]]] = {
    "clean": (lambda long: {"trainer": long.logp(long.logit)}, {"copied"}),  # both columns are the same numbers
    "float32": (lambda long: {"trainer": long.logp(long.noise(1e-6))}, set()),
    "float16": (lambda long: {"trainer": long.logp(long.noise(0.005))}, {"precision"}),
    "bfloat16": (lambda long: {"trainer": long.logp(long.noise(0.08))}, {"precision"}),
    "four bits": (lambda long: {"trainer": long.logp(long.noise(0.6))}, {"quantized"}),
    "noise of a third more at the end": (
        lambda long: {"trainer": long.logp(long.noise(0.08 * (1 + 0.33 * long.depth)))},
        {"precision"},
    ),
    "trainer at T = .8": (lambda long: {"trainer": long.logp(long.logit / 0.8)}, {"temperature"}),
    "raw": (
        lambda long: {"trainer": long.logp(long.logit), "behavior": long.logp(0.7 * long.logit)},
        {"raw-logprobs"},
    ),
    "truncated": (truncated, {"truncated-sampling"}),
    "shifted": (shifted, {"misaligned"}),
    "turned": (turned, {"retokenized"}),
    "jumps": (jumps, {"unexplained"}),  # in data of one turn
    "stale": (stale, {"stale"}),
    "three digits": (rounded, {"precision"}),
    "stale where responses are long": (stale_and_longer, {"quantized", "precision"}),
}


@pytest.mark.parametrize("name", PLANTS)
def test_other_causes_in_long_responses_keep_their_names(name: str) -> None:
    make, expected = PLANTS[name]
    long = Long(0)
    found = plant.names(long.table(**make(long)))
    assert "long-context" not in found
    assert found <= expected
    assert bool(found) == bool(expected)
