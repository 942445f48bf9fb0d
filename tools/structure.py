"""Print what a reader of the repository meets: sizes, packages, words, import cycles, and how many files a call walks.

    python tools/structure.py
    python tools/structure.py --walks    # with real calls on the laboratory model, a minute

A walk counts the files of the package in which at least one function ran during a call, and their packages.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "trimtab"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--walks", action="store_true", help="also count the files that calls walk")
    options = parser.parse_args()
    files = sorted(PACKAGE.rglob("*.py"))
    longest = max(files, key=lines)
    doors = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    modules = sorted(path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__"))
    show("src", f"{sum(map(lines, files)):,} lines in {len(files)} files")
    show("packages in trimtab", f"{len(doors)}: {', '.join(doors)}")
    show("modules in trimtab", f"{len(modules)}: {', '.join(modules)}")
    for folder in ("tests", "benchmarks"):
        show(folder, f"{sum(map(lines, (ROOT / folder).rglob('*.py'))):,} lines")
    docs = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/results/*.md")]
    show("README, CONTRIBUTING, docs", f"{sum(map(words, docs)):,} words in {len(docs)} pages")
    show("CHANGELOG", f"{words(ROOT / 'CHANGELOG.md'):,} words")
    show("longest file", f"{lines(longest)} lines, {longest.relative_to(PACKAGE)}")
    for name, graph in (("at the top", imports(files, top_level)), ("in functions too", imports(files, ast.walk))):
        circles = cycles(graph)
        show(f"import cycles, {name}", str(len(circles)))
        for circle in circles:
            show("", f"{len(circle)} modules: {' '.join(circle)}")
    for name, walked in walks().items() if options.walks else ():
        show(f"walk of {name}", f"{len(walked)} files in {len({file.parent for file in walked})} packages")


def show(name: str, text: str) -> None:
    print(f"{name:<32}{text}")


def lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def words(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").split())


def module(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(files: list[Path], nodes: Callable[[ast.AST], Iterator[ast.AST]]) -> dict[str, set[str]]:
    """Modules that each module imports, for type checking too; a package's `__init__` counts only where something is
    taken from it that is no module of its own."""
    known = {module(file) for file in files}
    result: dict[str, set[str]] = {}
    for file in files:
        name, needed = module(file), set[str]()
        for node in nodes(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                needed |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                below = {f"{node.module}.{alias.name}" for alias in node.names}
                needed |= (below & known) or {node.module}
        result[name] = (needed & known) - {name}
    return result


def top_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what is not inside a function: it runs while the module is loaded."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from top_level(child)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns groups of modules of which each reaches every other."""
    reached = {name: {name} for name in graph}
    changed = True
    while changed:
        changed = False
        for name, others in graph.items():
            before = len(reached[name])
            reached[name].update(*(reached[other] for other in others))
            changed |= len(reached[name]) > before
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def walks() -> dict[str, set[Path]]:
    """Returns the files that three calls go through: a loss, a diagnosis of a run, and a check of a pair of engines."""
    import trimtab
    from trimtab.cli.main import run

    silent = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(silent),
        contextlib.redirect_stderr(silent),
    ):
        overrides = ["trainer.steps=1", "log.trajectories_every=1", "eval.problems=8"]
        trained = trimtab.train("laboratory", overrides=overrides, out=f"{folder}/run", progress=False).run
        return {
            'objective("icepop")': walk(lambda: trimtab.objective("icepop")),
            "diagnose": walk(lambda: trimtab.diagnose(trained)),
            "preflight": walk(lambda: run(["preflight", "laboratory", "--lengths", "16"])),
        }


def walk(call: Callable[[], Any]) -> set[Path]:
    """Returns the files of the package in which a function ran during a call, on any thread of this process."""
    seen: set[str] = set()

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # bodies of modules and classes are not
            seen.add(frame.f_code.co_filename)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return {path for path in map(Path, seen) if path.is_relative_to(PACKAGE)}


if __name__ == "__main__":
    main()
