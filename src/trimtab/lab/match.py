"""Finds the laboratory regime whose mismatch (k3 and tail) is closest to a given run's.

Two numbers describe a level: k3, how large the mismatch is, and its tail. A mechanism with a strength is tuned until k3
agrees; of several, the one whose tail fits better is taken. Differing numerics and a sampler that lags are kept apart:
methods rank differently under them, and k3 and tail alone do not tell them from each other. What else a run has (its
length, model and task) is not reproduced: docs/laboratory.md says how far the analogy carries.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trimtab.config import load_config
from trimtab.errors import TrimtabError
from trimtab.lab.regimes import RECIPE, Regime, regime
from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import METRICS
from trimtab.training.run import train

Kind = Literal["noise", "rounding", "staleness"]
KINDS: tuple[Kind, ...] = ("noise", "rounding", "staleness")
NOISE_LIMITS = (1e-5, 1.0)
# k3 of 1% noise on the warm-started model; it grows with the square of the noise (measured up to 40%).
K3_OF_ONE_PERCENT = 2.2e-5
PROBE_PROMPTS = 64  # 512 responses: k3 to within about a tenth
LONGEST_LAG = 96
TRIES, ACCURACY = 5, 1.1
CLOSE, ROUGH = 1.5, 3.0


@dataclass(frozen=True, slots=True)
class Level:
    """k3 in nats per token, and the tail: the larger |log| of the 1% and the 99% quantile of the token ratio. Both as
    means over the steps of a run, as far as its steps are known."""

    k3: float
    tail: float

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], prefix: str = "") -> Level:
        """From the figures of some steps; `prefix` is what their keys begin with.

        Raises `TrimtabError` when no step measured a mismatch.
        """
        keys = [f"{prefix}{name}" for name in ("k3", "ratio_q01", "ratio_q99")]
        found = [[float(row[key]) for key in keys] for row in rows if all(row.get(key) is not None for key in keys)]
        usable = [(k3, low, high) for k3, low, high in found if math.isfinite(k3) and low > 0 and high < math.inf]
        if not usable:
            raise TrimtabError("no step says how large its mismatch is (k3 and quantiles of the ratio)")
        tails = [max(abs(math.log(low)), abs(math.log(high))) for _, low, high in usable]
        return cls(sum(k3 for k3, _, _ in usable) / len(usable), sum(tails) / len(tails))

    def factors(self, target: Level) -> tuple[float, float]:
        """How many times the target's k3 and tail this one's are."""
        return self.k3 / target.k3, self.tail / target.tail

    def distance(self, target: Level) -> float:
        return sum(abs(math.log(max(factor, 1e-12))) for factor in self.factors(target))

    def quality(self, target: Level) -> str:
        """`close`: k3 and tail within a factor of 1.5; `rough`: within 3; `far`: not a match."""
        worst = math.exp(max(abs(math.log(max(factor, 1e-12))) for factor in self.factors(target)))
        return "close" if worst <= CLOSE else "rough" if worst <= ROUGH else "far"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A regime and the level it was measured at, before any training in it (staleness: over its first refresh)."""

    kind: Kind
    words: str
    regime: Regime
    level: Level


@dataclass(frozen=True, slots=True)
class Match:
    """`chosen`: the nearest of the numeric mechanisms and the nearest lag, as far as they come close to the target;
    when neither does, the nearer of the two."""

    target: Level
    chosen: tuple[Candidate, ...]
    tried: tuple[Candidate, ...]


Tell = Callable[[Candidate], None]


