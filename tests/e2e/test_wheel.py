"""The built wheel in an environment of its own: what it brings, how it starts, and what it says is missing.

The environment is new and has pip alone. torch and its own dependencies are not downloaded: they are links to the
files of this environment, dist-info included, so that pip finds them there. Everything else (numpy, jaxtyping and what
that needs) is installed by pip from its index.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from tests.support.installed import ROOT, closure, own_trainer, requirements

import trimtab

pytestmark = pytest.mark.slow

PACKAGES = 12  # at most, besides torch and its own dependencies
SECONDS = 0.3  # at most, of `import trimtab`


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and the wheel itself."""

    folder: Path
    wheel: Path
    of_torch: frozenset[str]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment outside the repository, with nothing of this environment on its path."""
        program = [str(self.folder / "bin" / command[0]), *command[1:]]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return run(program, cwd=self.folder, environment={**kept, "OMP_NUM_THREADS": "1"})


def run(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=environment, check=False, capture_output=True, text=True, timeout=400)


def link(distributions: frozenset[str], folder: Path) -> None:
    """Links every top-level file and folder of these distributions into a folder."""
    folder.mkdir()
    for name in distributions:
        found = importlib.metadata.distribution(name)
        for top in {path.parts[0] for path in found.files or () if path.parts[0] not in ("..", "__pycache__")}:
            (folder / top).symlink_to(Path(str(found.locate_file(top))))


def build(source: Path, target: Path) -> Path:
    """Builds sdist and wheel as `make wheel` does, from a copy: setuptools writes beside what it packs."""
    source.mkdir()
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done = run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(source)], source)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [wheel], [_sdist] = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Installs the wheel into a new environment."""
    made = tmp_path_factory.mktemp("wheel")
    wheel, folder = build(made / "source", made / "dist"), made / "venv"
    done = run([sys.executable, "-m", "venv", str(folder)], made)
    assert done.returncode == 0, done.stderr
    of_torch = frozenset(closure([item for item in requirements() if item.name == "torch"]))
    link(of_torch, folder / "of-torch")
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "of-torch.pth").write_text(f"{folder / 'of-torch'}\n")
    environment = Installed(folder, wheel, of_torch)
    pinned = ["--constraint", str(ROOT / "constraints.txt")]
    done = environment.run("python", "-m", "pip", "install", "--quiet", *pinned, str(wheel))
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip(f"pip cannot download numpy and jaxtyping: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-2000:]
    return environment


def test_the_wheel_brings_few_packages(installed: Installed) -> None:
    done = installed.run("python", "-m", "pip", "list", "--format", "json")
    names = {canonicalize_name(item["name"]) for item in json.loads(done.stdout)}
    brought = names - installed.of_torch - {"pip", "setuptools"}
    size = installed.wheel.stat().st_size
    print(f"{len(brought)} packages besides torch's own: {', '.join(sorted(brought))}; wheel {size / 1e6:.2f} MB")
    assert "trimtab" in brought
    assert len(brought) <= PACKAGES
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    stated = re.search(r"\| the wheel \| ([\d.]+) MB \|", page)
    assert stated is not None
    assert float(stated[1]) == pytest.approx(size / 1e6, abs=0.1)


def test_the_wheel_starts_fast(installed: Installed) -> None:
    code = "import time; start = time.perf_counter(); import trimtab; print(time.perf_counter() - start)"
    seconds = min(float(installed.run("python", "-c", code).stdout) for _ in range(5))
    print(f"import trimtab: {seconds:.3f} s")
    assert seconds <= SECONDS


def test_the_readme_runs_with_the_wheel_alone(installed: Installed) -> None:
    where = f"import trimtab; assert trimtab.__file__.startswith({str(installed.folder)!r})\n"
    done = installed.run("python", "-c", where + own_trainer())
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_wheel_has_every_file_of_the_package_and_no_other(installed: Installed) -> None:
    package = Path(trimtab.__file__).parent
    there = {str(path.relative_to(package.parent)) for path in package.rglob("*") if path.is_file()}
    packed = {name for name in zipfile.ZipFile(installed.wheel).namelist() if ".dist-info/" not in name}
    assert packed == {name for name in there if "__pycache__" not in name}
