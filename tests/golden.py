"""Compare what two commits compute, bit for bit: for changes that must not change any number.

    python tests/golden.py BASE            # the working tree against the commit BASE
    python tests/golden.py BASE --only soup diagnose

Both trees run the same commands, in processes of their own, on this machine and with one thread: that is where bits are
promised. Of a training run its metrics without times, its trajectories, its last checkpoint and its recipe are
compared, of a command what it prints. Exit code 1 names what differs.
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
    "seq-mis": "laboratory objective.name=seq-mis engine.quantize=int8",
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
    "plan": "trimtab plan --model qwen2.5-7b --gpus 8 --json",
}
# Files of a checkpoint with the state of generators that nothing seeds, as no number depends on them.
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
                trees = {"base": base, "here": ROOT}
                made = {name: pool.submit(make, tree, Path(folder), options.only) for name, tree in trees.items()}
                results = {name: future.result() for name, future in made.items()}
        finally:
            subprocess.run([*git, "remove", "--force", str(base)], check=True)
    differing = list(differences(results["base"], results["here"]))
    print("\n".join(differing) or f"equal: {len(results['base'])} things, bit for bit")
    return int(bool(differing))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--only", nargs="+", help="names of runs and commands (default: all)")
    return parser.parse_args()


def make(tree: Path, folder: Path, only: list[str] | None) -> dict[str, Any]:
    """What a tree computes, by name. Both trees work in folders of one name, so that no path makes a difference."""
    work = folder / f"work-{tree.name}" / "it"
    work.mkdir(parents=True)
    made: dict[str, Any] = {}
    for name, words in RUNS.items():
        if only is None or name in only or name == "token-tis":
            run(tree, work, f"trimtab train {sets(words)} --out runs/{name}")
            made |= {f"{name}: {what}": value for what, value in contents(work / "runs" / name).items()}
    for name, command in COMMANDS.items():
        if only is None or name in only:
            made[name] = untimed(run(tree, work, command).replace(str(work), ""))
    return made


def sets(words: str) -> str:
    recipe, *changes = [*words.split(), *SMALL.split()]
    return " ".join([recipe, *(f"--set {shlex.quote(change)}" for change in changes)])


def run(tree: Path, work: Path, command: str) -> str:
    """What a command prints. Its modules are the tree's, wherever trimtab is installed."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=work,
        env=environment | {"COLUMNS": "120", "TRIMTAB_CACHE": str(work.parent / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{tree}: {command}\n{done.stderr[-2000:]}")
    return done.stdout


def contents(path: Path) -> dict[str, Any]:
    """Of a run directory, by what it is."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {
        f"metrics of step {row['step']}": {key: value for key, value in row.items() if not TIMED.match(key)}
        for row in rows
    }
    found["config.toml"] = (path / "config.toml").read_text().replace(str(path.parents[1]), "")
    for file in sorted((path / "trajectories").glob("*.parquet")):
        table = pq.read_table(file)
        found[file.name] = {name: digest(str(table[name].to_pylist()).encode()) for name in table.column_names}
    last = max((path / "checkpoints").glob("step-*"))
    for file in sorted(item for item in last.rglob("*") if item.is_file() and not item.name.startswith(UNSEEDED)):
        found[f"{last.name}/{file.relative_to(last)}"] = digest(file.read_bytes())
    found["meta.json"] = json.loads((last / "meta.json").read_text()) | {"random": ""}
    return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def untimed(text: str) -> Any:
    """JSON without times and dates; other text as it is."""
    try:
        return _clean(json.loads(text))
    except ValueError:
        return text


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        moments = ("started", "ended", "provenance", "commit", "origins")
        return {key: _clean(one) for key, one in value.items() if not TIMED.search(key) and key not in moments}
    return [_clean(one) for one in value] if isinstance(value, list) else value


def differences(base: dict[str, Any], here: dict[str, Any]) -> Iterator[str]:
    for name in sorted(base.keys() | here.keys()):
        one, other = base.get(name), here.get(name)
        if one == other:
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            keys = [key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)]
            shown = [f"{key} ({str(one.get(key))[:40]} -> {str(other.get(key))[:40]})" for key in keys[:4]]
            yield f"{name}: {len(keys)} of {len(one)} differ: {', '.join(shown)}"
        else:
            yield f"{name}: {str(one)[:80]!r} -> {str(other)[:80]!r}"


if __name__ == "__main__":
    sys.exit(main())
