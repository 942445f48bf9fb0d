"""Finds the laboratory regime whose mismatch (k3 and tail) is closest to a given run's.

A mismatch is described by two numbers: its size k3, and its tail. A mechanism with adjustable strength is tuned until
k3 agrees; of several mechanisms the one with the closest tail is chosen. Numeric mechanisms (noise, rounding) and
staleness are matched separately: methods rank differently under them, and k3 and tail do not distinguish them. Response
length, model and task of the run are not reproduced; docs/laboratory.md discusses the limits of the analogy.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trimtab.errors import TrimtabError
from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import METRICS
from trimtab.trainer.config import load_config
from trimtab.trainer.lab.regimes import RECIPE, Regime, regime
from trimtab.trainer.run import train

Kind = Literal["noise", "rounding", "staleness"]
KINDS: tuple[Kind, ...] = ("noise", "rounding", "staleness")
NOISE_LIMITS = (1e-5, 1.0)
# k3 of 1% noise on the warm-started model; it grows with the square of the noise (measured up to 40%).
K3_OF_ONE_PERCENT = 2.2e-5
PROBE_PROMPTS = 64  # 512 responses: k3 to within about a tenth
MAX_LAG = 96
MAX_PROBES, K3_TOLERANCE = 5, 1.1
CLOSE, ROUGH = 1.5, 3.0


@dataclass(frozen=True, slots=True)
class MismatchLevel:
    """The size and tail of a mismatch, as means over the steps of a run."""

    k3: float  # nats per token
    tail: float  # the larger |log| of the 1% and the 99% quantile of the token ratio

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], prefix: str = "") -> MismatchLevel:
        """Computes the level from metrics of several steps, whose keys begin with `prefix`.

        Raises `TrimtabError` if no step measured a mismatch.
        """
        keys = [f"{prefix}{name}" for name in ("k3", "ratio_q01", "ratio_q99")]
        measured = [[float(row[key]) for key in keys] for row in rows if all(row.get(key) is not None for key in keys)]
        usable = [(k3, low, high) for k3, low, high in measured if math.isfinite(k3) and low > 0 and high < math.inf]
        if not usable:
            raise TrimtabError("no step has a measured mismatch (k3 and quantiles of the ratio)")
        tails = [max(abs(math.log(low)), abs(math.log(high))) for _, low, high in usable]
        return cls(sum(k3 for k3, _, _ in usable) / len(usable), sum(tails) / len(tails))

    def factors(self, target: MismatchLevel) -> tuple[float, float]:
        """Returns the ratios of k3 and tail to those of the target."""
        return self.k3 / target.k3, self.tail / target.tail

    def distance(self, target: MismatchLevel) -> float:
        return sum(abs(math.log(max(factor, 1e-12))) for factor in self.factors(target))

    def quality(self, target: MismatchLevel) -> str:
        """Returns `close` (k3 and tail within a factor of 1.5), `rough` (within 3) or `far` (no match)."""
        worst = math.exp(max(abs(math.log(max(factor, 1e-12))) for factor in self.factors(target)))
        return "close" if worst <= CLOSE else "rough" if worst <= ROUGH else "far"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A regime and its mismatch, measured before any training (for staleness over the first refresh interval)."""

    kind: Kind
    regime: Regime
    level: MismatchLevel


@dataclass(frozen=True, slots=True)
class MismatchMatch:
    """The result of a search."""

    target: MismatchLevel
    # The nearest numeric mechanism and the nearest lag if they are close to the target, else the nearer of the two.
    chosen: tuple[Candidate, ...]
    tried: tuple[Candidate, ...]


def match_mismatch(
    target: MismatchLevel, kinds: Collection[Kind] = KINDS, on_candidate: Callable[[Candidate], None] = lambda _: None
) -> MismatchMatch:
    """Searches the mechanisms of the given kinds with about ten short probes, and returns the closest.

    `on_candidate` is called with each candidate. Raises `TrimtabError` if there is no mismatch to reproduce.
    """
    if not (target.k3 > 0 and target.tail > 0):
        raise TrimtabError(f"k3 = {target.k3:.2g}: there is no mismatch to reproduce; compare in the regime on-policy")
    tried: list[Candidate] = []
    for kind in kinds:
        for candidate in _CANDIDATES[kind](target):
            tried.append(candidate)
            on_candidate(candidate)
    groups = [[item for item in tried if (item.kind == "staleness") == is_staleness] for is_staleness in (False, True)]
    nearest = sorted((_nearest(group, target) for group in groups if group), key=lambda c: c.level.distance(target))
    close = [item for item in nearest if item.level.quality(target) == "close"]
    return MismatchMatch(target, tuple(close or nearest[:1]), tuple(tried))


