"""Runs the tests under several roundings of one machine, and prints how far every numeric limit is from failing.

    python tests/roundings.py                                     # the whole suite under all of them
    python tests/roundings.py --roundings default mkl --threads 1 -- tests/e2e/test_methods.py
    python tests/roundings.py --report runs/roundings-...         # the summary once more

The processor determines which kernels run, and so the order of summation and the last bits of every product. Each
rounding makes the libraries choose the kernels of another processor. Arguments after `--` go to pytest. Laboratory
models are trained again under each rounding. The exit code is 1 if any test failed under any rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROUNDINGS = {
    "default": {},
    "onednn": {"ONEDNN_MAX_CPU_ISA": "AVX2"},  # bfloat16 products, and the head's
    # torch's own kernels: softmax, fused attention, reductions. Where the CPU has AMX, torch 2.13 packs bfloat16
    # attention for it, which its AVX2 kernels refuse ("pack_vnni2 is only supported when avx512 is supported").
    "aten": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "mkl": {"MKL_CBWR": "COMPATIBLE"},  # float32 and float64 products, exp and log
    # All three at their lowest.
    "scalar": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
}
USUAL = ["default", "onednn", "aten", "mkl"]
# The options of the Makefile: two processes, the tests of a file in one of them.
PYTEST = ["-q", "-n", "2", "--dist", "loadfile"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run of the tests; `failed` holds their names."""

    passed: int
    failed: list[str]
    skipped: int
    seconds: float
    code: int

    @property
    def bad(self) -> bool:
        """Whether a test failed, or pytest itself did, or ran nothing."""
        return bool(self.failed) or self.code != 0


def main() -> int:
    """Runs the tests, prints the report and returns the exit code."""
    options, words = _options()
    if options.fingerprint:
        print(json.dumps(fingerprint()))
        return 0
    if options.report is not None:
        print(summary(options.report, options.below))
        return 0
    out: Path = options.out or ROOT / "runs" / time.strftime("roundings-%Y%m%d-%H%M%S")
    out.mkdir(parents=True)
    cases = [(name, threads) for name in options.roundings for threads in options.threads]
    print(bits(cases), flush=True)
    outcomes = {}
    for case in cases:
        outcomes[case] = run(*case, out, words or ["-m", "not slow"])
        print(_line(case, outcomes[case]), flush=True)
    (out / "margins.txt").write_text(summary(out, math.inf) + "\n")
    print("\n" + summary(out, options.below), end="\n\n")
    print(f"{'rounding':10} threads  passed  failed  skipped  seconds")
    print("\n".join(_line(case, outcome) for case, outcome in outcomes.items()))
    for (name, threads), outcome in outcomes.items():
        for test in outcome.failed:
            print(f"FAILED {name}, threads {threads}: {test}")
    print(f"logs and all margins: {out}")
    return int(any(outcome.bad for outcome in outcomes.values()))


def _options() -> tuple[argparse.Namespace, list[str]]:
    arguments, words = sys.argv[1:], []
    if "--" in arguments:
        separator = arguments.index("--")
        arguments, words = arguments[:separator], arguments[separator + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--roundings", nargs="+", choices=ROUNDINGS, default=USUAL, metavar="NAME")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--out", type=Path, help="a new folder for logs and margins (default: under runs/)")
    parser.add_argument("--below", type=float, default=10, help="list limits whose margin is below this factor")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="summarize what an earlier run wrote")
    parser.add_argument("--fingerprint", action="store_true", help="print digests of a few products, run nothing")
    return parser.parse_args(arguments), words


def _line(case: tuple[str, int], outcome: Outcome) -> str:
    counts = f"{outcome.passed:7d} {len(outcome.failed):7d} {outcome.skipped:8d} {outcome.seconds:8.0f}"
    broken = f"   pytest ended with {outcome.code}" if outcome.code not in (0, 1) else ""
    return f"{case[0]:10} {case[1]:7d} {counts}{broken}"


# Running


def _environment(name: str, threads: int) -> dict[str, str]:
    varied = {key for settings in ROUNDINGS.values() for key in settings}
    clean = {key: value for key, value in os.environ.items() if key not in varied}
    return clean | ROUNDINGS[name] | {"OMP_NUM_THREADS": str(threads)}


