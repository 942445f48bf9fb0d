"""What the documents promise is there: files, recipes, links."""

from __future__ import annotations

import ast
import csv
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimtab.diagnosis.advice.rules import RULES
from trimtab.objectives import objectives
from trimtab.objectives.presets import PRESETS
from trimtab.trainer.config import load_config
from trimtab.trainer.features import feature
from trimtab.trainer.features.feature import Feature
from trimtab.trainer.models.architecture import FAMILIES, INVARIANT, MIXTURES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DATA = ROOT / "docs" / "results" / "data"


def test_the_architecture_page_has_a_line_for_each_package_and_walks_over_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "trimtab"
    for part, place in zip(page.partition("## The trainer")[::2], (package, package / "trainer"), strict=True):
        rows = re.findall(r"^\| `(\w+)` \|", part, flags=re.MULTILINE)
        assert rows == sorted({file.relative_to(place).parts[0] for file in place.glob("[!_]*/[!_]*.*")})
    walked = re.findall(r"`(\w+/[\w/]*(?:\.py|/))`", page.partition("## Walk one")[2])
    assert len(walked) > 20
    assert {path for path in walked if not (package / path).exists()} == set()


def test_the_presets_on_the_page_of_methods_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(ROOT / "docs" / "methods.py"))
    assert script["written"](page) == page, "run: python docs/methods.py"
    assert re.findall(r"^### `(.+)`$", page, flags=re.MULTILINE) == objectives()


def test_the_lists_of_which_method_when_are_those_of_the_code() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "choosing.py"))
    for page in script["PAGES"]:
        assert script["BEGIN"] in (text := page.read_text(encoding="utf-8"))
        assert script["written"](page) == text, f"{page.name}: run python docs/choosing.py"


def measured(column: str) -> dict[str, float]:
    """The highest accuracy of each preset in a column of the two tables that docs/results/presets.md links."""
    best: dict[str, float] = {}
    for kind in ("presets", "methods"):
        head, *rows = csv.reader((DATA / f"{kind}.csv").read_text(encoding="utf-8").splitlines())
        place = [cell.partition("-")[0] for cell in head].index(column)
        for name, *cells in rows:
            if value := re.match(r"[.\d]+", cells[place - 1]):
                preset = name.partition(",")[0]
                best[preset] = max(best.get(preset, 0.0), float(value[0]))
    return best


@pytest.mark.parametrize(
    ("says", "column"), [(r"many updates (a|per|of a) |reused", "reuse"), (r"\b(stale|lags?|asynchronous)\b", "stale")]
)
def test_a_preset_is_recommended_only_for_what_it_did_not_fail_at(says: str, column: str) -> None:
    accuracy = measured(column)
    assert len(accuracy) > 35
    named = {name for name, preset in PRESETS.items() if re.search(says, preset.when)}
    assert len(named) >= 2
    limit = {"reuse": accuracy["grpo"], "stale": accuracy["token-tis"]}[column]
    assert {name for name in named if accuracy[name] < limit} == set()


def test_the_first_picture_shows_what_the_table_and_diagnose_recommend_for_a_lag() -> None:
    """The end-to-end test of the same page diagnoses the run of the picture."""
    [rule] = [rule for rule in RULES if rule.name == "stale, short"]
    pair = load_config("quickstart-stale").compare
    assert pair.objectives == ["dapo", rule.preset]
    assert f"| {rule.when.partition(' (')[0]} | `{rule.preset}` |" in README
    quickstart = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    for page, named in ((README, f"`{rule.preset}`"), (quickstart, f"{rule.preset}/seed0")):
        assert named in page.partition("quickstart-stale.png)")[2][:400]


def test_every_preset_is_measured_on_the_page_of_choices() -> None:
    rows = (DATA / "presets.csv").read_text(encoding="utf-8").splitlines()
    assert [row.partition(",")[0] for row in rows[1:]] == objectives(), "a row for each preset, in their order"


@pytest.mark.parametrize(
    "document",
    [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), ROOT / "examples" / "README.md"],
    ids=lambda p: p.name,
)
def test_every_link_has_a_target(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_architecture_that_can_be_scored_is_documented() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    assert {kind for kind in FAMILIES if f"`{kind}`" not in page} == set()
    for part, families in {"invariant": INVARIANT, "routing": MIXTURES}.items():
        [row] = [line for line in page.splitlines() if line.startswith("|") and f"{part}" in line.split("|")[1]]
        assert {kind for kind in families if f"`{kind}`" not in row} == set(), part


def test_every_example_is_linked_from_three_pages() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "examples/README.md"):
        text = (ROOT / page).read_text()
        for example in (ROOT / "examples").glob("*.*"):
            if example.suffix in (".py", ".toml"):
                assert f"{example.name})" in text, f"{page} does not link {example.name}"


