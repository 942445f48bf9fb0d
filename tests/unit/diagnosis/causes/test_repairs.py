"""A cause is named only if undoing it heals the data; what remains decides how sure it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.public_cases import KINDS, Response, responses
from tests.support.token_tables import table

from trimtab.diagnosis.causes.detector import LogprobPairs, Residual
from trimtab.diagnosis.pipeline import diagnose
from trimtab.diagnosis.records import CAUSES
from trimtab.errors import TrimtabError


def written(folder: Path, drawn: list[Response], **columns: Any) -> Path:
    rows = [{"logp_behavior": one.behavior.tolist(), "logp_proximal": one.trainer.tolist(), **columns} for one in drawn]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "data.jsonl"


def test_placeholders_are_in_no_figure(tmp_path: Path) -> None:
    drawn = responses(3, 40, 20, 30)
    clean = diagnose(written(tmp_path, drawn)).measured.size.mismatch
    for one in drawn[::2]:
        one.behavior, one.trainer = np.append(one.behavior, 1.0), np.append(one.trainer, -3.0)
    result = diagnose(written(tmp_path, drawn))
    measured, cause = result.measured, result.causes[0]
    assert (cause.name, cause.tokens) == ("placeholder", 20)
    assert "1.0 at 20 tokens at the last token of 20 responses" in cause.evidence
    for name in ("tokens", "k3", "ratio_mean"):
        assert measured.size.mismatch[name] == pytest.approx(clean[name], rel=1e-6), name
    assert sum(view.count.sum() for name, view in measured.views.items() if name == "length") == clean["tokens"]
    assert measured.sample.tokens == clean["tokens"]
    assert cause.repaired["k3"] == measured.size.mismatch["k3"]
    assert cause.share_of_k3 > 0.99
    assert result.recommendation.preset == ""
    assert result.recommendation.lines == {}


def test_certain_tokens_at_zero_are_no_placeholders(tmp_path: Path) -> None:
    drawn = responses(4, 40, 20, 30)
    for one in drawn:
        certain = one.behavior > -0.02
        one.behavior = np.where(certain, 0.0, one.behavior)
    assert not diagnose(written(tmp_path, drawn)).measured.placeholders


def test_a_run_of_zeros_in_two_responses_is_a_placeholder(tmp_path: Path) -> None:
    drawn = responses(4, 2, 600, 600)
    for one in drawn:
        one.behavior[200:500] = 0.0
    (found,) = diagnose(written(tmp_path, drawn)).measured.placeholders
    assert (found.place, found.tokens) == ("stretch", 600)


def test_a_last_token_that_was_replaced_is_no_placeholder_where_it_was_certain(tmp_path: Path) -> None:
    drawn = responses(6, 60, 20, 30)
    for place, one in enumerate(drawn):
        one.trainer[-1] = -9.3
        one.behavior[-1] = 0.0 if place % 3 == 0 else -1.5
    assert not diagnose(written(tmp_path, drawn)).measured.placeholders


def test_padding_that_cannot_be_told_from_certain_tokens_is_refused(tmp_path: Path) -> None:
    drawn, random = responses(5, 40, 6, 20), np.random.default_rng(0)
    for one in drawn:
        zero = random.random(len(one)) < 0.5
        for name in ("behavior", "trainer"):
            values = np.where(zero, 0.0, getattr(one, name))
            setattr(one, name, np.append(values, np.zeros(30 - len(values))))
    with pytest.raises(TrimtabError, match=r"both lists are padded with 0\.0 .* add a column loss_mask"):
        diagnose(written(tmp_path, drawn))


def residual(log_ratio: np.ndarray) -> Residual:
    return Residual.of(LogprobPairs.of(table(log_ratio[None], behavior=-9.0)))


def test_whether_the_mean_ratio_can_be_1_by_hand() -> None:
    """Two ratios that occur equally often: e^.1 = 1.105 and 2 - e^.1 = .895 have mean 1; both halved have not."""
    fair = np.log(np.tile([np.exp(0.1), 2 - np.exp(0.1)], 500))
    assert residual(fair).mean_is_one == "yes"
    assert residual(fair).ratio_mean == pytest.approx(1, abs=1e-6)
    assert residual(fair - 0.1).mean_is_one == "no"
    assert residual(fair + 0.1).mean_is_one == "no"
    # One token in a thousand of ratio e^7 = 1097 makes the mean 2.1: it says nothing.
    heavy = fair.copy()
    heavy[0] = 2.9
    heavy[1:8] = 2.9
    assert residual(heavy).mean_is_one != "no"
    heavy[0] = 7.0
    assert residual(heavy).mean_is_one == "unknown"


def test_unrelated_values_are_unexplained(tmp_path: Path) -> None:
    drawn, other = responses(6, 40, 30, 30), responses(7, 40, 30, 30)
    for one, two in zip(drawn, other, strict=True):
        one.trainer = two.trainer
    first = diagnose(written(tmp_path, drawn)).causes[0]
    assert first.name == "unexplained"
    assert "mean ratio" in first.evidence


@pytest.mark.parametrize("kind", ["end-token", "never-delivered", "first-lost", "other-base", "flips"])
def test_a_fault_that_no_detector_knows_is_not_named_otherwise(kind: str, tmp_path: Path) -> None:
    file = KINDS[kind](tmp_path)
    known = diagnose(file).causes[0]
    assert known.name in CAUSES
    causes = diagnose(file, without=[known.name]).causes
    assert causes, "nothing was said"
    assert known.name not in {cause.name for cause in causes}
    # A list whose first values were lost is filled up with zeros, which are found without the shift as well.
    expected = {"unexplained", "placeholder"} if kind == "first-lost" else {"unexplained"}
    assert causes[0].name in expected or causes[0].confidence < 0.5, causes[0]
