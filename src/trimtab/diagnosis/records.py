"""The records of `trimtab diagnose`: data read, size and location of the mismatch, causes, recommendation.

`reading` fills `DataSummary` and tables of tokens (`tokens.TokenTable`), `measure` the measurements, `causes` and
`advice` the rest; `output` only renders them. A ratio is trainer / sampler: proximal / behavior, or current / behavior
if the data has no proximal.
"""

from __future__ import annotations

import importlib.resources
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import Finding, TrimtabError
from trimtab.intervals import Interval


@dataclass(frozen=True)
class Numerics:
    """Dtypes and quantization of a run, from its recipe or from the user."""

    sampler: str
    trainer: str
    autocast: str  # of the trainer: bfloat16 or none
    # Keys and values that quantize the sampler's weights or cache; None if the recipe does not determine it (a server).
    coarse: tuple[str, ...] | None
    source: str = "the run's recipe says"  # who states the numerics

    @property
    def bits(self) -> str:
        """The width of quantized weights: four bits or eight bits."""
        few = re.search(r"(int|fp|nf|w)[2-5]\b|awq|gptq|bitsandbytes|\b[2-5]bit", ", ".join(self.coarse or ()))
        return "four bits" if few else "eight bits"

    @property
    def is_recorded(self) -> bool:
        """Whether the numerics are from the run's recipe, not from the user."""
        return self.source == Numerics.source

    @property
    def sixteen_bits(self) -> bool:
        """Whether any side computes in less than float32."""
        return self.autocast != "none" or {self.sampler, self.trainer} != {"float32"}

    def __str__(self) -> str:
        under = "" if self.autocast == "none" else f" under {self.autocast} autocast"
        quantized = {None: "", (): ", nothing quantized"}.get(self.coarse, f", {', '.join(self.coarse or ())}")
        return f"sampler {self.sampler}, trainer {self.trainer}{under}{quantized}"


SIXTEEN_BITS = {"bf16": "bfloat16", "fp16": "float16"}
DTYPES = (*SIXTEEN_BITS.values(), "float32")
COARSE = ("fp8", "int8", "fp4", "nvfp4", "mxfp4", "int4", "awq", "gptq", "fp8-cache")


@dataclass(frozen=True)
class Stated:
    """What a user states about the run, which files often lack."""

    sampler: str = ""  # number format of the sampler's weights or cache: one of `COARSE` or a dtype; "" if unknown
    lag: int | None = None  # number of updates by which the sampler's weights lag behind; None if unknown
    tested: Mapping[str, bool] = field(default_factory=dict)  # by name of a candidate: whether its test found it

    def __post_init__(self) -> None:
        """Raises `TrimtabError` for an unknown name or a negative lag."""
        if self.lag is not None and self.lag < 0:
            raise TrimtabError(f"--lag {self.lag} is negative: give the number of updates the sampler is behind")
        if self.sampler not in ("", *SIXTEEN_BITS, *DTYPES, *COARSE):
            raise TrimtabError(f"--sampler {self.sampler} is unknown: one of {', '.join((*DTYPES, *COARSE))}")

    @property
    def numerics(self) -> Numerics | None:
        """The numerics that follow from `sampler`; None if it is unknown."""
        if not self.sampler:
            return None
        name = SIXTEEN_BITS.get(self.sampler, self.sampler)
        coarse = () if name in DTYPES else (f"the sampler is {name}",)
        return Numerics(name, "not stated", "none", coarse, "you say:")


NOTHING_STATED = Stated()


@dataclass(frozen=True)
class Placeholder:
    """A constant in place of log-probs, at one kind of place."""

    column: str  # behavior, trainer or both
    value: float
    place: str  # last (trained token of its response), end, start, stretch (two or more in a row) or single
    tokens: int  # number of tokens
    responses: int  # number of responses
    # Whether only tokens on which the other side is uncertain count: certain tokens have the same value at this place.
    uncertain_only: bool = False


@dataclass(frozen=True)
class DataSummary:
    """A summary of the data read, complete after the last table."""

    framework: str  # name in layouts.toml; `columns` if no layout fits
    files: int
    responses: int
    tokens: int
    trained: int
    anchor: str  # column of the trainer's log-probs: proximal or current
    dropped: Mapping[str, int] = field(default_factory=dict)  # responses dropped, by reason
    # Trained tokens dropped for a value that is not finite, by column and kind ("logp_behavior -inf", ...).
    nonfinite: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)  # absent columns, with the analysis that each would allow
    findings: tuple[Finding, ...] = ()  # other anomalies of the data
    numerics: Numerics | None = None  # from the run's recipe, if it is beside the files, or from the user
    masked: MaskedResponses | None = None  # responses left out of the loss, if there are any
    engine: str = ""  # the sampler (vllm, transformers); "" if unknown
    versions: Mapping[str, str] = field(default_factory=dict)  # of packages, by name, if they are beside the files
    model: str = ""  # name or folder; "" if unknown
    assumes_current: bool = False  # whether weight versions are missing and assumed to be a synchronous trainer's


