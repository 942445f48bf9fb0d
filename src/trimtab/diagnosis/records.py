"""What `trimtab diagnose` knows, as frozen records: what was read, how large the mismatch is, where it sits, what kind
it is, what to do. Readers fill the first, `measure` the next two, `causes` and `advise` the rest; pages and JSON only
show them.

A ratio is trainer over sampler (proximal where the data has it, otherwise current, over behavior), as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Chunk:
    """Whole responses, flat: token i of response r stands at `starts[r] + i`. A column the data lacks is None.

    starts: int64 (responses + 1,). All other arrays are (tokens,) or, where marked, (responses,).
    behavior, proximal, current, entropy: float32, nats; `behavior` as the sampler reported it.
    mask: bool, the trained tokens. version: int64, policy version that sampled the token, in updates.
    step, group, proximal_version: int64 (responses,). reward, advantage: float64 (responses,).
    temperature, top_p: float64 (responses,); top_k: int64 (responses,), 0 for none; raw: bool (responses,), log-probs
    of the model's own distribution rather than of the one sampled from.
    """

    starts: np.ndarray
    mask: np.ndarray
    behavior: np.ndarray
    proximal: np.ndarray | None = None
    current: np.ndarray | None = None
    ids: np.ndarray | None = None
    entropy: np.ndarray | None = None
    version: np.ndarray | None = None
    step: np.ndarray | None = None
    group: np.ndarray | None = None
    proximal_version: np.ndarray | None = None
    reward: np.ndarray | None = None
    advantage: np.ndarray | None = None
    temperature: np.ndarray | None = None
    top_p: np.ndarray | None = None
    top_k: np.ndarray | None = None
    raw: np.ndarray | None = None

    @property
    def responses(self) -> int:
        return len(self.starts) - 1

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def trainer(self) -> np.ndarray:
        """The trainer's log-probs: proximal, or current where there is none."""
        values = self.proximal if self.proximal is not None else self.current
        assert values is not None, "a reader gives one of proximal and current"
        return values

    @property
    def rows(self) -> np.ndarray:
        """The response each token belongs to (tokens,)."""
        return np.repeat(np.arange(self.responses), np.diff(self.starts))


@dataclass(frozen=True)
class Settings:
    """Numerics of a run as its recipe says. sampler, trainer: dtypes; autocast: of the trainer, bfloat16 or none.

    coarse: keys and values that make the sampler's weights or cache coarser than its dtype; None where that is not the
    recipe's to say (a server).
    """

    sampler: str
    trainer: str
    autocast: str
    coarse: tuple[str, ...] | None

    @property
    def sixteen_bits(self) -> bool:
        """Whether any side computes in less than float32."""
        return self.autocast != "none" or {self.sampler, self.trainer} != {"float32"}

    def __str__(self) -> str:
        under = "" if self.autocast == "none" else f" under {self.autocast} autocast"
        quantized = {None: "", (): ", nothing quantized"}.get(self.coarse, f", {', '.join(self.coarse or ())}")
        return f"sampler {self.sampler}, trainer {self.trainer}{under}{quantized}"


@dataclass(frozen=True)
class Origin:
    """What was read, complete once the last chunk was.

    framework: trimtab, verl, trl, miles, prime-rl or columns. anchor: proximal or current.
    dropped: responses left out, by reason. nonfinite: what was not finite at trained tokens, by column name and kind
    ("logp_behavior -inf", "logp_proximal nan", ...), in tokens, which are left out. missing: absent columns, each with
    what it costs. findings: what else is odd about the data, a sentence each. settings: what the run's own recipe says
    of its numerics, where it lies beside the files.
    """

    framework: str
    files: int
    responses: int
    tokens: int
    trained: int
    anchor: str
    dropped: Mapping[str, int] = field(default_factory=dict)
    nonfinite: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    settings: Settings | None = None


