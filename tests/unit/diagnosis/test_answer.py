"""The answer of a diagnosis: what to do first, where the mismatch is, and the faults that are known of a cause."""

from __future__ import annotations

import json
import math
import re
import runpy
from dataclasses import fields, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.specifiers import SpecifierSet
from tests.support.diagnosis_example import INTERVALS, MISMATCH, example, view

import trimtab.diagnosis
from trimtab.diagnosis.answer import Figure, mean_ratio_text, range_text
from trimtab.diagnosis.known_faults import find_matches, known_faults
from trimtab.diagnosis.measure.views import find_hotspots, shares
from trimtab.diagnosis.output.as_json import as_dict
from trimtab.diagnosis.output.as_text import terminal_rows, terminal_text
from trimtab.diagnosis.output.html_page import answers, page
from trimtab.diagnosis.reading.counts import ODD_FILES
from trimtab.diagnosis.reading.layouts import LAYOUTS, ROLES
from trimtab.diagnosis.records import (
    CAUSES,
    Cause,
    DataSummary,
    DriftSplit,
    KnownFault,
    MismatchSize,
    Numerics,
    PresetOutcome,
    Recommendation,
    View,
    finding,
    read_table,
)
from trimtab.intervals import Interval
from trimtab.text import format_percent

DOCS = Path(__file__).parents[3] / "docs"
PACKAGE = Path(trimtab.diagnosis.__file__).parent
OWN = Numerics("bfloat16", "float32", "none", ())
STATED, GUESSED = (Cause("stale", 0.9, "Older.", is_stated=stated) for stated in (True, False))
PRECISION = Cause("precision", 0.9, "Small.")
BROKEN = Cause("temperature", 0.9, "Slope 0.4.", "Divide the logits.")


@pytest.mark.parametrize(
    ("causes", "size", "step"),
    [
        ((BROKEN,), {}, "Divide the logits."),
        ((STATED,), {}, "Nothing has to be repaired; use the correction token-tis with weight_max=1.31."),
        ((STATED, PRECISION), {}, "Nothing has to be repaired; use the correction"),
        ((STATED,), {"verdict": "beyond"}, CAUSES["stale"].test),  # of no working setup that was published
        ((GUESSED,), {}, f"{CAUSES['stale'].test}. If {CAUSES['stale'].intended}, use the correction token-tis with"),
        ((STATED, Cause("quantized", 0.65, "Large.")), {}, CAUSES["quantized"].test),
        ((PRECISION,), {}, "No fault shows: use the correction"),
        ((PRECISION,), {"mismatch": {**MISMATCH, "k3": 0.05}}, CAUSES["precision"].test),
        ((), {"mismatch": {**MISMATCH, "k3": 1e-4}}, "No fault shows: use the correction"),
        ((), {"mismatch": {**MISMATCH, "k3": 0.05}}, "k3 is outside its healthy range"),
        ((GUESSED, Cause("copied", 0.9, "Equal.", "Compute them.")), {}, "Compute them."),
    ],
)
def test_only_what_the_files_state_needs_no_repair(causes: tuple[Cause, ...], size: dict[str, Any], step: str) -> None:
    assert example(causes=causes, size=size).answer.verdict[-1][1].startswith(step)


def test_faults_come_before_the_correction() -> None:
    broken = replace(example(causes=(BROKEN,)), recommendation=Recommendation("", {}, "Fix it first."))
    assert broken.answer.faults == {"temperature": "Divide the logits."}
    assert broken.answer.verdict[0][1].endswith("(temperature, sure, confidence 0.90).")
    do = [text for _, text in terminal_rows(broken)][-2:]
    assert do == ["repair temperature: Divide the logits.", "no correction yet: Fix it first."]
    assert not any("token-tis" in text for _, text in answers(broken))
    assert not example().answer.faults, "quantization and staleness are what corrections are for"


def test_where_both_sides_are_equal_no_correction_is_named() -> None:
    found = example(causes=(), size={"mismatch": {**MISMATCH, "k3": 1e-13}})
    exact = replace(found, recommendation=Recommendation("grpo", {}, "Equal."))
    assert exact.answer.verdict[-1] == ("First", "No fault shows: no correction is needed.")


def test_what_is_odd_about_a_batch_comes_before_a_correction() -> None:
    found = example(causes=(PRECISION,))
    odd = finding("repeated", count=3, responses=4)
    origin = replace(found.measured.origin, findings=(*found.measured.origin.findings, odd))
    *_, also, first = replace(found, measured=replace(found.measured, origin=origin)).answer.verdict
    assert also[0] == "Also"
    assert also[1].startswith("3 of 4 responses repeat another one")
    assert re.match("Give every server.*The log-probs show no fault: use the correction token-tis", first[1])