@dataclass(frozen=True)
class MaskedResponses:
    """The responses that a trainer masks out of its loss; all other figures exclude them."""

    responses: int
    share: float  # of all responses
    k3: float  # over masked responses, nats per token
    k3_with: float  # over masked and trained responses


@dataclass(frozen=True)
class MismatchSize:
    """The size of the mismatch."""

    mismatch: Mapping[str, float]  # the keys of `trimtab.mismatch(...).finalize()`
    intervals: Mapping[str, Interval]  # of the keys that are means or ratios of sums
    floor: float  # k3 that rounding of the stored log-probs alone would cause
    floor_note: str  # a sentence about that rounding
    # `rounding`, or the name of the range of k3 in `metrics.toml`: `exact`, `dense` (up to 1e-3), `small-dense` (up to
    # 1e-2), `moe` (up to 1e-1) or `beyond`.
    verdict: str
    by_step: tuple[Mapping[str, float], ...] = ()  # one row per training step, if steps are known


@dataclass(frozen=True, eq=False)
class DriftSplit:
    """The total drift (mean k3 over all tokens), split into mismatch (the drift at age 0) and staleness (the rest)."""

    separable: bool  # whether the data has `proximal_version` and tokens of age 0
    why: str  # what is missing, or how the parts were estimated
    mismatch: float | None = None
    staleness: float | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict)  # 95%, of both parts; empty with few responses


@dataclass(frozen=True, eq=False)
class View:
    """Tokens grouped into bins, with statistics of each bin; arrays are (bins,)."""

    # probability, position, length, token, prompt, turn (positions around the boundaries of turns), turn-number,
    # observation (tokens since the last observation), version (age in updates) or entropy.
    name: str
    labels: tuple[str, ...]  # displayed names of the bins
    count: np.ndarray
    ratio_mean: np.ndarray
    log_ratio_mean: np.ndarray
    k3: np.ndarray
    abs_mean: np.ndarray  # mean |log-ratio|
    low: np.ndarray  # 2% quantile of the log-ratio
    median: np.ndarray
    high: np.ndarray  # 98% quantile of the log-ratio
    edges: np.ndarray | None = None  # (bins + 1,) if bins are intervals
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # further arrays, such as `share` of the token view
    note: str = ""


@dataclass(frozen=True)
class RescoredSides:
    """Which side is wrong, by a column of log-probs that the same checkpoint computed again (`trimtab rescore`).

    Intervals are of k3, in nats per token.
    """

    side: str  # sampler, trainer, both or neither
    sampler: Interval  # between the sampler and the rescored column
    trainer: Interval  # between the trainer and the rescored column
    mismatch: Interval  # between sampler and trainer
    is_other_model: bool  # whether both sides are closer to each other than to that column
    tokens: int  # number of trained tokens


@dataclass(frozen=True, eq=False)
class Measured:
    """The measurements of one pass over all data."""

    origin: DataSummary
    size: MismatchSize
    views: Mapping[str, View]
    split: DriftSplit
    scatter: np.ndarray  # counts (bins, bins): trainer probability in rows, sampler probability in columns
    # At most about 400,000 tokens in whole responses, drawn evenly from all data and weighted equally, for analyses
    # that need all tokens at once.
    sample: TokenTable
    rescored: RescoredSides | None = None  # the side that is wrong; None without ids scored again
    placeholders: tuple[Placeholder, ...] = ()  # constants in place of log-probs
    cleaned: bool = False  # whether figures leave placeholders out; if nothing else is there, they include them
    removed: int = 0  # number of tokens left out as placeholders
    k3_before: float = 0.0  # k3 with these tokens


PROVEN = 0.7  # minimum confidence to call a cause proven
UNPROVEN = 0.65  # maximum confidence of a cause that only size and shape support


