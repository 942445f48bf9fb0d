"""Text for the terminal and Markdown: the exact words on a fixed diagnosis, and text of files that cannot break it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from tests.support.diagnosis_example import MISMATCH, compared, example

from trimtab.diagnosis.output.as_text import markdown, terminal_rows, terminal_text, versions
from trimtab.errors import Finding

# Shares by hand, of 91,000 tokens and 91,000 * 0.0048 = 436.8 nats. Probability below 0.1: the three rarest bins,
# 15,000 tokens and 120 + 120 + 90 = 330 nats. Token 1234: 800 tokens and 160 nats. Age 2 or more: 45,000 tokens and
# 117 + 227.25 = 344.25 nats.
GOLDEN = """\
verdict   Proven: the difference is as large as that of quantized weights (quantized, sure, confidence 0.94).
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
          outside their healthy ranges: chi2_seq 1.75 (at most 1), ess_seq 0.3636 (0.5 to 1), abs_diff_max 2.27 (at \
most 1), ratio_q01 0.71 (0.8 to 1.25), ratio_q99 1.31 (0.8 to 1.25), log_ratio_seq_max 3.4 (at most 2)
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
    printed = [*(label for label, _ in terminal_rows(example()) if label), "page"]
    samples = []
    for page in ("README.md", "docs/diagnose.md"):
        text = (Path(__file__).parents[4] / page).read_text()
        blocks = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
        samples += [block for block in blocks if re.search("^size ", block, re.MULTILINE)]
    assert len(samples) == 2
    for sample in samples:
        labels = [line[:10].strip() for line in sample.splitlines() if line[:1] != " "]
        assert labels == [label for label in printed if label in labels]
        assert labels[0] == "verdict"


def test_folded_lines_hold_the_same_words_under_their_label() -> None:
    folded = terminal_text(example(), Path("diagnose.html"), width=80).splitlines()
    assert max(map(len, folded)) <= 80
    assert " ".join(" ".join(folded).split()) == " ".join(GOLDEN.split())
    assert all(line.startswith(" " * 10) or line[:10].strip().isalpha() for line in folded)


def test_many_missing_columns_are_named_only() -> None:
    absent = {name: f"no {name}" for name in ("entropy", "step", "group", "advantage")}
    lines = terminal_text(example(origin={"missing": absent})).splitlines()
    assert "missing   entropy, step, group, advantage; the page lists what each one would allow" in lines


def test_control_signs_of_a_file_do_not_reach_the_terminal() -> None:
    text = terminal_text(example(causes=(), origin={"findings": (Finding("note", "columns", "a \x1b[31mred\u202e"),)}))
    assert "a  [31mred" in text
    assert not {"\x1b", "\u202e"} & set(text)
    assert "causes    none stands out above the noise floor" in text


def test_markdown_has_the_verdict_a_table_of_figures_and_what_was_read() -> None:
    lines = markdown(example()).splitlines()
    assert f"verdict   {lines[0].strip('*')}" == GOLDEN.splitlines()[0]
    assert lines[4] == "First: Nothing has to be repaired; use the correction token-tis with weight\\_max=1.31."
    table = [line for line in lines if line.startswith("|")]
    assert table[2] == "| k3, nats per token | 4.8e-3 | 4.3e-3 to 5.4e-3 | at most 0.01 |"
    assert table[6] == "| effective sample size, responses | 0.3636 | – | 0.5 to 1 |"
    names = [line[2:].partition(":")[0] for line in lines if line.startswith("- ")]
    settings = ("sampling in the files", "run's recipe beside the files", "versions")
    assert names == ["why quantized", "where", "read", "remark", *settings]


def test_text_of_files_becomes_no_mark() -> None:
    evil = "<!-- x\n# | `a` [b](c) *d*"
    line = next(
        line
        for line in markdown(example(origin={"findings": (Finding("note", "columns", evil),)})).splitlines()
        if "&lt;!--" in line
    )
    assert line == "- remark: &lt;!-- x \\# \\| \\`a\\` \\[b\\](c) \\*d\\*"


@pytest.mark.parametrize("name", ["``x", "```x", "x\n# y", "`x`\x1b[1m"])
def test_a_command_cannot_end_its_fence(name: str) -> None:
    *_, last = markdown(example(), None, f"trimtab {name}").splitlines()
    (code,) = [token for token in MarkdownIt().parse(last)[3].children or () if token.type == "code_inline"]
    assert code.content == f"trimtab {name}".replace("\n", " ").replace("\x1b", " ")


def test_numbers_that_are_not_finite_are_dashes() -> None:
    nothing = example(size={"mismatch": dict.fromkeys(MISMATCH, math.nan), "intervals": {}}, only={})
    table = [line for line in markdown(nothing).splitlines() if line.startswith("|")]
    assert all(" – | – |" in line for line in table[2:])


def test_a_comparison_is_a_table_of_both_and_names_them() -> None:
    of = compared(example(), ("new|a.jsonl", "old.jsonl"))
    lines = markdown(example(), of).splitlines()
    assert lines[0] == ("**k3 in A relative to B: 2 times (1.5 to 2.5), more than chance.**")
    both = "4.8e-3 (4.3e-3 to 5.4e-3)"
    assert f"| k3 | {both} | {both} | 2 times (1.5 to 2.5), more than chance |" in lines
    assert (
        "| tail | 40% of k3 in 1% of the tokens | 20% of k3 in 1% of the tokens | +20.0 points (+10.0 to +30.0), more "
        "than chance |"
    ) in lines
    assert "- A: new\\|a.jsonl" in lines
    assert "- paired: the same 12 prompts occur in both, and the intervals compare each with itself" in lines
    assert versions() in "\n".join(lines).replace("\\", "")
