"""Print what a reader of the code base meets: sizes, import cycles, repeated names.

python tools/structure.py
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "trimtab"


def main() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    lines = {file: len(file.read_text().splitlines()) for file in files}
    names = Counter(file.name for file in files if file.name != "__init__.py")
    flat = Counter(file.parent for file in files)
    longest, function = max(files, key=lambda file: lines[file]), max(functions(files))
    largest, count = flat.most_common(1)[0]
    circles = cycles(imports(files))
    repeated = sorted(name for name, times in names.items() if times > 1)
    readme = (ROOT / "README.md").read_text()
    print(f"files                  {len(files)}")
    print(f"lines                  {sum(lines.values()):,}")
    print(f"longest file           {lines[longest]} lines, {longest.relative_to(PACKAGE)}")
    print(f"longest function       {function[0]} lines, {function[1]}")
    print(f"largest package        {count} files, {largest.relative_to(PACKAGE.parent)}")
    print(f"names used repeatedly  {len(repeated)}: {', '.join(repeated)}")
    print(f"import cycles          {len(circles)}")
    for circle in circles:
        print(f"                       {' '.join(circle)}")
    print(f"README                 {len(readme):,} characters")


def functions(files: list[Path]) -> Iterator[tuple[int, str]]:
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield node.end_lineno - node.lineno + 1, f"{file.relative_to(PACKAGE)}: {node.name}"


def module(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(files: list[Path]) -> dict[str, set[str]]:
    """Modules that each module imports while it is loaded, or for type checking; imports inside functions do not count.

    A package's `__init__` counts only where something is taken from it that is no module of its own.
    """
    modules = {module(file) for file in files}
    result: dict[str, set[str]] = {}
    for file in files:
        name, needed = module(file), set[str]()
        for node in outside_functions(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                needed |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                below = {f"{node.module}.{alias.name}" for alias in node.names}
                needed |= (below & modules) or {node.module}
        result[name] = (needed & modules) - {name}
    return result


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from outside_functions(child)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules of which each reaches every other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    result: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                result.append(sorted(group))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return result


if __name__ == "__main__":
    main()
