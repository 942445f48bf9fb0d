"""The records of `trimtab diagnose`: data read, size and location of the mismatch, causes, recommendation.

`reading` fills `DataSummary` and tables of tokens (`tokens.TokenTable`), `measure` the measurements, `causes` and
`advice` the rest; `output` only renders them. A ratio is trainer over sampler: proximal (current where the data has no
proximal) over behavior.
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
class Settings:
    """Numerics of a run according to its recipe. sampler, trainer: dtypes; autocast: of the trainer, bfloat16 or none.

    coarse: keys and values that quantize the sampler's weights or cache; None where the recipe does not determine it (a
    server). source: who says so.
    """

    sampler: str
    trainer: str
    autocast: str
    coarse: tuple[str, ...] | None
    source: str = "the run's recipe says"

    @property
    def bits(self) -> str:
        """The bits of quantized weights: four bits, or eight bits."""
        few = re.search(r"(int|fp|nf|w)[2-5]\b|awq|gptq|bitsandbytes|\b[2-5]bit", ", ".join(self.coarse or ()))
        return "four bits" if few else "eight bits"

    @property
    def is_recorded(self) -> bool:
        """Whether the run's recipe says so, and not the user."""
        return self.source == Settings.source

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
    """What a user says of the run, which files often do not.

    sampler: number format of its weights or cache, one of `COARSE` or a dtype; "" if unknown. lag: number of updates
    by which all of its weights are old; None if unknown. tested: by name of a candidate, whether its test found it.
    """

    sampler: str = ""
    lag: int | None = None
    tested: Mapping[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises `TrimtabError` for an unknown name or a negative lag."""
        if self.lag is not None and self.lag < 0:
            raise TrimtabError(f"--lag {self.lag} is negative: give the number of updates the sampler is behind")
        if self.sampler not in ("", *SIXTEEN_BITS, *DTYPES, *COARSE):
            raise TrimtabError(f"--sampler {self.sampler} is unknown: one of {', '.join((*DTYPES, *COARSE))}")

    @property
    def settings(self) -> Settings | None:
        """The settings that `sampler` determines."""
        if not self.sampler:
            return None
        name = SIXTEEN_BITS.get(self.sampler, self.sampler)
        coarse = () if name in DTYPES else (f"the sampler is {name}",)
        return Settings(name, "not stated", "none", coarse, "you say:")


NOTHING_STATED = Stated()


@dataclass(frozen=True)
class Placeholder:
    """A constant in place of a log-prob, at one kind of place.

    column: behavior, trainer or both. place: last (trained token of its response), end, start, stretch (two and more in
    a row) or single. tokens, responses: how many. uncertain_only: whether certain tokens share value and place, so that
    it is one only where the other side is uncertain.
    """

    column: str
    value: float
    place: str
    tokens: int
    responses: int
    uncertain_only: bool = False


@dataclass(frozen=True)
class DataSummary:
    """A summary of the data read, complete after the last table.

    framework: its name in layouts.toml, or columns where none fits. anchor: proximal or current, whichever is the
    trainer's. dropped: number of responses dropped, by reason. nonfinite: number of trained tokens dropped because a
    value is not finite, by column and kind ("logp_behavior -inf", "logp_proximal nan", ...). missing: absent columns,
    with the analysis that each would allow. findings: other anomalies of the data. settings: numerics from the run's
    recipe, if it is found beside the files. masked: responses left out of the loss, if there are any. engine: the
    sampler (vllm, transformers), "" if unknown. versions: of packages, by name, where they are found beside the files.
    model: its name or folder, "" if unknown. assumes_current: whether versions of the weights that the files lack are
    taken to be those of a synchronous trainer.
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
    findings: tuple[Finding, ...] = ()
    settings: Settings | None = None
    masked: MaskedResponses | None = None
    engine: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    assumes_current: bool = False


@dataclass(frozen=True)
class MaskedResponses:
    """The responses that a trainer masks out of its loss, which no other figure covers.

    share: of all responses. k3: over them, in nats per token. k3_with: over them and the trained ones.
    """

    responses: int
    share: float
    k3: float
    k3_with: float


@dataclass(frozen=True)
class MismatchSize:
    """The size of the mismatch.

    mismatch: the keys of `trimtab.mismatch(...).finalize()`. intervals: of those that are means or ratios of sums.
    floor: the k3 that rounding of the stored log-probs alone would cause; floor_note describes that rounding.
    verdict: `rounding`, or the name of the range of k3 in `metrics.toml`: `exact`, `dense` (up to 1e-3), `small-dense`
    (up to 1e-2), `moe` (up to 1e-1), `beyond`.
    by_step: one row per training step, if steps are known.
    """

    mismatch: Mapping[str, float]
    intervals: Mapping[str, Interval]
    floor: float
    floor_note: str
    verdict: str
    by_step: tuple[Mapping[str, float], ...] = ()


@dataclass(frozen=True, eq=False)
class DriftSplit:
    """The total drift (mean k3), split into mismatch (that of age 0) and staleness (the rest).

    separable: whether the data has `proximal_version` and tokens of age 0; if not, `why` names what is missing.
    mismatch, staleness: the two parts, which sum to the mean k3 over all tokens. intervals: 95%, of both; empty with
    few responses.
    """

    separable: bool
    why: str
    mismatch: float | None = None
    staleness: float | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class View:
    """Tokens grouped into bins: count, mean ratio, mean log-ratio, k3, mean |log-ratio| and quantiles of each bin.

    name: probability, position, length, token, prompt, turn (positions around its boundaries), turn-number,
    observation (tokens since the last one), version (age in updates), entropy. low, median, high: 2%, 50% and 98%
    quantile of the log-ratio. Each array is (bins,); labels are the displayed names; edges are (bins + 1,) where bins
    are intervals. columns: further arrays by name, such as `responses` of the length view.
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


@dataclass(frozen=True)
class RescoredSides:
    """Which side is wrong according to the ids scored again from the same checkpoint (`trimtab rescore`).

    side: sampler, trainer, both or neither. sampler, trainer: k3 between each and the column scored again; mismatch:
    between the two; nats per token. is_other_model: whether both are nearer to one another than to that column, as
    where the checkpoint is not that of these responses. tokens: number of trained tokens.
    """

    side: str
    sampler: Interval
    trainer: Interval
    mismatch: Interval
    is_other_model: bool
    tokens: int


@dataclass(frozen=True, eq=False)
class Measured:
    """The measurements of one pass over all data.

    placeholders: constants in place of log-probs; `cleaned` says whether they are left out of all figures, or are in
    them since nothing else is there. removed: number of tokens left out. k3_before: k3 with them.
    scatter: counts (bins, bins) of sampler probability (columns) against trainer probability (rows).
    sample: at most about 400,000 tokens in whole responses, drawn evenly from all data and weighted equally, for
    analyses that need all tokens at once. rescored: the side that is wrong, None without ids scored again.
    """

    origin: DataSummary
    size: MismatchSize
    views: Mapping[str, View]
    split: DriftSplit
    scatter: np.ndarray
    sample: TokenTable
    rescored: RescoredSides | None = None
    placeholders: tuple[Placeholder, ...] = ()
    cleaned: bool = False
    removed: int = 0
    k3_before: float = 0.0


PROVEN = 0.7  # least confidence of a cause that undoing it proves
UNPROVEN = 0.65  # largest confidence of a cause of which only size and shape are known


@dataclass(frozen=True)
class Cause:
    """A cause of the mismatch.

    name: one of `CAUSES`. confidence: in (0, 1], from what is left once the cause is undone. evidence: a sentence with
    the numbers that support it. fix: the remedy. share_of_k3: the part of k3 that undoing it removes, None where it is
    unknown. tokens: number of tokens that it concerns. repaired: k3 and ratio_mean of the tokens after undoing it;
    empty where it cannot be undone. is_stated: whether the files or the run's recipe say so themselves, as versions of
    several ages do, or a recipe that quantizes.
    """

    name: str
    confidence: float
    evidence: str
    fix: str = ""
    share_of_k3: float | None = None
    tokens: int = 0
    repaired: Mapping[str, float] = field(default_factory=dict)
    is_stated: bool = False

    @property
    def is_proven(self) -> bool:
        """Whether the data proves it: undoing it heals, or the files, the recipe or the user state it."""
        return self.is_stated or (CAUSES[self.name].proves and self.confidence >= PROVEN)

    @property
    def page(self) -> str:
        """The section of the documentation about this cause."""
        return f"docs/causes.md#{self.name}"


@dataclass(frozen=True)
class CauseKind:
    """One row of `causes.toml`, which explains its keys."""

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
    """One row of `candidates.toml`, which explains its keys."""

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
    """A candidate for a difference that nothing in the data proves.

    name: one of `candidates.toml`. plain: what it is. speaks_for, speaks_against: the strongest sign of each kind, ""
    for none. test: what tells it from the others; result: what it finds if it is this one; found: whether it did.
    odds: relative to those of the others.
    """

    name: str
    plain: str
    speaks_for: str
    speaks_against: str
    test: str
    result: str
    odds: float
    found: bool = False


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
    """One row of `known_faults.toml`: a fault of an engine or trainer that was reported in public, matched with data.

    certain: whether the versions of the data are known to be affected. The table explains the other keys.
    """

    certain: bool = False
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
        """The trainer, engine, versions, models and feature that it needs."""
        needed = [f"{name} {versions}" for name, versions in self.versions.items()]
        return ", ".join(filter(None, (*self.trainers, *(needed or [self.engine]), self.models, self.feature)))

    @property
    def text(self) -> str:
        """One sentence each on where it occurs, what it does and what repairs it, and the source."""
        word = "known" if self.certain else "may apply"
        return f"{word} ({self.where}): {self.symptom}. Repair: {self.repair} ({self.link})"


@dataclass(frozen=True)
class PresetOutcome:
    """The effect of one preset on the data at given bounds.

    kept: share of tokens whose loss is not masked out. changed: share whose weight a bound changed. ess: effective
    sample size as a share. bias: mean |applied weight - ratio| over tokens, the distance from the unbiased estimator.
    calibrated: whether the bounds are quantiles of the data (`overrides`) instead of the published ones.
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
    """The recommended objective, `trimtab.objective(preset, **overrides)`; preset "" while a cause must be repaired.

    why: the reason, in sentences. lines: the configuration as text, by framework (trimtab, verl, trl, miles).
    """

    preset: str
    overrides: Mapping[str, Any]
    why: str
    lines: Mapping[str, str] = field(default_factory=dict)
