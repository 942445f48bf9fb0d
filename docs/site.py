"""Collects the pages of the documentation site in build/pages, where `mkdocs build` finds them (`make docs`).

README, CONTRIBUTING, CHANGELOG, docs/, examples/ and benchmarks/README keep their places, so that their links are valid
both on the site and in the repository. Written here are the pages that follow from the code alone: metrics, known
faults, scalars, keys of recipes, code and accuracy of each preset, what each adapter carries, thresholds of the
diagnosis, and the Python interface.
"""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff", "LICENSE", "benchmarks/README.md")
BUILT = {
    "src/trimtab/runs/metrics.toml": "metrics",
    "src/trimtab/diagnosis/known_faults.toml": "known_faults",
    "src/trimtab/monitor/scalars.csv": "scalars",
}
"""Tables that pages in the repository link, and the script in docs/ that writes the page of each."""

API = {
    "objectives": (
        "Objectives",
        *("objectives.lookup.objective", "objectives.lookup.objectives", "objectives.objective.Objective"),
        *("objectives.objective.Output", "corrections.policy_logps.PolicyLogps", "objectives.ratio.Ratio"),
        *("objectives.state.State", "objectives.advantages.advantages", "objectives.state.Metrics"),
    ),
    "corrections": (
        "Corrections",
        *("objectives.correct.correct", "objectives.correct.mismatch", "objectives.correct.Correction"),
        *("corrections.weights.Weight", "corrections.masks.Band", "corrections.masks.Veto", "corrections.masks.OPSM"),
        *("corrections.masks.Divergence", "corrections.masks.Mask"),
    ),
    "training": (
        "Training and diagnosis",
        *(
            "api.train",
            "diagnosis.pipeline.diagnose",
            "trainer.config.recipes.load_config",
            "trainer.evaluation.eval_results.pass_at_k",
        ),
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
            (PAGES / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, PAGES / name)
    for page in PAGES.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for table, name in BUILT.items():
            text = text.replace(f"{table})", f"docs/{page_of(name)})")
        page.write_text(text, encoding="utf-8")
    docs = PAGES / "docs"
    for name in BUILT.values():
        (docs / page_of(name)).write_text(generator(name)["markdown"](), encoding="utf-8")
    for name, change, paths in (("methods", "with_code", "methods.md"), ("choosing", "with_data", "results/*.md")):
        changed = generator(name)[change]
        for page in docs.glob(paths):
            page.write_text(changed(page.read_text(encoding="utf-8")), encoding="utf-8")
    (docs / "recipes.md").write_text(generator("recipes")["markdown"](), encoding="utf-8")
    for name in ("adapters", "detection"):
        with (docs / f"reference-{name}.md").open("a", encoding="utf-8") as file:
            file.write(f"\n{generator(name)['markdown']()}\n")
    (docs / "api").mkdir()
    for name, (title, *members) in API.items():
        directives = "\n\n".join(f"::: trimtab.{member}" for member in members)
        (docs / "api" / f"{name}.md").write_text(f"# {title}\n\n{directives}\n", encoding="utf-8")


def page_of(script: str) -> str:
    return f"{script.replace('_', '-')}.md"


def generator(name: str) -> dict[str, Any]:
    """The functions of a script in docs/."""
    return runpy.run_path(str(ROOT / "docs" / f"{name}.py"))


if __name__ == "__main__":
    collect()
