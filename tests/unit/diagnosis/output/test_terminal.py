"""The terminal verdict: its exact words on a fixed diagnosis, and the words that depend on the numbers."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.diagnosis_example import INTERVALS, MISMATCH, example, view

from trimtab.diagnosis.output import words as words
from trimtab.diagnosis.output.hotspots import hotspots, shares
from trimtab.diagnosis.output.html_page import answers
from trimtab.diagnosis.output.terminal import rows, terminal_text
from trimtab.diagnosis.records import CAUSES, Cause, DriftSplit, MismatchSize, PresetOutcome, Recommendation, View
from trimtab.errors import Finding
from trimtab.intervals import Interval

# Shares by hand, of 91,000 tokens and 91,000 * 0.0048 = 436.8 nats. Probability below 0.1: the three rarest bins,
# 15,000 tokens and 120 + 120 + 90 = 330 nats. Token 1234: 800 tokens and 160 nats. Age 2 or more: 45,000 tokens and
# 117 + 227.25 = 344.25 nats.
GOLDEN = """\
verdict   The difference is as large as that of quantized weights (quantized, sure, confidence 0.94).
          Also: The sampler used older weights than the trainer (stale, likely, confidence 0.88).
          First: Nothing has to be repaired; use the correction token-tis with weight_max=1.31.
read      20 files (trimtab): 1,240 responses, 91,200 tokens, 91,000 of them trained; dropped 3 (2 lists of different \
lengths, 1 no trained token)
          3 responses have a length of 1
missing   turn starts (the view by turn)
size      k3 (KL divergence) 4.8e-3 (4.3e-3 to 5.4e-3) nats per token: more than is published for large dense models \
(up to 1e-3), healthy for small ones in bfloat16 (up to 1e-2) and for mixture-of-experts models (up to 1e-1); the two \
probabilities of a token differ by 3.2% on average; rounding alone causes 3.1e-13
          k1 4.1e-3, k2 5.2e-3, chi2 0.012 per token; ESS 0.9878 of tokens, 0.3636 of sequences; Pearson 0.99641, \
perplexity ratio 1.0041
          6 figures are outside their healthy ranges:
          chi2_seq 1.75 (at most 1), ess_seq 0.3636 (0.5 to 1), abs_diff_max 2.27 (at most 1), ratio_q01 0.71 (0.8 to \
1.25)
          ratio_q99 1.31 (0.8 to 1.25), log_ratio_seq_max 3.4 (at most 2)
