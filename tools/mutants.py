"""Plants small faults in the source, one at a time, and counts how many the unit tests catch.

    python tools/mutants.py [--count 100] [--seed 0] [--area corrections objectives ...]

A mutant changes one operator, comparison, constant or call (`min` for `max`) inside a function. It is caught if the
tests of its area fail or hang. Each one that survives is printed with file and line: either a test is missing, or
the change makes no difference. Sources are copied to a temporary folder; the working tree is not touched.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOSSES = ("tests/parity", "tests/contract/test_every_preset.py")
# Source folders and their tests.
AREAS = {
    "corrections": (["corrections"], ["tests/unit/corrections", *LOSSES]),
    "objectives": (["objectives"], ["tests/unit/objectives", *LOSSES]),
    "adapters": (
        ["adapters"],
        ["tests/unit/adapters", "tests/contract/test_adapters.py", "tests/parity/test_hooks.py"],
    ),
    "monitor": (["monitor"], ["tests/unit/monitor"]),
    "check_loss": (["check_loss"], ["tests/unit/check_loss"]),
    "diagnosis": (["diagnosis/measure", "diagnosis/causes", "diagnosis/advice"], ["tests/unit/diagnosis"]),
    "runs": (["runs"], ["tests/unit/runs"]),
    "guard": (["trainer/guard.py"], ["tests/unit/trainer/test_guard.py", "tests/unit/trainer/test_step_guard.py"]),
    "training": (["trainer", "runs"], ["tests/unit/trainer", "tests/unit/runs"]),
    "rollout": (["trainer/rollout", "trainer/engines"], ["tests/unit/trainer/rollout", "tests/unit/trainer/engines"]),
}
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin"}
TEST_TIMEOUT = 600.0  # seconds


@dataclass(frozen=True)
class Mutant:
    """One changed file: `line` shows the change, `source` is the new text of the file."""

    area: str
    file: Path
    line: str
    source: str


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="mutants over all areas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--area", nargs="+", choices=AREAS, default=list(AREAS), dest="areas")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    chosen: list[Mutant] = []
    for area in options.areas:
        candidates = list(mutants(area))
        chosen += rng.sample(candidates, min(len(candidates), options.count // len(options.areas)))
    start, caught = time.monotonic(), list[bool]()
    with ThreadPoolExecutor(options.processes) as pool:
        for mutant, is_found in zip(chosen, pool.map(is_caught, chosen), strict=True):
            caught.append(is_found)
            if not is_found:
                print(f"survived: {mutant.file.relative_to(ROOT)}: {mutant.line}", flush=True)
    for area in options.areas:
        results = [result for mutant, result in zip(chosen, caught, strict=True) if mutant.area == area]
        print(f"{area:12} {sum(results)} of {len(results)} caught")
    print(f"{sum(caught)} of {len(caught)} caught in {time.monotonic() - start:.0f} s")
    return 0


def mutants(area: str) -> Iterator[Mutant]:
    """Yields all mutants of an area, in a fixed order."""
    for place in (ROOT / "src" / "trimtab" / name for name in AREAS[area][0]):
        for file in sorted(place.rglob("*.py")) or [place]:
            tree = ast.parse(file.read_text())
            functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            # Every node once: a nested function is walked with each function around it.
            for node in {id(node): node for function in functions for node in ast.walk(function)}.values():
                yield from _changes(area, file, tree, node)


def _changes(area: str, file: Path, tree: ast.Module, node: ast.AST) -> Iterator[Mutant]:
    """Yields the mutants of one node; `tree` is changed for each and restored afterwards."""

    def mutant(line: int, change: str) -> Mutant:
        return Mutant(area, file, f"{line}: {change}", ast.unparse(tree))

    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS:
        unchanged = ast.unparse(node)
        node.op, original = OPERATORS[type(node.op)](), node.op  # pyright: ignore[reportAttributeAccessIssue]
        yield mutant(node.lineno, f"{unchanged} -> {ast.unparse(node)}")
        node.op = original  # pyright: ignore[reportAttributeAccessIssue]
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        unchanged, original = ast.unparse(node), node.ops[0]
        node.ops[0] = OPERATORS[type(original)]()  # pyright: ignore[reportArgumentType, reportCallIssue]
        yield mutant(node.lineno, f"{unchanged} -> {ast.unparse(node)}")
        node.ops[0] = original
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        original = node.value
        node.value = original + 1  # pyright: ignore[reportOperatorIssue]
        yield mutant(node.lineno, f"{original} -> {node.value}")
        node.value = original
    elif isinstance(node, ast.Call):
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if name in CALLS:
            part = "id" if isinstance(function, ast.Name) else "attr"
            unchanged = ast.unparse(node)
            setattr(function, part, CALLS[name])
            yield mutant(node.lineno, f"{unchanged} -> {ast.unparse(node)}")
            setattr(function, part, name)


def is_caught(mutant: Mutant) -> bool:
    """Whether the tests of its area fail or run out of time."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("*.egg-info"))
        (source / mutant.file.relative_to(ROOT / "src")).write_text(mutant.source)
        environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not e2e and not slow"]
        command += ["--hypothesis-profile", "many"]
        try:
            process = subprocess.run(
                [*command, *AREAS[mutant.area][1]],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                timeout=TEST_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True
        return process.returncode != 0


if __name__ == "__main__":
    sys.exit(main())