def test_what_may_be_meant_is_recommended_under_a_condition() -> None:
    answer = example(causes=(GUESSED,)).answer
    assert answer.cause.startswith(CAUSES["stale"].unsure)
    assert answer.method == f"if {CAUSES['stale'].intended}, token-tis with weight_max=1.31"
    for kind in CAUSES.values():
        assert kind.must_fix != bool(kind.test and kind.intended), kind.name


def test_the_answers_of_the_page_are_complete() -> None:
    assert [label for label, _ in answers(example())] == [
        *("What was found", "Also found", "What to do first", "How large it is", "Where it is", "Why this answer"),
    ]
    texts = dict(answers(example()))
    assert texts["What was found"].endswith("quantized weights (quantized, sure, confidence 0.94).")
    assert texts["What to do first"].endswith("use the correction token-tis with weight_max=1.31.")
    # The mean absolute log-ratio is .0312: a factor of exp(.0312) = 1.0317.
    assert "the two probabilities of a token differ by 3.2% on average" in texts["How large it is"]
    assert texts["Why this answer"].startswith("k3 at age 0")


@pytest.mark.parametrize(
    ("difference", "text"), [(0.3, "by 35% on"), (2.27, "by a factor of e^2.3 on"), (9e3, "e^9e+03")]
)
def test_the_distance_of_two_probabilities_has_words_however_large(difference: float, text: str) -> None:
    assert text in example(size={"mismatch": {**MISMATCH, "abs_diff_mean": difference}}).answer.size


def test_the_place_of_a_fault_is_its_tokens_and_what_remains_is_told_apart() -> None:
    broken = example(causes=(Cause("placeholder", 0.97, "It is 0.0.", "Mask it.", tokens=9000),))
    assert broken.answer.where.startswith("9,000 tokens (9.9% of all); sampler probability below 0.1")  # of 91,000
    left_out = replace(broken, measured=replace(broken.measured, removed=9000))
    # Of 91,000 + 9,000.
    assert left_out.answer.where.startswith("9,000 tokens (9.0% of all); without them: sampler probability below")


@pytest.mark.parametrize(
    ("mean", "low", "high", "tone", "expected"),
    [
        (1.2, 0.9, 1.5, "good", "contains 1"),
        (1.2, 0.4, 1.5, "plain", "too wide"),
        (0.9995, 0.9993, 0.9997, "good", "within 0.1% of 1"),
        (0.895, 0.89, 0.9, "warn", "cannot be sampled"),
        (1.3, 1.1, 1.5, "warn", "not those of the distribution"),
        (1.3, None, None, "plain", "too few responses"),
        (1.3, math.nan, math.nan, "plain", "too few responses"),
        (math.nan, None, None, "plain", "mean ratio –"),
    ],
)
def test_mean_ratio_against_one(mean: float, low: float | None, high: float | None, tone: str, expected: str) -> None:
    intervals = {} if low is None or high is None else {"ratio_mean": Interval(mean, low, high)}
    result = mean_ratio_text(MismatchSize({**MISMATCH, "ratio_mean": mean}, intervals, 0.0, "", "dense"))
    assert result[0] == tone
    assert expected in result[1]


def located(*cuts: View) -> list[tuple[str, float, float]]:
    """Places in views whose tokens are all there are."""
    count, k3 = cuts[0].count.sum(), (cuts[0].count * cuts[0].k3).sum()
    size = {"mismatch": {**MISMATCH, "tokens": float(count), "k3": k3 / count}}
    result = find_hotspots(example(only={cut.name: cut for cut in cuts}, size=size).measured, {})
    return [(place.what, round(place.tokens, 3), round(place.k3, 3)) for place in result]


def test_ordered_bins_are_cut_where_k3_gathers() -> None:
    # Tokens .1 .2 .3 .4, k3 .4 .3 .2 .1: the first two bins hold 40 points more k3 than tokens.
    edges = np.array([1e-5, 1e-3, 0.1, 0.5, 1.0])
    rare = view("probability", ["a", "b", "c", "d"], [10, 20, 30, 40], [0.4, 0.15, 0.2 / 3, 0.025], edges=edges)
    assert located(rare) == [("sampler probability below 0.1", 0.3, 0.7)]
    tenths = view("position", ["a", "b"], [50, 50], [0.1, 0.9], edges=np.array([0.0, 0.5, 1.0]))
    assert located(tenths) == [("the last 50% of the response", 0.5, 0.9)]
    assert located(view("version", ["0", "1", "2-4"], [50, 25, 25], [0.1, 0.4, 0.4])) == [("age 1 or more", 0.5, 0.8)]
    assert located(view("version", ["0", "1"], [50, 50], [0.9, 0.1])) == [("age 0", 0.5, 0.9)]


