"""No sentence of a page is too long to be understood when it is read once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.prose import sentences, words

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")})
MOST = 39


def too_long(markdown: str) -> list[str]:
    return [f"{words(one)} words: {one}" for one in sentences(markdown) if words(one) > MOST]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_sentence_of_a_page_is_short(page: Path) -> None:
    """Make two sentences of it, or a list or table. There is no list of exceptions."""
    assert too_long(page.read_text(encoding="utf-8")) == []


def test_the_pages_are_those_that_a_user_reads() -> None:
    named = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/causes.md", "docs/results/alp.md"} <= named
    assert "benchmarks/README.md" in named
    assert sum(1 for page in PAGES for _ in sentences(page.read_text(encoding="utf-8"))) > 2000


def sentence(count: int) -> str:
    return " ".join(["One", *["more"] * (count - 1)])


@pytest.mark.parametrize(
    "page",
    [
        "{}.",
        "Short. {}! Short.",
        "- short\n- {}\n- short",
        "Short:\n\n1. {}\n",
        "> {}.",
        "## Heading\n{}.\n",
        "| a | b |\n|---|---|\n| c | d |\n{}.",
        "Before.\n\n```text\ncode\n```\n{}.",
        "(See above.) {}.",
        'He says "yes." {}.',
    ],
)
def test_a_sentence_of_forty_words_is_found(page: str) -> None:
    assert len(too_long(page.format(sentence(40)))) == 1
    assert too_long(page.format(sentence(39))) == []


def test_a_sentence_over_several_lines_is_one() -> None:
    assert len(too_long(f"{sentence(20)}\n{sentence(20)}.\n")) == 1
    assert len(too_long(f"- {sentence(20)}\n  {sentence(20)}.\n")) == 1


@pytest.mark.parametrize(
    "end",
    ["e.g.", "i.e.", "Eq. 3", "(cf. Eq. 3)", "0.81", "arXiv 2510.18855", "Dr. GRPO", "Liu et al.", "...", "v2.1"],
)
def test_what_looks_like_an_end_is_none(end: str) -> None:
    assert len(list(sentences(f"It holds, {end} and so on."))) == 1
    assert len(too_long(f"{sentence(20)} {end} {sentence(20)}.")) == 1


def test_two_sentences_are_two() -> None:
    text = "k3 is 0.81. verl has it! `token-tis` has not? (So **it is.**) 14 runs end [here](there.md). The end"
    assert [words(one) for one in sentences(text)] == [3, 3, 3, 3, 4, 2]
    assert too_long(f"{sentence(39)}. {sentence(39)}.\n\n{sentence(39)}\n\n- {sentence(39)}\n- {sentence(39)}") == []


def test_what_is_no_prose_is_not_counted() -> None:
    long = sentence(60)
    for page in (
        f"```text\n{long}\n```",
        f"Text:\n\n    {long}\n    {long}\n",
        f"| {long} | {long} |",
        f"<!-- {long}\n{long} -->",
        f"Text `{long}` and text.",
        f"[Text](https://{long.replace(' ', '/')}) and text.",
        f"![{long}](image.png)",
        f"Text. Source: {long}.",
        f"Sources: {long}",
    ):
        assert too_long(page) == [], page
    assert [words(one) for one in sentences("A `b c d` [e f](g) ![h](i) = j.")] == [5]