@dataclass(frozen=True)
class Cause:
    """A cause of the mismatch."""

    name: str  # one of `CAUSES`
    confidence: float  # in (0, 1], from the mismatch that remains once the cause is undone
    evidence: str  # a sentence with the numbers that support the cause
    fix: str = ""  # the remedy
    share_of_k3: float | None = None  # share of k3 that undoing the cause removes; None if unknown
    tokens: int = 0  # number of affected tokens
    repaired: Mapping[str, float] = field(default_factory=dict)  # k3 and ratio_mean once undone; empty if it cannot be
    is_stated: bool = False  # whether files or recipe state it, as versions of several ages or quantization do

    @property
    def is_proven(self) -> bool:
        """Whether it is proven: undoing it removes the mismatch, or the files, the recipe or the user state it."""
        return self.is_stated or (CAUSES[self.name].proves and self.confidence >= PROVEN)

    @property
    def page(self) -> str:
        """The section of the documentation about this cause."""
        return f"docs/causes.md#{self.name}"


@dataclass(frozen=True)
class CauseKind:
    """A row of `causes.toml`, where each key is explained."""

    name: str
    plain: str
    fix: str
    otherwise: str = ""
    must_fix: bool = False
    is_constant: bool = False
    proves: bool = False
    unsure: str = ""
    test: str = ""
    intended: str = ""


@dataclass(frozen=True)
class CandidateKind:
    """A row of `candidates.toml`, where each key is explained."""

    name: str
    plain: str
    test: str
    wrong: str
    sides: Sequence[str]
    prior: float
    speaks_for: Mapping[str, float]
    speaks_against: Mapping[str, float]


@dataclass(frozen=True)
class Candidate:
    """A possible cause of a difference that no cause proves."""

    name: str  # one of `candidates.toml`
    plain: str  # what it is
    speaks_for: str  # the strongest sign for it; "" for none
    speaks_against: str  # the strongest sign against it; "" for none
    test: str  # what tells it from other candidates
    result: str  # what the test finds if the cause is this candidate
    odds: float  # relative to the odds of other candidates
    found: bool = False  # whether the test found it


@cache
def read_table(name: str) -> dict[str, Any]:
    """Returns the content of a TOML file of this package."""
    return tomllib.loads((importlib.resources.files("trimtab.diagnosis") / name).read_text(encoding="utf-8"))


FINDINGS = read_table("findings.toml")
"""Rows by key."""


def finding(key: str, **values: object) -> Finding:
    """Returns a row of findings.toml with its values filled in."""
    row = FINDINGS[key]
    return Finding(row.get("status", "note"), row["name"], row["detail"].format(**values), row.get("next_step", ""))


CAUSES = {row["name"]: CauseKind(**row) for row in read_table("causes.toml")["cause"]}
"""All kinds of causes by name."""
MUST_FIX = tuple(name for name, kind in CAUSES.items() if kind.must_fix)
"""Names of those that must be fixed before any correction, worst first."""


@dataclass(frozen=True, kw_only=True)
class KnownFault:
    """A row of `known_faults.toml`, which explains the keys: a publicly reported fault of an engine or trainer."""

    certain: bool = False  # whether the versions of the data are known to be affected
    causes: tuple[str, ...]
    symptom: str
    repair: str
    link: str
    date: str
    engine: str = ""
    trainers: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    seen: str = ""
    models: str = ""
    family: str = ""
    feature: str = ""

    @property
    def where(self) -> str:
        """The trainer, engine, versions, models and feature that the fault needs."""
        needed = [f"{name} {versions}" for name, versions in self.versions.items()]
        return ", ".join(filter(None, (*self.trainers, *(needed or [self.engine]), self.models, self.feature)))

    @property
    def text(self) -> str:
        """Where the fault occurs, what it does, what repairs it, and the source."""
        word = "known" if self.certain else "may apply"
        return f"{word} ({self.where}): {self.symptom}. Repair: {self.repair} ({self.link})"


@dataclass(frozen=True)
class PresetOutcome:
    """The effect of one preset on the data at given bounds."""

    preset: str
    kept: float  # share of tokens whose loss is not masked out
    changed: float  # share of tokens whose weight a bound changed
    ess: float  # effective sample size, as a share
    bias: float  # mean |applied weight - ratio| over tokens: the distance from the unbiased estimator
    overrides: Mapping[str, float] = field(default_factory=dict)
    calibrated: bool = False  # whether the bounds are quantiles of the data (`overrides`), not the published bounds
    note: str = ""


@dataclass(frozen=True)
class Recommendation:
    """The recommended objective, `trimtab.objective(preset, **overrides)`."""

    preset: str  # "" while a cause must be repaired
    overrides: Mapping[str, Any]
    why: str  # the reason, in sentences
    lines: Mapping[str, str] = field(default_factory=dict)  # configuration by framework (trimtab, verl, trl, miles)
