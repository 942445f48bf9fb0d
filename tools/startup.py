"""Compares the processor time of each command's start between the working tree and another commit.

    python tools/startup.py BASE [--rounds 5]

Runs `trimtab COMMAND --help` and commands that only read the package, in both trees in alternation, and prints the
smallest time of each. Commands that only one of the trees has are named.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READING = ("--help", "--version", "recipes", "show quickstart", "explain icepop", "diagnose missing.parquet")


def start(tree: Path, command: str) -> tuple[float, str]:
    """Returns the seconds of processor time that a command took, and its output."""
    before = os.times()
    env = {**os.environ, "PYTHONPATH": str(tree / "src"), "COLUMNS": "120"}
    line = [sys.executable, "-m", "trimtab", *command.split()]
    output = subprocess.run(line, env=env, capture_output=True, text=True, check=False).stdout
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system, output


def commands(tree: Path) -> list[str]:
    """Returns the names of a tree's commands, as its help lists them."""
    return re.findall(r"^│ ([a-z][a-z-]*) ", start(tree, "--help")[1], re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", base, given.base], cwd=ROOT, check=True)
        try:
            before, now = commands(base), commands(ROOT)
            lines = [*READING, *(f"{name} --help" for name in now if name in before)]
            print(f"{'':28}   {'before':>8}   {'now':>8}")
            for line in lines:
                rounds = [(start(base, line)[0], start(ROOT, line)[0]) for _ in range(given.rounds)]
                first, second = (min(times) for times in zip(*rounds, strict=True))
                print(f"{line:28}   {first:6.2f} s   {second:6.2f} s   {second / first - 1:+.0%}", flush=True)
            print(f"only before: {sorted({*before} - {*now})}; only now: {sorted({*now} - {*before})}")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", base], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
