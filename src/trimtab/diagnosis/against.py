"""Compares two diagnoses (`trimtab diagnose A --against B`): whether k3 differs by more than chance.

`DiagnosisComparison` holds the numbers; the functions below `_change` turn them into the sentences and tables of the
terminal, Markdown and the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from trimtab.diagnosis.answer import Diagnosis
from trimtab.diagnosis.measure.size import CLUSTERS
from trimtab.diagnosis.measure.trained_tokens import TrainedTokens
from trimtab.intervals import Interval, cluster_intervals
from trimtab.text import format_percent, short

TAIL = 0.01  # share of the tokens that form the tail: those with the largest |log-ratio|
_FEWEST_CLUSTERS = 5  # no intervals if a side has fewer clusters
_UNKNOWN = Interval(math.nan, math.nan, math.nan)
_AGREE = ("exact", "rounding")  # verdicts that mean: no mismatch beyond rounding
HEADS = ("", "A", "B", "A against B")


@dataclass(frozen=True, eq=False)
class DiagnosisComparison:
    """A comparison of two diagnoses: the first (A) against the second (B).

    Intervals are at 95%, over responses. Their ends are NaN with too few responses; a value is NaN if a side is 0.
    """

    first: Diagnosis
    second: Diagnosis
    k3: Interval  # k3 of A / k3 of B
    ratio_mean: Interval  # mean ratio of A / mean ratio of B
    tail: Interval  # tails[0] - tails[1]
    tails: tuple[float, float]  # share of k3 in the 1% of the tokens with the largest |log-ratio|, of A and of B
    # "prompt" or "response" if the smaller side shares at least half of them, so that intervals are paired; else "".
    paired: str
    pairs: int  # number of prompts or responses that occur in both
    names: tuple[str, str] = ("", "")  # names of the files; empty if redacted

    @property
    def differs(self) -> bool | None:
        """Whether k3 differs by more than chance; None without an interval."""
        return beyond_chance(self.k3, 1.0)

    @property
    def sides(self) -> tuple[tuple[str, str, Diagnosis], ...]:
        """Letter, file names and diagnosis of each side."""
        return ("A", self.names[0], self.first), ("B", self.names[1], self.second)


def beyond_chance(change: Interval, equal: float) -> bool | None:
    """Returns whether a 95% interval excludes the value of no change; None without an interval."""
    if not (math.isfinite(change.low) and math.isfinite(change.high)):
        return None
    return not change.low <= equal <= change.high


def compare_samples(first: Diagnosis, second: Diagnosis, names: tuple[str, str] = ("", "")) -> DiagnosisComparison:
    """Compares two diagnoses by their samples of tokens."""
    sides = [TrainedTokens.of(diagnosis.measured.sample, 0) for diagnosis in (first, second)]
    clusters, paired, pairs = _clusters(*sides)
    few = min(len(np.unique(side)) for side in clusters) < _FEWEST_CLUSTERS
    sums = np.hstack([_sums(side, cluster % CLUSTERS) for side, cluster in zip(sides, clusters, strict=True)])
    sums = sums[sums.any(axis=1)]
    whole = _statistics(torch.from_numpy(sums.sum(axis=0)))
    known = [name for name, value in whole.items() if value.isfinite()]
    logs = cluster_intervals(sums, lambda drawn: {name: _statistics(drawn)[name] for name in known}, seed=0)
    changes = {name: _change(logs.get(name), few, exponential=name != "tail") for name in whole}
    one, two = (float(tail / k3) if k3 > 0 else math.nan for _, _, k3, tail in sums.sum(axis=0).reshape(2, 4))
    return DiagnosisComparison(first, second, **changes, tails=(one, two), paired=paired, pairs=pairs, names=names)


def _clusters(first: TrainedTokens, second: TrainedTokens) -> tuple[tuple[np.ndarray, np.ndarray], str, int]:
    """Returns the bootstrap clusters of the responses of both sides, what pairs them, and the number of pairs.

    A cluster is a prompt, or a response if prompts are unknown. A prompt or response of both sides is one cluster.
    """
    tables = first.table, second.table
    by = "prompt" if all(table.prompt is not None for table in tables) else ""
    by = by or ("response" if all(table.ids is not None for table in tables) else "")
    one, two = _keys(first, by), _keys(second, by)
    names, number = np.unique(np.concatenate([one, two]), return_inverse=True)
    one, two = number[: len(one)], number[len(one) :]
    pairs = len(np.intersect1d(one, two))
    if by and 2 * pairs >= min(len(np.unique(one)), len(np.unique(two))):
        return (one, two), by, pairs
    return (one, two + len(names)), "", 0


def _keys(tokens: TrainedTokens, by: str) -> np.ndarray:
    """Returns a key of each response (responses,): its prompt, a hash of its ids, its group, or its own index."""
    table, ids = tokens.table, tokens.table.ids
    if by == "response" and ids is not None:
        starts = table.starts
        # Not `hash`: its salt would change the order of the clusters, and so the draws, in each process.
        digests = (blake2b(ids[starts[row] : starts[row + 1]].tobytes(), digest_size=8) for row in tokens.responses)
        return np.frombuffer(b"".join(digest.digest() for digest in digests), np.uint64)
    column = table.prompt if by else table.group
    return np.arange(len(tokens.responses)) if column is None else tokens.per_response(column)


def _sums(tokens: TrainedTokens, cluster: np.ndarray) -> np.ndarray:
    """Returns the sums of each cluster (clusters, 4): tokens, ratio - 1, k3, and k3 of the tail."""
    far = tokens.size >= np.quantile(tokens.size, 1 - TAIL)
    columns = (tokens.lengths, *(map(tokens.over, (tokens.excess, tokens.k3, np.where(far, tokens.k3, 0.0)))))
    return np.stack([np.bincount(cluster, weights=column, minlength=CLUSTERS) for column in columns], axis=1)


def _statistics(sums: Tensor) -> dict[str, Tensor]:
    """Returns A - B from sums (..., 8): of log k3, of the log of the mean ratio, and of the tail's share of k3."""
    sides = [side.unbind(-1) for side in sums.chunk(2, dim=-1)]
    k3 = [(k3 / tokens).log() for tokens, _, k3, _ in sides]
    means = [torch.log1p(excess / tokens) for tokens, excess, _, _ in sides]
    tails = [tail / k3 for _, _, k3, tail in sides]
    return {"k3": k3[0] - k3[1], "ratio_mean": means[0] - means[1], "tail": tails[0] - tails[1]}