def test_tests_named_on_the_page_of_frameworks_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    page = (ROOT / "docs" / "reference-frameworks.md").read_text()
    named, paths = re.findall(r"`(test_\w+)`", page), re.findall(r"`(tests/[\w/.]+)`", page)
    assert named
    assert paths
    for name in named:
        assert f"def {name}(" in sources, name
    for path in paths:
        assert (ROOT / path).exists(), path


def test_readme_is_short_and_lists_every_preset() -> None:
    assert len(README) <= 9000
    table = README.partition("\n## Methods\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`([a-z0-9-]+)`", " ".join(rows))) == sorted(objectives())


def test_the_index_links_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("**/*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()


def test_the_interface_of_features_lists_every_hook() -> None:
    hooks = {name for name, value in vars(Feature).items() if callable(value) and not name.startswith("_")}
    calls, _, others = (feature.__doc__ or "").partition("in order:")[2].partition("Besides,")
    listed = [name for line in calls.splitlines() for name in re.findall(r"(\w+)(?=,|  )", line[:27])]
    assert sorted(listed + re.findall(r"`(\w+)`", others)) == sorted(hooks)


def test_numbers_have_one_style_in_pages_and_in_what_is_printed() -> None:
    """0.81 and 95%, as numbers are formatted."""
    script = runpy.run_path(str(ROOT / "tools" / "number_style.py"))
    samples = {"from .13 to .82, 95 % [-.1, +.2]": "from 0.13 to 0.82, 95% [-0.1, +0.2]", "`.5 %` v2.1": "`.5 %` v2.1"}
    assert {sample: script["styled"](sample) for sample in samples} == samples
    for page in script["pages"]():
        text = page.read_text(encoding="utf-8")
        assert script["styled"](text) == text, f"{page.name}: run python tools/number_style.py"
    other = re.compile(rf"{script['DECIMAL']}(?!\d*[a-z%])|{script['PERCENT']}|^ %(?!\w)")
    for path in (ROOT / "src").rglob("*.py"):
        for line, text in printed(ast.parse(path.read_text(encoding="utf-8"))):
            assert not other.search(text), f"{path.relative_to(ROOT)}:{line}: {text}"


def printed(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every string with its line, but for docstrings and formats."""
    left_out = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            left_out |= {id(part) for part in ast.walk(node.format_spec)}
        if isinstance(node, ast.Expr):
            left_out.add(id(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.lineno, node.value


def texts_for_users() -> dict[str, str]:
    """Pages, sources and what builds the project, but for its history."""
    history = {ROOT / "CHANGELOG.md"}
    files = [*ROOT.glob("*.*"), ROOT / "Makefile", *ROOT.glob(".ci/*"), *(ROOT / ".github").rglob("*.yml")]
    for folder in ("docs", "src", "examples", "benchmarks", "tests", "tools"):
        files += [path for kind in ("md", "py", "toml", "txt") for path in (ROOT / folder).rglob(f"*.{kind}")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in files if path.is_file() and path not in history}


BY_NAME = re.compile(r"\binstall\b[^`\n]*?[\s'\"=](trimtab)(?=[\[\s'\"`,;:)=<>]|$)(?!\[\w+\] @ git)")


def test_nobody_is_told_to_install_the_package_by_name() -> None:
    """No registry has the package; whoever takes the name there would be installed."""
    for line in ("pip install trimtab", "uv pip install -U 'trimtab[train]'", 'install "trimtab[{extra}]"'):
        assert BY_NAME.search(line), line
    for line in (
        "pip install '.[train]'",
        "pip install 'trimtab[diagnose] @ git+REPOSITORY'",
        "pip install -e .",
        "pip install ./trimtab-0.1.0-py3-none-any.whl",
    ):
        assert not BY_NAME.search(line), line
    here = Path(__file__).relative_to(ROOT)
    found = {
        (name, line)
        for name, text in texts_for_users().items()
        if name != str(here)
        for line in text.splitlines()
        if BY_NAME.search(line)
    }
    assert found == set()


def test_the_first_screens_say_how_to_get_the_command() -> None:
    for page in (README, (ROOT / "docs" / "install.md").read_text()):
        start = page[:6000]
        for line in ("git clone ", "make install", "source .venv/bin/activate", "pip install '.[train]'"):
            assert line in start, line
