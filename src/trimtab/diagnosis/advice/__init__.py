"""Recommends a preset: evaluates every preset on the data, selects one, and renders its configuration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimtab.adapters.config_lines import lines
from trimtab.diagnosis.advice.preset_outcomes import AdviceData, outcome, outcomes
from trimtab.diagnosis.advice.rules import RuleInputs, choose, load_map
from trimtab.diagnosis.records import Cause, Measured, PresetOutcome, Recommendation

__all__ = ["advise"]


TOKENS = 100_000


def advise(measured: Measured, causes: Sequence[Cause]) -> tuple[tuple[PresetOutcome, ...], Recommendation]:
    """Returns the outcomes of all presets on at most `TOKENS` tokens, and the recommended one with bounds and reason.

    If a cause must be fixed first (docs/choosing.md), the reason names it, and no preset is recommended.
    """
    sample = measured.sample
    stride = -(-sample.tokens // TOKENS)  # shares of tokens and quantiles need fewer than causes do
    part = sample if stride < 2 else sample.select(np.arange(sample.responses) % stride == 0)
    data = AdviceData.of(part)
    table = outcomes(data)
    size, origin = measured.size, measured.origin
    failed = [finding.name for finding in origin.findings if finding.status == "fail"]
    inputs = RuleInputs(causes, size.verdict, size.mismatch["k3"], table, origin.trained, origin.responses, failed)
    _, preset, overrides, why = choose(inputs, load_map())
    if preset and table and (preset, overrides) not in [(row.preset, row.overrides) for row in table]:
        table = (*table, outcome(data, preset, overrides))
    return table, Recommendation(preset, dict(overrides), why, lines(preset, overrides) if preset else {})
