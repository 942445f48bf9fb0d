"""What the documents promise is there: files, recipes, links."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.config import load_config, recipe_names
from trimtab.models import routing
from trimtab.models.architecture import KNOWN
from trimtab.models.invariant import apply as invariant
from trimtab.objectives import objective

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_architecture_page_is_generated_from_the_sources() -> None:
    script = [sys.executable, str(ROOT / "docs" / "architecture.py")]
    page = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    there = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert there == page, "run: python docs/architecture.py > docs/architecture.md"


@pytest.mark.parametrize(
    "document",
    [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), ROOT / "examples" / "README.md"],
    ids=lambda p: p.name,
)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_architecture_that_can_be_scored_is_documented() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    assert {kind for kind in KNOWN if f"`{kind}`" not in page} == set()
    for part, families in {"invariant": invariant.FAMILIES, "routing": routing.FAMILIES}.items():
        [row] = [line for line in page.splitlines() if line.startswith("|") and f"{part}" in line.split("|")[1]]
        assert {kind for kind in families if f"`{kind}`" not in row} == set(), part


def test_every_example_is_linked_where_people_look() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "examples/README.md"):
        text = (ROOT / page).read_text()
        for example in (ROOT / "examples").glob("*.*"):
            if example.suffix in (".py", ".toml"):
                assert f"{example.name})" in text, f"{page} does not link {example.name}"


def test_tests_named_in_the_feature_table_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"`(test_\w+)`", README):
        assert f"def {name}(" in sources, name
    for place in re.findall(r"`(tests/[\w/.]+)`", README):
        assert (ROOT / place).exists(), place


def test_no_placeholder_is_left() -> None:
    assert not re.findall(r"@[A-Z]+@", README)


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_parses_and_names_a_known_objective(name: str) -> None:
    config = load_config(name)
    assert config.description
    assert objective(config.objective.name, **config.objective.keywords).equation()
    for other in config.compare.objectives if config.compare else ():
        objective(other)