def run(name: str, threads: int, out: Path, words: list[str]) -> Outcome:
    """Runs pytest once; log, margins and results are written to a folder below `out`."""
    folder = out / f"{name}-{threads}"
    (folder / "margins").mkdir(parents=True)
    folders = {"TRIMTAB_CACHE": str(folder / "cache"), "TRIMTAB_MARGINS": str(folder / "margins")}
    command = [sys.executable, "-m", "pytest", *PYTEST, "-p", "tests.margins"]
    start = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        process = subprocess.run(
            [*command, f"--junit-xml={folder / 'results.xml'}", *words],
            cwd=ROOT,
            env=_environment(name, threads) | folders,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    seconds = time.monotonic() - start
    shutil.rmtree(folder / "cache", ignore_errors=True)
    passed, failed, skipped = _results(folder / "results.xml")
    return Outcome(passed, failed, skipped, seconds, process.returncode)


def _results(file: Path) -> tuple[int, list[str], int]:
    if not file.exists():
        return 0, [], 0
    passed, failed, skipped = 0, [], 0
    for case in ElementTree.parse(file).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


# What a rounding changes


def fingerprint() -> dict[str, str]:
    """Returns digests of the results of a few operations under the settings of this process."""
    import torch
    from torch.nn.functional import linear, scaled_dot_product_attention

    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(256, 576, generator=generator), torch.randn(640, 576, generator=generator)
    x, q = torch.randn(64, 1000, generator=generator), torch.randn(1, 4, 32, 16, generator=generator)
    results = {
        "bf16 product": linear(a.bfloat16(), b.bfloat16()),
        "bf16 small": linear(a[:7, :64].bfloat16(), b[:, :64].bfloat16()),
        "f32 product": linear(a, b),
        "f32 small": linear(a[:7, :64], b[:, :64]),
        "f64 product": linear(a.double(), b.double()),
        "softmax": x.softmax(-1),
        "logsumexp": x.logsumexp(-1),
        "sum": x.sum(-1),
        "exp": x.exp(),
        "attention": scaled_dot_product_attention(q, q, q, is_causal=True),
    }
    raw = {name: value.contiguous().view(torch.uint8).numpy().tobytes() for name, value in results.items()}
    return {name: hashlib.sha256(value).hexdigest()[:6] for name, value in raw.items()}


def bits(cases: Iterable[tuple[str, int]]) -> str:
    """Returns a table of fingerprints, with a dot where a rounding gives the bits of the first one."""
    fingerprints = {}
    for name, threads in cases:
        process = subprocess.run(
            [sys.executable, __file__, "--fingerprint"],
            env=_environment(name, threads),
            capture_output=True,
            text=True,
            check=True,
        )
        fingerprints[name, threads] = json.loads(process.stdout)
    first = next(iter(fingerprints.values()))
    lines = ["Bits of a few products (. = those of the first row)", " " * 12 + " ".join(f"{key:>12}" for key in first)]
    for (name, threads), digests in fingerprints.items():
        same = [value if digests is first or value != first[key] else "." for key, value in digests.items()]
        lines.append(f"{name:10} {threads} " + " ".join(f"{value:>12}" for value in same))
    return "\n".join(lines)


# Margins


@dataclass(frozen=True, slots=True)
class Limit:
    """One comparison of the tests over all roundings: its worst case, and the spread of that one over roundings."""

    where: str
    text: str
    tests: int
    measured: float
    limit: float
    slack: float
    margin: float | None
    spread: float

    @property
    def clearance(self) -> float:
        """The number of spreads between the worst case and the limit."""
        return self.slack / self.spread if self.spread else math.inf


def limits(out: Path) -> list[Limit]:
    """Returns all recorded comparisons, smallest margin first."""
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(out.glob("*/margins/*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            groups[row["where"], row["text"]][row["test"]].append(row)
    result = [_limit(where, text, tests) for (where, text), tests in groups.items()]
    return sorted(result, key=lambda item: (math.inf if item.margin is None else item.margin, item.clearance))


def _limit(where: str, text: str, tests: dict[str, list[dict[str, Any]]]) -> Limit:
    """Returns the comparison of the test that comes nearest to its limit, of all that share the line."""
    nearest = min(tests.values(), key=lambda rows: min(_sort_key(row) for row in rows))
    row = min(nearest, key=_sort_key)
    spread = max(max(row["measured"] for row in rows) - min(row["measured"] for row in rows) for rows in tests.values())
    return Limit(where, text, len(tests), row["measured"], row["limit"], row["slack"], _margin(row), spread)


def _margin(row: dict[str, Any]) -> float | None:
    """Returns the factor between the measured number and its limit; None if signs differ or the limit is 0."""
    measured, limit = row["measured"], row["limit"]
    small, large = sorted((abs(measured), abs(limit)))
    if math.isnan(row["slack"]) or not limit or (measured and (measured > 0) != (limit > 0)):
        return None
    return large / small if small else math.inf


def _sort_key(row: dict[str, Any]) -> tuple[float, float]:
    margin = _margin(row)
    return (math.inf if margin is None else margin, row["slack"])


def summary(out: Path, below: float) -> str:
    """Returns the limits that a rounding moves, smallest margin first, and the number of those that do not move.

    Margin: the remaining factor. Clearance: the remaining distance in spreads (of one test over the roundings). A
    number past its limit is expected by the test (`not allclose`), or a failure.
    """
    compared = limits(out)
    moving = [item for item in compared if item.spread > 0]
    listed = [item for item in moving if item.margin is None or item.margin < below]
    head = f"{len(compared)} limits compared; {len(moving)} of them moved with the rounding (or from run to run); "
    lines = [head + f"{len(listed)} of those have a margin below {below:g} or none that is a factor:"]
    lines.append(f"{'margin':>8} {'clearance':>10} {'measured':>11} {'limit':>11} {'spread':>9}  where")
    for item in listed:
        margin = "-" if item.margin is None else f"{item.margin:.3g}"
        numbers = f"{item.measured:11.4g} {item.limit:11.4g} {item.spread:9.2g}"
        lines.append(f"{margin:>8} {item.clearance:10.3g} {numbers}  {item.where} {item.text} ({item.tests})")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
