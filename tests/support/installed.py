"""Runs Python as if only what the core, or one of its extras, brings were installed."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Packages are hidden by the importer itself, so that `find_spec` does not see them either.
HIDE = """
import sys
from importlib.machinery import PathFinder
INSTALLED = frozenset({names!r}) | sys.stdlib_module_names | {{"trimtab", "__main__"}}
class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        return super().find_spec(name, path, target) if top in INSTALLED or top.startswith("_sysconfig") else None
sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
"""

OWN_TRAINER = """
import torch
torch.manual_seed(0)
c = torch.randn(4, 5).requires_grad_()
b, p, logp_train, logp_rollout = (-torch.rand(4, 5) for _ in range(4))
m = mask = torch.ones(4, 5, dtype=torch.bool)
rewards, groups = torch.tensor([0.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
{readme}
assert out.loss.isfinite() and c.grad.abs().sum() > 0 and "k3" in stats
"""


def requirements(extra: str | None = None) -> list[Requirement]:
    """What pyproject.toml asks for: the core, or what an extra adds; an extra of an extra is replaced by its own."""
    listed = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    found = [Requirement(line) for line in listed]
    nested = [name for requirement in found if requirement.name == "trimtab" for name in sorted(requirement.extras)]
    return [item for item in found if item.name != "trimtab"] + [item for name in nested for item in requirements(name)]


@cache
def import_names() -> dict[str, set[str]]:
    """Distribution -> the top-level modules it installs here."""
    names: dict[str, set[str]] = {}
    for module, distributions in importlib.metadata.packages_distributions().items():
        for distribution in distributions:
            names.setdefault(canonicalize_name(distribution), set()).add(module)
    return names


def closure(wanted: list[Requirement]) -> set[str]:
    """The distributions that pip installs for these, with the dependencies of dependencies, as installed here."""
    found: set[str] = set()
    todo = [(item.name, frozenset(item.extras)) for item in wanted]
    seen = set(todo)
    while todo:
        name, extras = todo.pop()
        found.add(canonicalize_name(name))
        for line in importlib.metadata.requires(name) or ():
            item = Requirement(line)
            key = (item.name, frozenset(item.extras))
            applies = item.marker is None or any(item.marker.evaluate({"extra": e}) for e in (extras or {""}))
            if applies and key not in seen:
                seen.add(key)
                todo.append(key)
    return found


def modules_of(requirement: Requirement) -> set[str]:
    """The modules that a package installs, or what it depends on where it has none; its name if it is not here."""
    name = canonicalize_name(requirement.name)
    try:
        return import_names().get(name) or {
            module for one in closure([requirement]) for module in import_names().get(one, ())
        }
    except importlib.metadata.PackageNotFoundError:
        return {name}


def run_installed(code: str, *extras: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that can import the core and these extras, and no other third-party package."""
    wanted = [*requirements(), *(item for extra in extras for item in requirements(extra))]
    modules = sorted({module for name in closure(wanted) for module in import_names().get(name, ())})
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", HIDE.format(names=modules) + code],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )


def own_trainer() -> str:
    """README's lines for an own trainer, with tensors for them to work on."""
    section = (ROOT / "README.md").read_text().partition("\n## In your own trainer\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"^```python\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)
    return OWN_TRAINER.format(readme=block)