def test_evenly_distributed_k3_has_no_place() -> None:
    even = view("position", ["a", "b"], [50, 50], [0.011, 0.009], edges=np.array([0.0, 0.5, 1.0]))
    assert located(even) == []
    assert example(causes=(), only={"position": even}).answer.where.startswith("spread evenly")


def test_a_single_token_needs_twice_its_share_and_some_weight() -> None:
    # 25% of the tokens and 67% of k3; then 25% and 40%, less than twice; then 0.1% of the tokens, however bad.
    assert located(view("token", ["7", "8"], [75, 25], [1 / 300, 0.02])) == [("token 8", 0.25, 0.667)]
    assert located(view("token", ["7", "8"], [75, 25], [0.01, 0.02])) == []
    assert located(view("token", ["7", "8"], [999, 1], [0.001, 5.0])) == []


def test_entropy_is_not_named_together_with_probability() -> None:
    low = view("probability", ["a", "b"], [50, 50], [0.9, 0.1], edges=np.array([1e-3, 0.1, 1.0]))
    high = view("entropy", ["a", "b"], [50, 50], [0.1, 0.9], edges=np.array([0.0, 0.5, 2.0]))
    assert located(high) == [("entropy above 0.5", 0.5, 0.9)]
    assert [what for what, _, _ in located(low, high)] == ["sampler probability below 0.1"]


def test_without_mismatch_no_place_is_named() -> None:
    none = example(size={"mismatch": {**MISMATCH, "k3": 0.0}, "intervals": {}, "verdict": "exact"})
    assert none.answer.where == "nowhere: there is no mismatch"
    assert "k3 (KL divergence) 0 nats per token: trainer and sampler compute the same" in terminal_text(none)


def test_drift_that_cannot_be_split_has_a_reason() -> None:
    assert example(split=DriftSplit(False, "no tokens of age 0")).answer.split.endswith(": no tokens of age 0")


@pytest.mark.parametrize(
    ("share", "text"),
    [
        *[(0, "0%"), (0.0004, "<0.1%"), (0.004, "0.4%"), (0.0999, "10%"), (0.12, "12%"), (0.994, "99%")],
        *[(0.996, "99.6%"), (0.998, "99.8%"), (0.9996, ">99.9%"), (1, "100%"), (math.nan, "–")],
    ],
)
def test_shares_in_words(share: float, text: str) -> None:
    assert format_percent(share) == text


def test_the_outcome_of_the_recommended_bounds_is_shown_not_of_the_published() -> None:
    result = example().answer.outcome
    assert isinstance(result, PresetOutcome)
    assert (result.calibrated, result.changed) == (True, 0.01)


def test_k3_below_the_published_range_is_stated() -> None:
    size = MismatchSize({**MISMATCH, "k3": 2e-6}, {}, 0.0, "", "dense")
    assert range_text(size) == "less than is published for dense models (1e-5 to 1e-3)"
    assert range_text(MismatchSize({**MISMATCH, "k3": 2e-4}, {}, 0.0, "", "dense")).startswith("within")


def test_shares_of_k3_leave_out_what_is_not_finite() -> None:
    whole = MismatchSize({"tokens": 20.0, "k3": 0.02}, {}, 0.0, "", "moe")
    tokens, k3 = shares(view("turn", ["1", "2", "3"], [10, 10, 0], [0.01, 0.03, math.nan]), whole)
    np.testing.assert_allclose(tokens, [0.5, 0.5, 0.0])
    np.testing.assert_allclose(k3, [0.25, 0.75, 0.0])


def test_intervals_are_printed_next_to_their_value() -> None:
    size = MismatchSize(MISMATCH, INTERVALS, 0.0, "", "small-dense")
    assert Figure.of(size, "k3").text == "4.8e-3 (4.3e-3 to 5.4e-3)"
    assert Figure.of(size, "k2").text == "5.2e-3"


def data(framework: str = "columns", **changes: object) -> DataSummary:
    return DataSummary(framework, 1, 10, 100, 100, "proximal", **changes)  # pyright: ignore[reportArgumentType]


def links(cause: str, origin: DataSummary) -> set[str]:
    return {match.link.rpartition("/")[2] for match in find_matches(cause, origin)}


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
    assert {layout.engine for layout in LAYOUTS.values()} == {"", "vllm", "sglang"}


