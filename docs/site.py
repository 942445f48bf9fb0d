"""Collects the pages of the documentation site in build/pages, where `mkdocs build` finds them (`make docs`).

README, CONTRIBUTING, CHANGELOG, docs/ and examples/ keep their places, so that their links are valid both on the site
and in the repository. Two kinds of pages are written here: one for each preset, from its description, its equation and
docs/results/presets.md, and one for each part of the Python interface.
"""

from __future__ import annotations

import shutil
from inspect import Parameter
from pathlib import Path

from trimtab.adapters.hooks import HOOKS
from trimtab.objectives import keywords_of, objective, objectives
from trimtab.objectives.presets import PRESETS

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff", "LICENSE")
REQUIRED = {"dr-grpo": {"length_max": 1000}, "luffy": {"length_max": 1000}}
"""Numbers that a preset has no default for, in its equation."""

API = {
    "objectives": (
        "Objectives",
        *("objectives.lookup.objective", "objectives.lookup.objectives", "objectives.objective.Objective"),
        *("objectives.objective.Output", "objectives.policies.PolicyLogps", "objectives.policies.Ratio"),
        *("objectives.state.State", "objectives.advantages.advantages", "objectives.metrics.Metrics"),
    ),
    "corrections": (
        "Corrections",
        *("objectives.correct.correct", "objectives.correct.mismatch", "objectives.correct.Correction"),
        *("corrections.weights.Weight", "corrections.masks.Band", "corrections.masks.Veto", "corrections.masks.OPSM"),
        *("corrections.masks.Divergence", "corrections.masks.Mask"),
    ),
    "training": (
        "Training and diagnosis",
        *("api.train", "diagnosis.pipeline.diagnose", "config.recipes.load_config", "evaluation.eval_result.pass_at_k"),
        "errors.TrimtabError",
    ),
}
"""Title and members of each page of the interface, by the modules that define them."""


def collect() -> None:
    """Writes all pages, replacing those of an earlier call."""
    shutil.rmtree(PAGES, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.py", "__pycache__", "figures")
    shutil.copytree(ROOT / "docs", PAGES / "docs", ignore=ignored)
    shutil.copytree(ROOT / "examples", PAGES / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for name in TOP:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, PAGES / name)
    results = measured((ROOT / "docs" / "results" / "presets.md").read_text(encoding="utf-8"))
    folder = PAGES / "docs" / "methods"
    folder.mkdir()
    for name in objectives():
        (folder / f"{name}.md").write_text(preset_page(name, results.get(name)), encoding="utf-8")
    (folder / "index.md").write_text(index_page(), encoding="utf-8")
    (PAGES / "docs" / "api").mkdir()
    for name, (title, *members) in API.items():
        directives = "\n\n".join(f"::: trimtab.{member}" for member in members)
        (PAGES / "docs" / "api" / f"{name}.md").write_text(f"# {title}\n\n{directives}\n", encoding="utf-8")


def measured(page: str) -> dict[str, list[tuple[str, str]]]:
    """Returns the columns of the table of all presets, by preset."""
    rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in page.splitlines() if line[:1] == "|"]
    head, _, *body = rows
    return {row[0].strip("`"): list(zip(head[1:], row[1:], strict=True)) for row in body if len(row) == len(head)}


def index_page() -> str:
    """Returns the page with a line for each preset."""
    lines = ["# Presets", "", "One objective, and its named points. What they share: [math](../math.md).", ""]
    lines += ["| preset | what it is |", "|---|---|"]
    lines += [f"| [`{name}`]({name}.md) | {preset.does} |" for name, preset in PRESETS.items()]
    return "\n".join(lines) + "\n"


def preset_page(name: str, result: list[tuple[str, str]] | None) -> str:
    """Returns the page of a preset: what it is, its equation, when to use it, its source, numbers and results."""
    preset = PRESETS[name]
    built = objective(name, **REQUIRED.get(name, {}))
    refused = [hook.trainer for hook in HOOKS.values() if _cannot(name, hook.refusal(built))]
    carried = "every trainer with an adapter" if not refused else f"the adapters but those of {', '.join(refused)}"
    keywords = keywords_of(name).items()
    lines = [f"# {name}", "", preset.does, "", "```text", built.equation(), "```", ""]
    lines += [f"**When.** {preset.when}", ""]
    lines += [f"**Source.** {preset.source} ([choices](../papers.md), [formulas](../math.md))", ""]
    lines += [f"**In other trainers.** Carried by {carried} ([adapters](../adapters.md)).", ""]
    if result is not None:
        head, values = zip(*result, strict=True)
        lines += ["**Measured** ([every preset](../results/presets.md)):", ""]
        lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head), f"| {' | '.join(values)} |", ""]
    lines += ["| keyword | default |", "|---|---|"]
    lines += [f"| `{key}` | {'required' if value is Parameter.empty else f'`{value}`'} |" for key, value in keywords]
    lines += ["", "```toml", "[objective]", f'name = "{name}"', *_required(name), "```", ""]
    return "\n".join(lines)


def _required(name: str) -> list[str]:
    return [f"{key} = {value}" for key, value in REQUIRED.get(name, {}).items()]


def _cannot(name: str, reason: str | None) -> bool:
    """Whether a reason is more than the choice of an aggregation."""
    return reason is not None and (name == "oapl" or not reason.startswith("its aggregation"))


if __name__ == "__main__":
    collect()