def _nearest(candidates: Sequence[Candidate], target: MismatchLevel) -> Candidate:
    return min(candidates, key=lambda item: item.level.distance(target))


def _noise(target: MismatchLevel) -> Iterator[Candidate]:
    """Adjusts the noise by the square law until k3 is within 10% of the target."""
    base, noise = regime("noise"), 0.01 * math.sqrt(target.k3 / K3_OF_ONE_PERCENT)
    candidates: list[Candidate] = []
    for _ in range(MAX_PROBES):
        noise = float(f"{min(max(noise, NOISE_LIMITS[0]), NOISE_LIMITS[1]):.3g}")
        words = f"noise of {100 * noise:.3g}% on the sampler's weight matrices"
        noisy = _changed_regime(base, "noise", words, {"engine.noise": noise})
        candidates.append(Candidate("noise", noisy, probe(noisy)))
        factor = candidates[-1].level.k3 / target.k3
        if 1 / K3_TOLERANCE <= factor <= K3_TOLERANCE:
            break
        noise /= math.sqrt(factor)
    yield _nearest(candidates, target)


def _rounding(_: MismatchLevel) -> Iterator[Candidate]:
    for name in ("bf16", "int8", "int4", "int3"):
        rounded = _changed_regime(regime(name), "rounding", regime(name).description, {})
        yield Candidate("rounding", rounded, probe(rounded))


def _staleness(target: MismatchLevel) -> Iterator[Candidate]:
    """Measures every lag in a single run that never refreshes its sampler.

    The mismatch for a refresh every L updates is the mean over the first L steps of that run.
    """
    base = regime("stale-32")
    rows = _rows(_changed_regime(base, "staleness", "", {"trainer.sync_every": MAX_LAG, "trainer.steps": MAX_LAG}))
    levels = {lag: MismatchLevel.of(rows[:lag], "mismatch/") for lag in range(2, MAX_LAG + 1)}
    lag = min(levels, key=lambda length: levels[length].distance(target))
    steps = max(base.overrides["trainer.steps"], 2 * lag)
    words = f"the sampler refreshed every {lag} updates"
    stale = _changed_regime(base, "staleness", words, {"trainer.sync_every": lag, "trainer.steps": steps})
    yield Candidate("staleness", stale, levels[lag])


_CANDIDATES: dict[Kind, Callable[[MismatchLevel], Iterator[Candidate]]] = {
    "noise": _noise,
    "rounding": _rounding,
    "staleness": _staleness,
}


def _changed_regime(base: Regime, kind: Kind, words: str, changes: Mapping[str, Any]) -> Regime:
    return replace(base, name=f"like-{kind}", description=words, overrides={**base.overrides, **changes})


def probe(regime_to_probe: Regime) -> MismatchLevel:
    """Returns the mismatch of the warm-started model in a regime, from one batch before any update."""
    single_step = replace(regime_to_probe, overrides={**regime_to_probe.overrides, "trainer.steps": 1})
    return MismatchLevel.of(_rows(single_step, prompts=PROBE_PROMPTS), "mismatch/")


def _rows(run_regime: Regime, prompts: int | None = None) -> list[dict[str, Any]]:
    """Returns the metrics of a run without evaluation or trajectories, in a temporary folder."""
    changes = [*run_regime.settings, "threads=1", "log.trajectories_every=0", "eval.every=0", "eval.problems=1"]
    changes += [] if prompts is None else [f"trainer.prompts={prompts}"]
    with tempfile.TemporaryDirectory(prefix="trimtab-probe-") as folder:
        run = Path(folder) / "run"
        train(load_config(RECIPE, [*changes, f"out={run}"]))
        return read_metrics(run / METRICS)