@pytest.mark.parametrize(
    ("origin", "named", "left_out"),
    [
        (data("nemo-rl"), {"3152", "46125"}, {"2783", "4018"}),  # 46125 is one of vLLM, whatever the trainer
        (data("nemo-rl", model="nvidia/Nemotron-H-8B"), {"3152", "4018"}, {"2783"}),
        (data("nemo-rl", model="Qwen/Qwen3-8B"), {"3152"}, {"4018"}),
        (data("columns"), set(), {"4018", "2783", "46125"}),  # neither trainer nor engine is known
        (data("trimtab"), set(), {"4018", "2783", "46125"}),  # hooks in other trainers write these columns
        (data("trimtab", numerics=OWN, engine="vllm"), {"46125"}, {"4018", "2783"}),
        (data("miles"), {"27886"}, {"46125"}),  # Miles samples with SGLang
    ],
)
def test_a_fault_of_another_trainer_or_engine_is_left_out(
    origin: DataSummary, named: set[str], left_out: set[str]
) -> None:
    found = links("stale-cache", origin)
    assert named <= found
    assert not left_out & found
    assert links("stale-cache", data("trimtab", numerics=OWN, engine="transformers")) == set()


@pytest.mark.parametrize(
    ("version", "certain"), [("0.20.0", True), ("0.20.2.dev3", True), ("0.21.0", None), ("0.17.1", None), ("", False)]
)
def test_versions_decide(version: str, certain: bool | None) -> None:
    # vLLM 0.20 is affected and 0.21 repaired (NeMo-RL, pull request 2895).
    versions = {"vllm": version} if version else {}
    for model in ("zai-org/GLM-4.7-Flash", ""):
        found = find_matches("undelivered", data("nemo-rl", versions=versions, model=model))
        matched = [match.certain for match in found if match.link.endswith("/2895")]
        assert matched == ([] if certain is None or not (certain or model) else [certain])


def test_a_fault_of_other_models_or_of_an_unknown_trainer_is_not_blamed() -> None:
    """Below a dense model of which nothing else is known stands nothing; below one with experts, what it may have."""
    for model in ("smollm2-135m-instruct", ""):
        assert find_matches("unexplained", data("trimtab", model=model)) == []
        assert find_matches("routing", data("trimtab", numerics=OWN, engine="vllm", model=model)) == []
    experts = find_matches("routing", data("verl", engine="vllm", model="/models/Qwen3-30B-A3B"))
    assert [one.models for one in experts] == ["mixture of experts, as Qwen3-30B-A3B"] * 2


def test_known_versions_come_first_then_the_same_trainer() -> None:
    found = find_matches(
        "unexplained", data("nemo-rl", versions={"vllm": "0.16.0"}, model="nvidia/Nemotron-3-Nano-30B-A3B")
    )
    assert [match.certain for match in found][:2] == [True, False]
    assert found[0].link.endswith("/2128")
    assert found[0].text.startswith("known (nemo-rl, vllm <0.17, Nemotron-3-Nano, vLLM with Megatron): ")
    same = [match.trainers == ("nemo-rl",) for match in found]
    assert same == sorted(same, reverse=True)


def test_at_most_three_stand_under_a_cause() -> None:
    origin = {"framework": "nemo-rl", "versions": {"vllm": "0.20.1"}}
    diagnosis = example(causes=(Cause("undelivered", 0.9, "age 0 throughout", "Send them."),), origin=origin)
    lines = [text for _, text in terminal_rows(diagnosis)]
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
    assert bool([text for _, text in terminal_rows(diagnosis) if text.startswith("may apply")]) is shown


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


def test_every_finding_of_the_table_is_made_somewhere_and_no_other() -> None:
    source = "".join(path.read_text() for part in ("reading", "measure") for path in (PACKAGE / part).glob("*.py"))
    made = {*re.findall(r'finding\("([\w-]+)"', source), *ODD_FILES}
    assert made == set(read_table("findings.toml"))


def test_texts_are_those_of_roles_views_and_figures() -> None:
    texts = read_table("texts.toml")
    assert set(texts["missing"]) <= set(ROLES)
    assert set(texts["figures"]) <= {*MISMATCH, "ppl_train"}
    assert all(row.keys() >= {"title", "reading"} for part in ("views", "charts") for row in texts[part].values())


SCRIPT = runpy.run_path(str(DOCS / "detection.py"))


def test_the_table_has_every_threshold_with_its_meaning() -> None:
    rows = SCRIPT["thresholds"]()
    assert len(rows) > 130
    assert all(meaning for _, _, _, meaning, _ in rows)
    assert SCRIPT["markdown"]().count("\n") == len(rows) + 1


def test_every_number_of_a_detector_is_in_the_table_or_has_a_docstring() -> None:
    for path in SCRIPT["FILES"]:
        source = path.read_text(encoding="utf-8")
        numbers = set(re.findall(r"^([A-Z][A-Z0-9_]*) = -?[\d.]", source, flags=re.MULTILINE))
        listed = {match[1] for match in SCRIPT["LINE"].finditer(source)}
        described = set(re.findall(r'^([A-Z][A-Z0-9_]*) = .*\n"""', source, flags=re.MULTILINE))
        assert numbers - listed - described == set(), path.name
