"""Markdown for an issue: its exact text on a fixed diagnosis, and text of files that cannot become marks."""

from __future__ import annotations

import math

import pytest
from markdown_it import MarkdownIt
from tests.support.diagnosis_example import MISMATCH, example

from trimtab.diagnosis.against import Comparison, Place
from trimtab.diagnosis.output.markdown import markdown, versions
from trimtab.errors import Finding
from trimtab.intervals import Interval

GOLDEN = """\
**The difference is as large as that of quantized weights (quantized, sure, confidence 0.94).**

Also: The sampler used older weights than the trainer (stale, likely, confidence 0.88).

First: Nothing has to be repaired; use the correction token-tis with weight\\_max=1.31.

| figure | value | 95% interval | healthy |
|---|---|---|---|
| k3, nats per token | 4.8e-3 | 4.3e-3 to 5.4e-3 | at most 0.01 |
| mean ratio trainer / sampler | 1.0007 | 0.9991 to 1.0024 | 0.99 to 1.01 |
| effective sample size, tokens | 0.9878 | 0.985 to 0.99 | 0.95 to 1 |
| Pearson r of the probabilities | 0.99641 | 0.9959 to 0.9969 | 0.95 to 1 |
| effective sample size, responses | 0.3636 | – | 0.5 to 1 |

- why quantized: k3 at age 0 is 1.1e-3, with log-ratios spread alike at all steps.
- where: sampler probability below 0.1 (16% of the tokens, 76% of the mismatch); token 1234 (0.9% of the tokens, 37% \
of the mismatch); age 2 or more (49% of the tokens, 79% of the mismatch)
- read: 20 files (trimtab): 1,240 responses, 91,200 tokens, 91,000 of them trained; dropped 3 (2 lists of different \
lengths, 1 no trained token); trainer's log-probs of the proximal policy
- remark: 3 responses have a length of 1
"""


def test_the_whole_text_on_a_fixed_diagnosis() -> None:
    text = markdown(example())
    assert text.startswith(GOLDEN)
    names = [line.partition(":")[0] for line in text.removeprefix(GOLDEN).splitlines()]
    assert names == ["- sampling in the files", "- run's recipe beside the files", "- versions"]


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
    change = Interval(2.0, 1.5, 2.5)
    of = Comparison(
        baseline=example(causes=()),
        k3=change,
        ratio_mean=Interval(1.0, 0.99, 1.01),
        tail=Interval(0.2, 0.1, 0.3),
        tails=(0.4, 0.2),
        paired="prompt",
        pairs=12,
        places={"step": (Place("1", 0.1, 0.05), Place("2", 0.1, 0.01))},
        names=("new|a.jsonl", "old.jsonl"),
    )
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
