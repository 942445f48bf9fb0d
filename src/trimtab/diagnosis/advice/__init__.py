"""Recommendations: every preset applied to the data, one recommended, with configuration for other frameworks."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.adapters.config_lines import lines
from trimtab.diagnosis.advice.preset_outcomes import Data, outcomes
from trimtab.diagnosis.advice.rules import Case, choose
from trimtab.diagnosis.records import Cause, Measured, Outcome, Recommendation

__all__ = ["advise"]


def advise(measured: Measured, causes: Sequence[Cause]) -> tuple[tuple[Outcome, ...], Recommendation]:
    """The table of presets on `measured.sample`, and the preset to use with its bounds, its reason and its lines.

    A fault of the contract (docs/recommendations.md) comes first in the reason; the preset is then the one for after
    its repair, at published bounds.
    """
    table = outcomes(Data.of(measured.sample))
    size = measured.size
    rule, overrides, why = choose(Case(causes, size.verdict, size.mismatch["k3"], table, measured.origin.trained))
    return table, Recommendation(rule.preset, dict(overrides), why, lines(rule.preset, overrides))
