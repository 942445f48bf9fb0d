"""Generates docs/architecture.md from the sources: `python docs/architecture.py > docs/architecture.md`."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "trimtab"
HEAD = """# Architecture

Each line imports from lines below it only; a test holds the whole table of imports (`tests/test_architecture.py`).

```text
cli                          parses arguments, then imports what the command needs
api                          train() in one call
lab         cluster          controlled experiments | runs whose processes are Ray actors
training                     run, loop, updates, ranks, checkpoints
evaluation                   avg@n, pass@k, relay            report      pages about runs: one, several, an experiment
rollout     bitwise          prompts to scored groups        diagnosis   log-probs of any trainer: size, causes, remedy
engines     environments     embedded, vLLM, servers, another process | multi-turn episodes and tools
rewards     runs             verifiers | files of a run      adapters    objectives for other frameworks     planning
models      tasks  sandbox   networks, prompts, limits       objectives  losses as frozen parts     config     pages
types errors seeds plugins processes                         corrections intervals
```

Data flows down the first line; weights are the only way back:

    Task -> Prompt -> Engine -> Completion -> Reward -> Trajectory -> Group -> Batch -> Objective -> update
                        ^                                                                             |
                        `----------------------------- weights with a version -----------------------'

Log-probs of any trainer go to `diagnosis`, which reads files only and never a live trainer.

This page is generated from the sources (`python docs/architecture.py > docs/architecture.md`).
"""


def page() -> str:
    """The whole page: the packages, and every file with the first line of its docstring."""
    blocks = [HEAD, "## Files\n"]
    folders = sorted({file.parent for file in PACKAGE.rglob("*.py")}, key=lambda folder: folder.relative_to(PACKAGE))
    for folder in folders:
        files = [file for file in sorted(folder.glob("*.py")) if file.name != "__init__.py"]
        name = "src/trimtab/" if folder == PACKAGE else f"{folder.relative_to(PACKAGE)}/"
        rows = "\n".join(f"- `{file.name}`: {_first_line(file)}" for file in files)
        blocks.append(f"**`{name}`** {_first_line(folder / '__init__.py')}\n" + (f"\n{rows}\n" if rows else ""))
    return "\n".join(blocks)


def _first_line(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert text, f"{file} needs a docstring"
    return text.split("\n\n")[0].replace("\n", " ").rstrip(".")


if __name__ == "__main__":
    print(page(), end="")