@dataclass(frozen=True)
class Interval:
    """A figure with its 95% bootstrap interval over responses (groups of responses, where they are known); the ends are
    NaN where there are too few of them."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Size:
    """How large the mismatch is.

    mismatch: the keys of `trimtab.mismatch(...).finalize()`. intervals: those that are means or ratios of sums.
    floor: the k3 that rounding of the stored log-probs alone would give; floor_note says what rounding was found.
    verdict: where k3 lies: `rounding`, or the name of its range in `metrics.toml`: `exact`, `dense` (up to 1e-3),
    `small-dense` (up to 1e-2), `moe` (up to 1e-1), `beyond`.
    by_step: one row a training step, when steps are known.
    """

    mismatch: Mapping[str, float]
    intervals: Mapping[str, Interval]
    floor: float
    floor_note: str
    verdict: str
    by_step: tuple[Mapping[str, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Split:
    """Total drift (k3 at tokens of each age, log-ratio variance) split into mismatch (age 0) and staleness (the rest).

    separable: whether `proximal_version` and tokens of age 0 were there; otherwise `why` says what is missing.
    mismatch, staleness: parts of the mean k3 over all tokens, whose sum they are. intervals: 95%, of those two and of
    `variance_mismatch` and `variance_staleness`, the same split of the log-ratio's variance; empty with few responses.
    """

    separable: bool
    why: str
    mismatch: float | None = None
    staleness: float | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class View:
    """One way to cut the tokens: bins with their count, mean ratio, mean log-ratio, k3, mean |log-ratio| and quantiles.

    name: probability, position, length, token, turn (places around its boundaries), turn-number, version (age in
    updates), entropy. low, median, high: 2%, 50% and 98% of the log-ratio. Each array is (bins,); labels
    are for people, edges (bins + 1,) where bins are intervals. `columns` holds any further array by name, such as
    `rejected/<rule>` of the length view: the share of responses in the bin that a sequence rule would reject.
    """

    name: str
    labels: tuple[str, ...]
    count: np.ndarray
    ratio_mean: np.ndarray
    log_ratio_mean: np.ndarray
    k3: np.ndarray
    abs_mean: np.ndarray
    low: np.ndarray
    median: np.ndarray
    high: np.ndarray
    edges: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, eq=False)
class Measured:
    """One pass over all data. sample: at most about 400,000 tokens in whole responses, evenly taken from all data and
    weighted equally, for whatever needs tokens side by side. scatter: counts (bins, bins) of sampler probability
    (columns) against trainer probability (rows)."""

    origin: Origin
    size: Size
    views: Mapping[str, View]
    split: Split
    scatter: np.ndarray
    sample: Chunk


@dataclass(frozen=True)
class Cause:
    """name: temperature, raw-logprobs, truncated-sampling, misaligned, retokenized, precision, quantized, stale or
    non-finite. confidence in (0, 1]; evidence: a sentence with the numbers it rests on; fix: what to do about it."""

    name: str
    confidence: float
    evidence: str
    fix: str = ""


@dataclass(frozen=True)
class Outcome:
    """What one preset would do to this data at its bounds: token shares in [0, 1].

    kept: tokens whose loss is not masked away. changed: weights moved by a bound. ess: effective share of samples left.
    bias: mean |applied weight - ratio| over tokens, how far the estimator is from the unbiased one.
    calibrated: the same preset with bounds from the data's quantiles (`overrides`).
    """

    preset: str
    kept: float
    changed: float
    ess: float
    bias: float
    overrides: Mapping[str, float] = field(default_factory=dict)
    calibrated: bool = False
    note: str = ""


@dataclass(frozen=True)
class Recommendation:
    """preset and overrides as `trimtab.objective(preset, **overrides)` takes them; why: sentences. lines: the matching
    configuration of other frameworks, text by framework name (trimtab, verl, trl, miles)."""

    preset: str
    overrides: Mapping[str, Any]
    why: str
    lines: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Everything `trimtab diagnose` shows. texts: of token ids that stand in a view, where a tokenizer is known."""

    measured: Measured
    causes: tuple[Cause, ...]
    outcomes: tuple[Outcome, ...]
    recommendation: Recommendation
    texts: Mapping[int, str] = field(default_factory=dict)
