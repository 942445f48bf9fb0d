"""Converts a diagnosis to one JSON object with stable keys; docs/reference-diagnose.md explains each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trimtab.diagnosis.against import DiagnosisComparison, beyond_chance, verdict_lines
from trimtab.diagnosis.answer import Diagnosis
from trimtab.diagnosis.known_faults import find_matches
from trimtab.text import json_value


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Converts to plain lists, numbers and strings; NaN and infinities become None."""
    measured, size, origin = diagnosis.measured, diagnosis.measured.size, diagnosis.measured.origin
    result = {
        "verdict": size.verdict,
        "answer": diagnosis.answer.kind,
        "candidates": [asdict(candidate) for candidate in diagnosis.candidates],
        "mismatch": dict(size.mismatch),
        "intervals": {key: {"low": part.low, "high": part.high} for key, part in size.intervals.items()},
        "outside": diagnosis.answer.outside,
        "noise_floor": {"k3": size.floor, "note": size.floor_note},
        "causes": [
            asdict(cause) | {"page": cause.page, "known": [asdict(fault) for fault in find_matches(cause.name, origin)]}
            for cause in diagnosis.causes
        ],
        "findings": [asdict(finding) for finding in diagnosis.answer.findings],
        "recommendation": asdict(diagnosis.recommendation),
        "outcomes": [asdict(outcome) for outcome in diagnosis.outcomes],
        "split": asdict(measured.split)
        | {"intervals": {name: part._asdict() for name, part in measured.split.intervals.items()}},
        "views": {name: _without(asdict(view), "name") for name, view in measured.views.items()},
        "token_texts": dict(diagnosis.texts),
        "by_step": [dict(row) for row in size.by_step],
        "origin": {"rows": origin.responses, **_without(asdict(origin), "responses", "findings", "numerics")},
    }
    return json_value(result)


def against_dict(comparison: DiagnosisComparison) -> dict[str, Any]:
    """Returns the value of the key `against`."""
    result = {
        "verdict": verdict_lines(comparison),
        "changes": {
            name: (change := getattr(comparison, name))._asdict() | {"beyond_chance": beyond_chance(change, equal)}
            for name, equal in (("k3", 1.0), ("ratio_mean", 1.0), ("tail", 0.0))
        },
        "tails": list(comparison.tails),
        "paired": {"by": comparison.paired, "count": comparison.pairs},
        "diagnosis": as_dict(comparison.second),
    }
    return json_value(result)


def _without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}