ratio     mean ratio 1.0007 (0.9991 to 1.0024): the interval contains 1, as expected of correct log-probs without \
top-p and top-k
where     sampler probability below 0.1 (16% of the tokens, 76% of the mismatch); token 1234 (0.9% of the tokens, 37% \
of the mismatch); age 2 or more (49% of the tokens, 79% of the mismatch)
split     k3 of the drift: mismatch 1.1e-3, staleness 3.7e-3 (3.0e-3 to 4.5e-3)
causes    quantized (confidence 0.94): k3 at age 0 is 1.1e-3, with log-ratios spread alike at all steps. \
(docs/causes.md#quantized)
          stale (confidence 0.88): k3 grows from 1.1e-3 at age 0 to 1.0e-2 at ages 4 to 7. (docs/causes.md#stale)
do        token-tis with weight_max=1.31: Tails are heavy per response, light per token.
          on this data it keeps 100% of the tokens, changes 1.0% of the weights, leaves ESS 0.99
page      diagnose.html"""


def test_the_whole_verdict_on_a_fixed_diagnosis() -> None:
    assert terminal_text(example(), Path("diagnose.html")) == GOLDEN


def test_samples_in_the_documents_have_the_lines_that_are_printed() -> None:
    """In their order, the verdict first; README leaves some out. Comparisons have lines of their own."""
    printed = [label for label, _ in rows(example(), "page") if label]
    samples = []
    for page in ("README.md", "docs/diagnose.md"):
        text = (Path(__file__).parents[4] / page).read_text()
        blocks = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
        samples += [block for block in blocks if re.search("^size ", block, re.MULTILINE)]
    assert len(samples) == 3
    for sample in samples:
        labels = [line[:10].strip() for line in sample.splitlines() if line[:1] != " "]
        assert labels == [label for label in printed if label in labels]
        assert labels[0] == "verdict"


def test_folded_lines_hold_the_same_words_under_their_label() -> None:
    folded = terminal_text(example(), Path("diagnose.html"), width=80).splitlines()
    assert max(map(len, folded)) <= 80
    assert " ".join(" ".join(folded).split()) == " ".join(GOLDEN.split())
    assert all(line.startswith(" " * 10) or line[:10].strip().isalpha() for line in folded)


def test_faults_come_before_the_correction() -> None:
    broken = example(causes=(Cause("temperature", 0.9, "Slope 0.4.", "Divide the trainer's logits by 0.7."),))
    nothing = Recommendation("", {}, "Fix temperature first.")
    lines = terminal_text(replace(broken, recommendation=nothing)).splitlines()
    assert lines[0].endswith("Trainer and sampler use different temperatures (temperature, sure, confidence 0.90).")
    assert lines[1].strip() == "First: Divide the trainer's logits by 0.7."
    do = next(index for index, line in enumerate(lines) if line.startswith("do "))
    assert "repair temperature: Divide the trainer's logits by 0.7." in lines[do]
    assert lines[do + 1].strip() == "no correction yet: Fix temperature first."
    texts = dict(answers(replace(broken, recommendation=nothing)))
    assert texts["What to do first"] == "Divide the trainer's logits by 0.7."
    assert not any("token-tis" in text for text in texts.values())
    assert not words.faults(example()), "quantization and staleness are what corrections are for"


STATED, GUESSED = (Cause("stale", 0.9, "Older.", is_stated=stated) for stated in (True, False))
PRECISION = Cause("precision", 0.9, "Small.")


@pytest.mark.parametrize(
    ("causes", "size", "step"),
    [
        ((STATED,), {}, "Nothing has to be repaired; use the correction"),
        ((STATED, PRECISION), {}, "Nothing has to be repaired; use the correction"),
        ((STATED,), {"verdict": "beyond"}, "Compare a checksum"),  # of no working setup that was published
        ((GUESSED,), {}, "Compare a checksum"),
        ((STATED, Cause("quantized", 0.65, "Large.")), {}, "Sample once with unquantized weights"),
        ((PRECISION,), {}, "No fault shows: use the correction"),
        ((PRECISION,), {"mismatch": {**MISMATCH, "k3": 0.05}}, "Compute both sides once in float32"),
        ((), {"mismatch": {**MISMATCH, "k3": 1e-4}}, "No fault shows: use the correction"),
        ((), {"mismatch": {**MISMATCH, "k3": 0.05}}, "k3 is outside its healthy range"),
        ((GUESSED, Cause("copied", 0.9, "Equal.", "Compute them.")), {}, "Compute them."),
    ],
)
def test_only_what_the_files_state_needs_no_repair(causes: tuple[Cause, ...], size: dict[str, Any], step: str) -> None:
    assert words.verdict_lines(example(causes=causes, size=size))[-1][1].startswith(step)


def test_where_both_sides_are_equal_no_correction_is_named() -> None:
    found = example(causes=(), size={"mismatch": {**MISMATCH, "k3": 1e-13}})
    exact = replace(found, recommendation=Recommendation("grpo", {}, "Equal."))
    assert words.verdict_lines(exact)[-1] == ("First", "No fault shows: no correction is needed.")


def test_old_weights_that_no_version_states_may_be_updates_that_are_lost() -> None:
    text = terminal_text(example(causes=(GUESSED,)))
    assert text.startswith(
        "verdict   Either the sampler lags on purpose, or new weights do not arrive (stale, sure, confidence 0.90).\n"
        "          First: Compare a checksum of the sampler's weights with the trainer's right after an update. If the "
        "sampler lags on purpose, use the correction token-tis with weight_max=1.31.\n"
    )
    assert "do        if the sampler lags on purpose, token-tis with weight_max=1.31: Tails" in text


def test_every_cause_that_may_be_meant_has_a_test() -> None:
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
    changed = example(size={"mismatch": {**MISMATCH, "abs_diff_mean": difference}})
    assert text in words.size_text(changed.measured)


def test_the_place_of_a_fault_is_its_tokens_and_what_remains_is_told_apart() -> None:
    broken = example(causes=(Cause("placeholder", 0.97, "It is 0.0.", "Mask it.", tokens=9000),))
    assert words.where_text(broken).startswith("9,000 tokens (9.9% of all); sampler probability below 0.1")  # of 91,000
    left_out = replace(broken, measured=replace(broken.measured, removed=9000))
    # Of 91,000 + 9,000.
    assert words.where_text(left_out).startswith("9,000 tokens (9.0% of all); without them: sampler probability below")


def test_many_missing_columns_are_named_only() -> None:
    absent = {name: f"no {name}" for name in ("entropy", "step", "group", "advantage")}
    lines = terminal_text(example(origin={"missing": absent})).splitlines()
    assert "missing   entropy, step, group, advantage; the page lists what each one would allow" in lines


def test_the_absence_of_a_cause_is_stated() -> None:
    assert "causes    none stands out above the noise floor" in terminal_text(example(causes=()))


def test_control_signs_of_a_file_do_not_reach_the_terminal() -> None:
    text = terminal_text(example(origin={"findings": (Finding("note", "columns", "column \x1b[31mred\u202e"),)}))
    assert "column  [31mred" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


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
    result = words.contract(MismatchSize({**MISMATCH, "ratio_mean": mean}, intervals, 0.0, "", "dense"))
    assert result[0] == tone
    assert expected in result[1]


def located(*cuts: View) -> list[tuple[str, float, float]]:
    """Places in views whose tokens are all there are."""
    count, k3 = cuts[0].count.sum(), (cuts[0].count * cuts[0].k3).sum()
    size = {"mismatch": {**MISMATCH, "tokens": float(count), "k3": k3 / count}}
    result = hotspots(example(only={cut.name: cut for cut in cuts}, size=size).measured, {})
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
    assert words.where_text(example(causes=(), only={"position": even})).startswith("spread evenly")


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
    assert words.where_text(none) == "nowhere: there is no mismatch"
    assert "k3 (KL divergence) 0 nats per token: trainer and sampler compute the same" in terminal_text(none)


def test_drift_that_cannot_be_split_has_a_reason() -> None:
    assert words.split_text(example(split=DriftSplit(False, "no tokens of age 0")).measured) == (
        "mismatch and staleness are not separable: no tokens of age 0"
    )


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0%"), (0.0004, "<0.1%"), (0.004, "0.4%"), (0.12, "12%"), (0.9996, ">99.9%"), (1, "100%"), (math.nan, "–")],
)
def test_shares_in_words(share: float, text: str) -> None:
    assert words.format_percent(share) == text


def test_the_outcome_of_the_recommended_bounds_is_shown_not_of_the_published() -> None:
    result = words.recommended_outcome(example())
    assert isinstance(result, PresetOutcome)
    assert (result.calibrated, result.changed) == (True, 0.01)


def test_k3_below_the_published_range_is_stated() -> None:
    size = MismatchSize({**MISMATCH, "k3": 2e-6}, {}, 0.0, "", "dense")
    assert words.range_text(size) == "less than is published for dense models (1e-5 to 1e-3)"
    assert words.range_text(MismatchSize({**MISMATCH, "k3": 2e-4}, {}, 0.0, "", "dense")).startswith("within")


def test_shares_of_k3_leave_out_what_is_not_finite() -> None:
    whole = MismatchSize({"tokens": 20.0, "k3": 0.02}, {}, 0.0, "", "moe")
    tokens, k3 = shares(view("turn", ["1", "2", "3"], [10, 10, 0], [0.01, 0.03, math.nan]), whole)
    np.testing.assert_allclose(tokens, [0.5, 0.5, 0.0])
    np.testing.assert_allclose(k3, [0.25, 0.75, 0.0])


def test_intervals_are_printed_next_to_their_value() -> None:
    size = MismatchSize(MISMATCH, INTERVALS, 0.0, "", "small-dense")
    assert words.with_interval(size, "k3") == "4.8e-3 (4.3e-3 to 5.4e-3)"
    assert words.with_interval(size, "k2") == "5.2e-3"
