"""Compares what two commits compute, bit for bit: for changes that must not change any number.

    python tools/golden.py BASE            # the working tree against the commit BASE
    python tools/golden.py BASE --only soup diagnose

Both trees run the same commands in separate processes, on this machine and with one thread, because equal bits are
promised only there. A training run is compared by its metrics without times, its trajectories, its last checkpoint and
its recipe; a command by its output. The differences are printed, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
SMALL = (
    "trainer.prompts=4 trainer.samples=4 trainer.minibatches=2 trainer.steps=4 eval.problems=8 eval.every=2 "
    "checkpoint.every=2 checkpoint.keep=9 log.trajectories_every=1"
)
BFLOAT16 = "engine.dtype=bfloat16 model.autocast=bfloat16"
# Recipe and overrides.
RUNS = {
    "token-tis": f"laboratory {BFLOAT16}",
    "calibrated": f"laboratory {BFLOAT16} objective.name=icepop objective.calibrate=true",
    "dapo": "laboratory objective.name=dapo trainer.dynamic_sampling=true trainer.epochs=2",
    "grpo": "laboratory objective.name=grpo objective.kl=unbiased objective.kl_coef=0.01 sampling.top_p=0.9",
    "token-alp": "token-alp base=laboratory",
    "soup": "soup base=laboratory prefix.refresh=2",
    "oapl": "oapl base=laboratory trainer.sync_every=3",
    "seq-mis-seq-ratio": "laboratory objective.name=seq-mis-seq-ratio engine.quantize=int8",
    "invariant": f"laboratory {BFLOAT16} numerics=invariant",
    "routing": "laboratory model.path=laboratory-moe routing.replay=rollout",
    "worker": "laboratory objective.name=icepop engine.workers=1 trainer.max_lag=0",
}
TRAJECTORIES = "runs/token-tis/trajectories/step-000002.parquet"
COMMANDS = {
    "recipes": "trimtab recipes --json",
    "keys": "trimtab recipes --keys",
    "diagnose": f"trimtab diagnose {TRAJECTORIES} --json --out diagnosis.html",
    "diagnose-run": "trimtab diagnose runs/token-tis --json --out diagnosis-run.html",
    "report": "trimtab report runs/token-tis --json",
    "compared": "trimtab report runs/token-tis runs/dapo --json",
}
# Files of a checkpoint with the state of unseeded generators, on which no result depends.
UNSEEDED = ("random", "meta", "manifest")
TIMED = re.compile(r"time/|tokens_per_second/|memory/|seconds")


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(base), options.base], check=True)
        try:
            with ThreadPoolExecutor(2) as pool:
                trees = (base, ROOT)
                base_results, tree_results = pool.map(lambda tree: compute(tree, Path(folder), options.only), trees)
        finally:
            subprocess.run([*git, "remove", "--force", str(base)], check=True)
    differing = list(differences(base_results, tree_results))
    print("\n".join(differing) or f"equal: {len(base_results)} results, bit for bit")
    return int(bool(differing))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--only", nargs="+", help="names of runs and commands (default: all)")
    return parser.parse_args()


def compute(tree: Path, folder: Path, only: list[str] | None) -> dict[str, Any]:
    """Returns the results of a tree by name. Both trees use folders of one name, so that paths in them are equal."""
    work = folder / f"work-{tree.name}" / "work"
    work.mkdir(parents=True)
    results: dict[str, Any] = {}
    for name, recipe in RUNS.items():
        if only is None or name in only or name == "token-tis":
            run(tree, work, f"trimtab train {arguments(recipe)} --out runs/{name}")
            results |= {f"{name}: {item}": value for item, value in contents(work / "runs" / name).items()}
    for name, command in COMMANDS.items():
        if only is None or name in only:
            results[name] = untimed(run(tree, work, command).replace(str(work), ""))
    return results


def arguments(run: str) -> str:
    """Returns the arguments of `trimtab train` for a recipe and its overrides."""
    recipe, *changes = [*run.split(), *SMALL.split()]
    return " ".join([recipe, *(f"--set {shlex.quote(change)}" for change in changes)])


def run(tree: Path, work: Path, command: str) -> str:
    """Returns the output of a command, run with the modules of `tree` wherever trimtab is installed."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=work,
        env=environment | {"COLUMNS": "120", "TRIMTAB_CACHE": str(work.parent / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise SystemExit(f"{tree}: {command}\n{process.stderr[-2000:]}")
    return process.stdout


def contents(path: Path) -> dict[str, Any]:
    """Returns what is compared of a run directory, by name."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    results: dict[str, Any] = {
        f"metrics of step {row['step']}": {key: value for key, value in row.items() if not TIMED.match(key)}
        for row in rows
    }
    results["config.toml"] = (path / "config.toml").read_text().replace(str(path.parents[1]), "")
    for file in sorted((path / "trajectories").glob("*.parquet")):
        table = pq.read_table(file)
        results[file.name] = {name: digest(str(table[name].to_pylist()).encode()) for name in table.column_names}
    last = max((path / "checkpoints").glob("step-*"))
    for file in sorted(item for item in last.rglob("*") if item.is_file() and not item.name.startswith(UNSEEDED)):
        results[f"{last.name}/{file.relative_to(last)}"] = digest(file.read_bytes())
    results["meta.json"] = json.loads((last / "meta.json").read_text()) | {"random": ""}
    return results


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def untimed(text: str) -> Any:
    """Returns parsed JSON without times and dates; other text is returned unchanged."""
    try:
        return _clean(json.loads(text))
    except ValueError:
        return text


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        ignored = ("started", "ended", "provenance", "commit")
        return {key: _clean(one) for key, one in value.items() if not TIMED.search(key) and key not in ignored}
    return [_clean(one) for one in value] if isinstance(value, list) else value


def differences(base: dict[str, Any], tree: dict[str, Any]) -> Iterator[str]:
    for name in sorted(base.keys() | tree.keys()):
        one, other = base.get(name), tree.get(name)
        if one == other:
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            keys = [key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)]
            examples = [f"{key} ({str(one.get(key))[:40]} -> {str(other.get(key))[:40]})" for key in keys[:4]]
            yield f"{name}: {len(keys)} of {len(one)} differ: {', '.join(examples)}"
        else:
            yield f"{name}: {str(one)[:80]!r} -> {str(other)[:80]!r}"


if __name__ == "__main__":
    sys.exit(main())
