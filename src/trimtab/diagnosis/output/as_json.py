"""Converts a diagnosis to one JSON object with stable keys; docs/diagnose.md explains each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from trimtab.diagnosis.known import matches
from trimtab.diagnosis.output.words import findings, outside
from trimtab.diagnosis.records import Diagnosis, View


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Converts to plain lists, numbers and strings; NaN and infinities become None."""
    measured, recommendation = diagnosis.measured, diagnosis.recommendation
    size, origin = measured.size, measured.origin
    result = {
        "verdict": size.verdict,
        "mismatch": dict(size.mismatch),
        "intervals": {key: {"low": part.low, "high": part.high} for key, part in size.intervals.items()},
        "outside": outside(size),
        "noise_floor": {"k3": size.floor, "note": size.floor_note},
        "causes": [
            asdict(cause) | {"page": cause.page, "known": [match.as_dict() for match in matches(cause.name, origin)]}
            for cause in diagnosis.causes
        ],
        "findings": [asdict(finding) for finding in findings(diagnosis)],
        "recommendation": {
            "preset": recommendation.preset,
            "overrides": dict(recommendation.overrides),
            "why": recommendation.why,
            "lines": dict(recommendation.lines),
        },
        "outcomes": [asdict(outcome) for outcome in diagnosis.outcomes],
        "split": asdict(measured.split)
        | {"intervals": {name: part._asdict() for name, part in measured.split.intervals.items()}},
        "views": {name: _view(view) for name, view in measured.views.items()},
        "token_texts": dict(diagnosis.texts),
        "by_step": [dict(row) for row in size.by_step],
        "origin": {
            "framework": origin.framework,
            "files": origin.files,
            "rows": origin.responses,
            "tokens": origin.tokens,
            "trained": origin.trained,
            "anchor": origin.anchor,
            "dropped": dict(origin.dropped),
            "masked": None if origin.masked is None else asdict(origin.masked),
            "nonfinite": dict(origin.nonfinite),
            "missing": dict(origin.missing),
            "engine": origin.engine,
            "versions": dict(origin.versions),
        },
    }
    return {key: plain(value) for key, value in result.items()}


def _view(view: View) -> dict[str, Any]:
    arrays = ("count", "ratio_mean", "log_ratio_mean", "k3", "abs_mean", "low", "median", "high", "edges")
    return {
        "labels": list(view.labels),
        **{name: getattr(view, name) for name in arrays},
        "columns": dict(view.columns),
        "note": view.note,
    }


def plain(value: Any) -> Any:
    """Returns lists, numbers and strings; NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
