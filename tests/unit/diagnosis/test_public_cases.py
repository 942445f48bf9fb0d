"""Faults that people reported in public, as files: the first cause named is the right one, or the file is refused.

The same kinds are read from a folder of such files, where there is one, and drawn anew (`support/public_cases.py`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.support.public_cases import KINDS

from trimtab.diagnosis.pipeline import diagnose
from trimtab.errors import TrimtabError

NOISE = {"precision", None}
EXPECTED: dict[str, tuple[str, set[str | None]]] = {
    "clean": ("00_clean.jsonl", NOISE),
    "end-token": ("01_eos_placeholder.jsonl", {"placeholder"}),
    "never-delivered": ("02_never_delivered.jsonl", {"undelivered"}),
    "first-lost": ("03_lost_first_logprobs.jsonl", {"misaligned", "placeholder"}),  # both are there
    "observations": ("06_tool_tokens_no_mask.jsonl", {"placeholder"}),
    "sentinel": ("07_sentinel_one.jsonl", {"placeholder"}),
    "minus-9999": ("09_minus_9999.jsonl", {"placeholder"}),
    "padded": ("10_zero_padded.jsonl", {"placeholder"}),
    "flips": ("12_routing_flips.jsonl", {"routing"}),
    "copy": ("14_copy.jsonl", {"copied"}),
    "third-turn": ("15_third_turn.jsonl", {"unexplained", "routing"}),
    "null-where-certain": ("16_null_at_certain.jsonl", {"non-finite"}),
    "other-base": ("17_base_2.jsonl", {"log-base"}),
    "numpy-text": ("19_numpy_text.csv", NOISE),
    "text-lists": ("20_text_lists.parquet", NOISE),
    "prompt-in-one-list": ("22_prompt_in_one_list.jsonl", NOISE),
    "folder-with-settings": ("23_folder", NOISE),
    "all-zero": ("26_all_zero.jsonl", {"placeholder"}),
}
"""The public file of each kind, and the causes that may be named first; None for no cause."""

by_kind = pytest.mark.parametrize("kind", EXPECTED)
COLUMNS = {"padded": {"logp_behavior": "rollout_lp", "logp_proximal": "train_lp"}}


def check(path: Path, kind: str) -> None:
    try:
        result = diagnose(path, columns=COLUMNS.get(kind))
    except TrimtabError as error:
        _check_refusal(str(error), path, kind)
        return
    first = result.causes[0] if result.causes else None
    assert (first.name if first else None) in EXPECTED[kind][1], first
    if kind == "first-lost":
        assert "misaligned" in {cause.name for cause in result.causes}


def _check_refusal(message: str, path: Path, kind: str) -> None:
    """Two kinds may be refused: padding on both sides, and lists of different lengths if the lengths are said."""
    assert kind in ("padded", "prompt-in-one-list"), message
    if kind == "padded":
        assert re.search("padd", message), message
        return
    row = json.loads(path.read_text().splitlines()[0])
    for name in ("logp_behavior", "logp_proximal"):
        assert re.search(rf"\b{len(row[name])}\b", message), message


@by_kind
def test_a_file_of_this_kind_is_answered(kind: str, tmp_path: Path) -> None:
    check(KINDS[kind](tmp_path), kind)


@by_kind
def test_the_public_file_of_this_kind_is_answered(kind: str, public_cases: Path) -> None:
    check(public_cases / EXPECTED[kind][0], kind)


def test_every_kind_is_drawn() -> None:
    assert set(KINDS) == set(EXPECTED)


def test_every_kind_has_a_public_file(public_cases: Path) -> None:
    assert {path.name for path in public_cases.iterdir()} - {"make.py"} == {file for file, _ in EXPECTED.values()}


def test_faults_of_models_are_answered_without_pretending(public_cases: Path) -> None:
    """Faults that a small model computed, with what may be said of each (expect.json), beside the first folder."""
    folder = public_cases.with_name("cases2")
    if not (folder / "expect.json").is_file():
        pytest.skip(f"{folder} is absent: it holds computed faults with what may be said of each")
    seen = 0
    for row in json.loads((folder / "expect.json").read_text()):
        path = folder / row["file"]
        if "--scalars" in row["args"] or not path.exists() or path.suffix == ".py":
            continue
        seen += 1
        pairs = row["args"][1].split(",") if "--columns" in row["args"] else []
        allowed = {text.split()[0].strip(",;") for text in row["expect"]["first_cause_any_of"]}
        try:
            found = diagnose(path, columns=dict(pair.split("=") for pair in pairs))
        except TrimtabError:
            assert allowed & {"refused", "exit", "read"}, path
            continue
        sure = {cause.name for cause in found.causes if cause.confidence >= 0.7}
        assert not sure & set(row["expect"]["never_at_confidence_0.7_or_more"]), path
        first = found.causes[0].name if found.causes else "a"  # "a finding: ...; no cause"
        assert first in allowed, (path, first)
        if "clean" not in row["file"] and not row["file"].startswith("odd"):
            assert found.answer.kind in ("fits", "differential"), path
            assert "Nothing has to be repaired" not in str(found.answer.verdict), path
        if row["file"].startswith("packing_small"):
            assert "7 of 10 responses carry it" in str(found.answer.verdict)
    assert seen >= 14