def find_match(target: Level, kinds: Collection[Kind] = KINDS, tell: Tell = lambda _: None) -> Match:
    """Try mechanisms of the given kinds, about ten short probes; `tell` hears of each one.

    Raises `TrimtabError` when there is no mismatch to reproduce.
    """
    if not (target.k3 > 0 and target.tail > 0):
        raise TrimtabError(f"k3 = {target.k3:.2g}: there is no mismatch to reproduce; compare in the regime on-policy")
    tried: list[Candidate] = []
    for kind in kinds:
        for candidate in _MAKERS[kind](target):
            tried.append(candidate)
            tell(candidate)
    groups = [[item for item in tried if (item.kind == "staleness") == lags] for lags in (False, True)]
    nearest = sorted((_nearest(group, target) for group in groups if group), key=lambda c: c.level.distance(target))
    close = [item for item in nearest if item.level.quality(target) == "close"]
    return Match(target, tuple(close or nearest[:1]), tuple(tried))


def _nearest(candidates: Sequence[Candidate], target: Level) -> Candidate:
    return min(candidates, key=lambda item: item.level.distance(target))


def _noise(target: Level) -> Iterator[Candidate]:
    """Along the square law from guess to guess, until k3 is within a tenth."""
    base, noise = regime("noise"), 0.01 * math.sqrt(target.k3 / K3_OF_ONE_PERCENT)
    found: list[Candidate] = []
    for _ in range(TRIES):
        noise = float(f"{min(max(noise, NOISE_LIMITS[0]), NOISE_LIMITS[1]):.3g}")
        words = f"noise of {100 * noise:.3g}% on the sampler's weight matrices"
        made = _named(base, "noise", words, {"engine.noise": noise})
        found.append(Candidate("noise", words, made, probe(made)))
        factor = found[-1].level.k3 / target.k3
        if 1 / ACCURACY <= factor <= ACCURACY:
            break
        noise /= math.sqrt(factor)
    yield _nearest(found, target)


def _rounding(_: Level) -> Iterator[Candidate]:
    for name in ("bf16", "int8", "int4", "int3"):
        made = _named(regime(name), "rounding", regime(name).description, {})
        yield Candidate("rounding", made.description, made, probe(made))


def _staleness(target: Level) -> Iterator[Candidate]:
    """One run that never refreshes its sampler shows every lag at once: refreshing every L updates has the mean of its
    first L steps."""
    base = regime("stale-32")
    rows = _rows(_named(base, "staleness", "", {"trainer.sync_every": LONGEST_LAG, "trainer.steps": LONGEST_LAG}))
    levels = {lag: Level.of(rows[:lag], "mismatch/") for lag in range(2, LONGEST_LAG + 1)}
    lag = min(levels, key=lambda length: levels[length].distance(target))
    steps = max(base.overrides["trainer.steps"], 2 * lag)
    words = f"the sampler refreshed every {lag} updates"
    made = _named(base, "staleness", words, {"trainer.sync_every": lag, "trainer.steps": steps})
    yield Candidate("staleness", words, made, levels[lag])


_MAKERS: dict[Kind, Callable[[Level], Iterator[Candidate]]] = {
    "noise": _noise,
    "rounding": _rounding,
    "staleness": _staleness,
}


def _named(base: Regime, kind: Kind, words: str, changes: Mapping[str, Any]) -> Regime:
    return replace(base, name=f"like-{kind}", description=words, overrides={**base.overrides, **changes})


def probe(made: Regime) -> Level:
    """The mismatch of the warm-started model in this regime: one batch, before any update."""
    one = replace(made, overrides={**made.overrides, "trainer.steps": 1})
    return Level.of(_rows(one, prompts=PROBE_PROMPTS), "mismatch/")


def _rows(made: Regime, prompts: int | None = None) -> list[dict[str, Any]]:
    """A run without evaluation or trajectories, in a folder that is gone afterwards."""
    changes = [*made.settings, "threads=1", "log.trajectories_every=0", "eval.every=0", "eval.problems=1"]
    changes += [] if prompts is None else [f"trainer.prompts={prompts}"]
    with tempfile.TemporaryDirectory(prefix="trimtab-probe-") as folder:
        run = Path(folder) / "run"
        train(load_config(RECIPE, [*changes, f"out={run}"]))
        return read_metrics(run / METRICS)