def _change(change: Interval | None, few: bool, *, exponential: bool) -> Interval:
    value, low, high = map(math.exp, change or _UNKNOWN) if exponential else change or _UNKNOWN
    return Interval(value, math.nan, math.nan) if few else Interval(value, low, high)


def verdict_lines(comparison: DiagnosisComparison) -> list[str]:
    """Returns whether A differs from B, by how much, the first cause of each, and what to repair first."""
    if agree := [name for name, _, side in comparison.sides if side.measured.size.verdict in _AGREE]:
        k3 = ", ".join(f"{side.answer.figures['k3'].value} in {name}" for name, _, side in comparison.sides)
        lines = [f"Trainer and sampler agree up to rounding in {' and in '.join(agree)} (k3 {k3})."]
    else:
        lines = [f"k3 in A relative to B: {_change_text(comparison.k3, 1.0, _factor)}."]
    for letter, _, side in comparison.sides:
        lines.append(f"{letter}: {side.answer.cause}.")
        lines += [f"First, in {letter}: {fix}" for fix in side.answer.faults.values()][:1]
    return lines


def terminal_rows(comparison: DiagnosisComparison) -> list[tuple[str, str]]:
    """Returns the label and the text of each terminal line."""
    lines = [("" if index else "verdict", text) for index, text in enumerate(verdict_lines(comparison))]
    lines += [(letter, f"{name and f'{name}: '}{side.answer.read}") for letter, name, side in comparison.sides]
    changes = figure_rows(comparison)[:3]
    lines += [(name, f"{one} in A, {two} in B: {change}") for name, one, two, change in changes]
    return [*lines, ("paired", paired_text(comparison))]


def figure_rows(comparison: DiagnosisComparison) -> list[tuple[str, ...]]:
    """Returns the table rows below `HEADS`: the name of a figure, its value in A and in B, and the change."""
    sides = [side.answer for _, _, side in comparison.sides]
    return [
        ("k3", *(side.figures["k3"].text for side in sides), _change_text(comparison.k3, 1.0, _factor)),
        (
            "mean ratio",
            *(side.figures["ratio_mean"].text for side in sides),
            _change_text(comparison.ratio_mean, 1.0, "{:.5g}".format),
        ),
        (
            "tail",
            *(f"{format_percent(share)} of k3 in {TAIL:.0%} of the tokens" for share in comparison.tails),
            _change_text(comparison.tail, 0.0, lambda share: f"{100 * share:+.1f}".replace("-", "−"), "points"),
        ),
        ("ESS of tokens", *(side.figures["ess_token"].value for side in sides), ""),
        ("Pearson", *(side.figures["pearson"].value for side in sides), ""),
        ("first cause", *(side.cause for side in sides), ""),
    ]


def paired_text(comparison: DiagnosisComparison) -> str:
    if not comparison.paired:
        return "neither prompts nor responses are known to occur in both: the intervals compare independent samples"
    what = f"the same {comparison.pairs:,} {comparison.paired}s"
    return f"{what} occur in both, and the intervals compare each with itself"


def _change_text(change: Interval, equal: float, form: Callable[[float], str], unit: str = "times") -> str:
    """Returns a change with its interval, and whether it is more than chance; `equal` is the value of no change."""
    if not math.isfinite(change.value):
        return "not defined"
    text, chance = f"{form(change.value)} {unit}", beyond_chance(change, equal)
    if chance is None:
        return f"{text}; too few responses for an interval"
    sure = "more than chance" if chance else "within chance"
    return f"{text} ({form(change.low)} to {form(change.high)}), {sure}"


def _factor(value: float) -> str:
    """Formats a factor: 0.46, 2.2, 74, 270; very small and very large ones as powers of ten."""
    return f"{value:,.0f}" if 10 <= value < 1e5 else short(value)
