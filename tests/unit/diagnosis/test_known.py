"""The table of known faults: its rows, what they are matched with, and where a match is shown."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import fields
from datetime import date
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from tests.support.diagnosis_example import example

from trimtab.diagnosis.known import ENGINES, KnownFault, known_faults, matches
from trimtab.diagnosis.output.as_json import as_dict
from trimtab.diagnosis.output.html_page import page
from trimtab.diagnosis.output.terminal import rows
from trimtab.diagnosis.reading.layouts import LAYOUTS
from trimtab.diagnosis.records import CAUSES, Cause, DataSummary, Settings

DOCS = Path(__file__).parents[3] / "docs"
OWN = Settings("bfloat16", "float32", "none", ())


def data(framework: str = "columns", **changes: object) -> DataSummary:
    return DataSummary(framework, 1, 10, 100, 100, "proximal", **changes)  # pyright: ignore[reportArgumentType]


def links(cause: str, origin: DataSummary) -> set[str]:
    return {match.link.rpartition("/")[2] for match in matches(cause, origin)}


def test_every_row_is_whole() -> None:
    faults = known_faults()
    assert 40 <= len(faults) <= 60
    assert len({fault.link for fault in faults}) == len(faults)
    for fault in faults:
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", fault.link)
        assert date.fromisoformat(fault.date).year >= 2024
        assert fault.causes
        assert set(fault.causes) <= set(CAUSES)
        assert fault.engine in ("", "vllm", "sglang", "transformers")
        assert fault.engine or fault.trainers or fault.models, "a fault is one of something"
        assert bool(fault.family) == bool(fault.models)
        assert re.compile(fault.family)
        for text in (fault.symptom, fault.repair, fault.feature):
            assert text
            assert not text.endswith(".")
        assert len(fault.symptom) <= 140
        for versions in fault.versions.values():
            assert SpecifierSet(versions)


def test_trainers_whose_files_are_read_have_the_names_of_their_layouts() -> None:
    named = {trainer for fault in known_faults() for trainer in fault.trainers}
    assert {"nemo-rl", "verl", "trl", "miles", "prime-rl"} <= named
    assert not named & {"slime", "nemo", "prime"}, "slime's files are those of miles"
    assert set(ENGINES) <= set(LAYOUTS)


@pytest.mark.parametrize(
    ("origin", "named", "left_out"),
    [
        (data("nemo-rl"), {"3152", "46125"}, {"2783", "4018"}),  # 46125 is one of vLLM, whatever the trainer
        (data("nemo-rl", model="nvidia/Nemotron-H-8B"), {"3152", "4018"}, {"2783"}),
        (data("nemo-rl", model="Qwen/Qwen3-8B"), {"3152"}, {"4018"}),
        (data("columns"), set(), {"4018", "2783", "46125"}),  # neither trainer nor engine is known
        (data("trimtab"), set(), {"4018", "2783", "46125"}),  # hooks in other trainers write these columns
        (data("trimtab", settings=OWN, engine="vllm"), {"46125"}, {"4018", "2783"}),
        (data("miles"), {"27886"}, {"46125"}),  # Miles samples with SGLang
    ],
)
def test_a_fault_of_another_trainer_or_engine_is_left_out(
    origin: DataSummary, named: set[str], left_out: set[str]
) -> None:
    found = links("stale-cache", origin)
    assert named <= found
    assert not left_out & found
    assert links("stale-cache", data("trimtab", settings=OWN, engine="transformers")) == set()


@pytest.mark.parametrize(
    ("version", "certain"), [("0.20.0", True), ("0.20.2.dev3", True), ("0.21.0", None), ("0.17.1", None), ("", False)]
)
def test_versions_decide(version: str, certain: bool | None) -> None:
    # vLLM 0.20 is affected and 0.21 repaired (NeMo-RL, pull request 2895).
    versions = {"vllm": version} if version else {}
    for model in ("zai-org/GLM-4.7-Flash", ""):
        found = matches("undelivered", data("nemo-rl", versions=versions, model=model))
        matched = [match.certain for match in found if match.link.endswith("/2895")]
        assert matched == ([] if certain is None or not (certain or model) else [certain])


def test_a_fault_of_other_models_or_of_an_unknown_trainer_is_not_blamed() -> None:
    """Below a dense model of which nothing else is known stands nothing; below one with experts, what it may have."""
    for model in ("smollm2-135m-instruct", ""):
        assert matches("unexplained", data("trimtab", model=model)) == []
        assert matches("routing", data("trimtab", settings=OWN, engine="vllm", model=model)) == []
    experts = matches("routing", data("verl", engine="vllm", model="/models/Qwen3-30B-A3B"))
    assert [one.models for one in experts] == ["mixture of experts, as Qwen3-30B-A3B"] * 2


def test_known_versions_come_first_then_the_same_trainer() -> None:
    found = matches("unexplained", data("nemo-rl", versions={"vllm": "0.16.0"}, model="nvidia/Nemotron-3-Nano-30B-A3B"))
    assert [match.certain for match in found][:2] == [True, False]
    assert found[0].link.endswith("/2128")
    assert found[0].text.startswith("known (nemo-rl, vllm <0.17, Nemotron-3-Nano, vLLM with Megatron): ")
    same = [match.trainers == ("nemo-rl",) for match in found]
    assert same == sorted(same, reverse=True)


def test_at_most_three_stand_under_a_cause() -> None:
    origin = {"framework": "nemo-rl", "versions": {"vllm": "0.20.1"}}
    diagnosis = example(causes=(Cause("undelivered", 0.9, "age 0 throughout", "Send them."),), origin=origin)
    lines = [text for _, text in rows(diagnosis)]
    start = lines.index("undelivered (confidence 0.90): age 0 throughout (docs/causes.md#undelivered)")
    shown = lines[start + 1 : start + 4]
    assert [line.split()[0] for line in shown[:2]] == ["known", "known"]
    assert not lines[start + 4].startswith(("known", "may apply"))
    (cause,) = json.loads(json.dumps(as_dict(diagnosis)))["causes"]
    assert cause["page"] == "docs/causes.md#undelivered"
    assert [fault["certain"] for fault in cause["known"]] == [True, True]
    assert set(cause["known"][0]) == {field.name for field in fields(KnownFault)}
    html = page(diagnosis)
    assert html.count('<span class="tag warn">known</span>') == 2
    assert "https://github.com/NVIDIA-NeMo/RL/pull/2895" in html


@pytest.mark.parametrize(
    ("k3", "framework", "shown"), [(1e-4, "nemo-rl", False), (0.05, "nemo-rl", True), (0.05, "columns", False)]
)
def test_noise_is_blamed_on_the_same_trainer_only_and_where_it_is_large(k3: float, framework: str, shown: bool) -> None:
    diagnosis = example(
        causes=(Cause("precision", 0.9, "small"),),
        origin={"framework": framework, "model": "nvidia/Nemotron-3.5-Super"},
        size={"mismatch": {**example().measured.size.mismatch, "k3": k3}},
    )
    assert bool([text for _, text in rows(diagnosis) if text.startswith("may apply")]) is shown


def test_causes_and_what_is_odd_about_the_files_are_one_list() -> None:
    diagnosis = example(causes=(Cause("copied", 0.9, "equal", "Compute them."), Cause("stale", 0.6, "old", "Publish.")))
    assert as_dict(diagnosis)["findings"] == [
        {"status": "fail", "name": "copied", "detail": "equal", "next_step": "Compute them."},
        {"status": "note", "name": "stale", "detail": "old", "next_step": "Publish."},
        {"status": "note", "name": "lengths", "detail": "3 responses have a length of 1", "next_step": ""},
    ]


def test_the_page_is_generated() -> None:
    script = runpy.run_path(str(DOCS / "known_faults.py"))
    page = script["markdown"]()
    assert all(page.count(f"]({fault.link})") == len(fault.causes) for fault in known_faults())


def test_every_cause_has_a_section_and_nothing_else_has() -> None:
    text = (DOCS / "causes.md").read_text(encoding="utf-8")
    assert re.findall(r"^#+ (.+)$", text, re.MULTILINE)[1:] == list(CAUSES)
    for part in text.split("\n## ")[1:]:
        name, _, body = part.partition("\n")
        starts = re.findall(r"^\*\*(.+?)\.\*\*", body, re.MULTILINE)
        assert starts == ["What it is", "Why it happens", "How to prove it", "What to set", "Threads"], name
        links = set(re.findall(r"\]\((https://github.com/[^)]+)\)", body.partition("**Threads.**")[2]))
        known = {fault.link for fault in known_faults() if name in fault.causes}
        assert links <= known, name
        assert len(links) == min(len(known), 5), name
        assert Cause(name, 1.0, "").page == f"docs/causes.md#{name}"
