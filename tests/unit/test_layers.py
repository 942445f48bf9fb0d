"""Data flows one way: each room imports only what its row of the table allows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import trimtab

ROOT = Path(trimtab.__file__).parent
LEAVES = {"types", "errors", "config"}

# room -> rooms it may import (besides itself). `config` is a leaf too, but only where recipes are resolved.
ALLOWED = {
    "config": {"errors"},
    "corrections": set(),
    "objectives": {"corrections", "errors", "plugins"},
    "models": {"types", "errors"},
    "tasks": {"types", "errors"},
    "rewards": {"types", "errors", "plugins"},
    "rollout": {"models", "tasks", "plugins", *LEAVES},
    "evaluation": {"models", "tasks", "rewards", "rollout", "types", "errors"},
    "training": {"corrections", "objectives", "models", "tasks", "rewards", "rollout", "evaluation", *LEAVES},
    "diagnostics": {"corrections", "objectives", *LEAVES},
    "planning": {"config", "errors"},
    "placement": {"models", "tasks", "rewards", "rollout", "training", *LEAVES},
    "lab": {"corrections", "objectives", "models", "tasks", "rewards", "rollout", "evaluation", "training", *LEAVES},
}
HEAVY = {"torch", "transformers", "datasets", "matplotlib", "pyarrow", "numpy"}


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Dotted names a file imports, `if TYPE_CHECKING` blocks included: a type is a dependency as well."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "trimtab" else {module}
    return found


def room_files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_room_imports_only_what_its_row_allows(room: str) -> None:
    files = room_files(room)
    assert files
    for path in files:
        used = {name.split(".")[1] for name in imports(path) if name.startswith("trimtab.")}
        assert used <= ALLOWED[room] | {room}, (
            f"{path.relative_to(ROOT)} imports {sorted(used - ALLOWED[room] - {room})}"
        )


def test_every_room_is_listed() -> None:
    rooms = {item.name for item in ROOT.iterdir() if (item / "__init__.py").exists()}
    assert rooms == set(ALLOWED) | {"cli", "integrations"} & rooms | {"cli"}


def test_corrections_import_torch_and_jaxtyping_only() -> None:
    import sys

    for path in room_files("corrections"):
        outside = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"trimtab"}
        assert outside <= {"torch", "jaxtyping"}, path


def test_command_line_and_recipes_start_without_heavy_imports() -> None:
    light = [path for room in ("cli", "config", "planning") for path in room_files(room)]
    for path in [*light, ROOT / "errors.py", ROOT / "__init__.py"]:
        heavy = {name.split(".")[0] for name in imports(path, top_level_only=True)} & HEAVY
        assert not heavy, f"{path.relative_to(ROOT)} imports {sorted(heavy)} at the top"


def test_no_file_and_no_function_outgrows_its_limit() -> None:
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 400, f"{path.relative_to(ROOT)} has more than 400 lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= 65, f"{path.relative_to(ROOT)}: {node.name} has {length} lines"
