"""`--json`: the promised keys with the numbers behind them, and nothing JSON cannot hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
from tests.support.diagnosis_example import MISMATCH, example

from trimtab.diagnosis.output.as_json import as_dict

EFFECT = ("share_of_k3", "tokens", "repaired")


def through_json(**changes: Any) -> dict[str, Any]:
    return json.loads(json.dumps(as_dict(example(**changes)), allow_nan=False))


def test_the_promised_keys() -> None:
    result = through_json()
    assert set(result) == {
        *("verdict", "mismatch", "intervals", "outside", "noise_floor", "causes", "recommendation", "outcomes"),
        *("split", "views", "token_texts", "by_step", "origin", "findings", "answer", "candidates"),
    }
    assert result["mismatch"] == MISMATCH
    assert result["intervals"]["k3"] == {"low": 0.0043, "high": 0.0054}
    assert result["noise_floor"] == {"k3": 3.1e-13, "note": "both are stored in float32"}
    assert [cause["name"] for cause in result["causes"]] == ["quantized", "stale"]
    assert set(result["causes"][0]) == {
        *("name", "confidence", "evidence", "fix", "is_stated", "page", "known"),
        *EFFECT,
    }
    assert result["causes"][1]["page"] == "docs/causes.md#stale"
    assert result["causes"][1]["confidence"] == 0.88
    assert result["recommendation"]["preset"] == "token-tis"
    assert result["recommendation"]["overrides"] == {"weight_max": 1.31}
    assert set(result["recommendation"]["lines"]) == {"trimtab", "verl", "trl", "miles"}
    assert result["split"] == {
        **{"separable": True, "why": "25% of the tokens are of age 0", "mismatch": 0.0011, "staleness": 0.0037},
        "intervals": {"staleness": {"value": 0.0037, "low": 0.003, "high": 0.0045}},
    }
    assert result["origin"]["dropped"] == {"lists of different lengths": 2, "no trained token": 1}
    assert (result["origin"]["rows"], result["origin"]["tokens"]) == (1240, 91200)
    assert result["origin"]["missing"] == {"turn starts": "the view by turn"}
    assert result["outcomes"][3] == {
        **{"preset": "seq-mis", "kept": 0.61, "changed": 0.39, "ess": 0.44, "bias": 0.41, "calibrated": False},
        **{"overrides": {"weight_min": 0.5, "weight_max": 3.0}, "note": "rejects long responses"},
    }
    assert len(result["by_step"]) == 20
    assert result["by_step"][0]["k3"] == 0.002


def test_views_keep_their_arrays_and_columns() -> None:
    result = through_json()["views"]
    assert result["version"]["labels"] == ["0", "1", "2", "5-8"]
    assert result["version"]["k3"] == [0.0011, 0.003, 0.0052, 0.0101]
    assert result["version"]["edges"] is None
    assert result["length"]["columns"]["responses"] == [400, 500, 600, 300, 100]
    assert result["probability"]["count"] == [1000, 4000, 10000, 20000, 56000]


def test_what_json_cannot_hold_is_null() -> None:
    result = through_json(size={"mismatch": {**MISMATCH, "pearson": math.nan, "chi2_seq": math.inf}})
    assert result["mismatch"]["pearson"] is None
    assert result["mismatch"]["chi2_seq"] is None
    views = example().measured.views
    odd = replace(views["version"], k3=np.array([0.1, np.nan, -np.inf, np.float32(0.5)]))
    assert through_json(only={"version": odd})["views"]["version"]["k3"] == [0.1, None, None, 0.5]
