"""Small data for tests of measuring: tables from lists, tables at random, tables cut in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from trimtab.diagnosis.measure import measure
from trimtab.diagnosis.measure.trained_tokens import TrainedTokens
from trimtab.diagnosis.records import DataSummary, Measured, View
from trimtab.diagnosis.tokens import TokenTable

ORIGIN = DataSummary(framework="trimtab", files=1, responses=0, tokens=0, trained=0, anchor="proximal")


def table(log_ratio: Sequence[Sequence[float]], **columns: Any) -> TokenTable:
    """Responses of the given log-ratios, all trained, every token of behavior log-prob -1 unless columns say so.

    Per-token columns are given per response like `log_ratio`; `behavior` may be one number.
    """
    flat = {name: _flat(values, log_ratio) for name, values in columns.items() if name in _PER_TOKEN}
    behavior = flat.pop("behavior", np.full(sum(map(len, log_ratio)), -1.0)).astype(np.float32)
    mask = flat.pop("mask", np.ones(len(behavior), dtype=np.bool_)).astype(np.bool_)
    ratio = np.concatenate([np.asarray(row, dtype=np.float64) for row in log_ratio])
    rows = {name: np.asarray(values) for name, values in columns.items() if name not in _PER_TOKEN}
    starts = np.cumsum([0, *map(len, log_ratio)])
    proximal = (behavior.astype(np.float64) + ratio).astype(np.float32)
    return TokenTable(starts=starts, mask=mask, behavior=behavior, proximal=proximal, **flat, **rows)


_PER_TOKEN = frozenset(("behavior", "mask", "ids", "entropy", "version"))


def _flat(values: Any, like: Sequence[Sequence[float]]) -> np.ndarray:
    if np.isscalar(values):
        return np.full(sum(map(len, like)), values)
    return np.concatenate([np.asarray(row) for row in values])


def values(record: TokenTable | View, name: str) -> list:
    """A column of a table or a view as a list."""
    return getattr(record, name).tolist()


def trained(data: TokenTable) -> TrainedTokens:
    return TrainedTokens.of(data, 0)


def whole(*tables: TokenTable) -> Measured:
    return measure(iter(tables), lambda: ORIGIN)


def noisy(seed: int, responses: int, *, noise: float = 0.05, length: int = 20) -> TokenTable:
    """Responses of random length (some empty) with every column, untrained tokens with NaN among them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 2 * length, responses)
    tokens = int(lengths.sum())
    behavior = -rng.exponential(1.5, tokens)
    proximal = behavior + noise * rng.standard_normal(tokens) * np.sqrt(-behavior)
    mask = rng.random(tokens) < 0.8
    behavior[~mask & (rng.random(tokens) < 0.3)] = np.nan
    step = np.sort(rng.integers(0, 5, responses))
    return TokenTable(
        starts=np.append(0, np.cumsum(lengths)),
        mask=mask,
        behavior=behavior.astype(np.float32),
        proximal=proximal.astype(np.float32),
        ids=rng.integers(0, 30, tokens),
        entropy=rng.exponential(1.0, tokens).astype(np.float32),
        version=np.repeat(step, lengths) - rng.integers(0, 3, tokens),
        step=step,
        group=np.arange(responses) // 3,
        proximal_version=step,
        reward=rng.random(responses),
    )


def pieces(data: TokenTable, cuts: Iterable[int]) -> list[TokenTable]:
    """The table cut before the given responses; pieces may be empty."""
    ends = [0, *sorted(cuts), data.responses]
    index = np.arange(data.responses)
    return [data.select((index >= low) & (index < high)) for low, high in itertools.pairwise(ends)]
