"""What works with the core alone and with the extra `diagnose`, and how what is missing is named."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.support.fake_run import fake_run
from tests.support.installed import PROJECT, closure, modules_of, own_trainer, requirements, run_installed

from trimtab.errors import TrimtabError
from trimtab.plugins import EXTRAS, require_extra

CORE = (
    *("trimtab", "trimtab.corrections", "trimtab.objectives", "trimtab.adapters", "trimtab.monitor"),
    *("trimtab.errors", "trimtab.plugins", "trimtab.plugins"),
)
# An adapter may subclass a class of its trainer, which is then imported first.
PEERS = frozenset(
    {"areal", "miles", "nemo_rl", "openrlhf", "prime_rl", "skyrl", "slime", "tinker", "transformers", "trl", "verl"}
)
IMPORT_ALL = f"""
import importlib, pkgutil
from trimtab.errors import TrimtabError
for name in {CORE!r}:
    package = importlib.import_module(name)
    if name == "trimtab" or not hasattr(package, "__path__"):
        continue
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if not (name in ("trimtab.adapters", "trimtab.monitor") and error.name in {PEERS!r}):
                raise
        except TrimtabError as error:
            if not (name == "trimtab.adapters" and "which is not installed: run this where" in str(error)):
                raise
"""
NEED_MORE = {
    "Config": "diagnose",
    "diagnose": "diagnose",
    "load_config": "diagnose",
    "pass_at_k": "train",
    "train": "train",
}
REFUSED = f"""
import trimtab
for name in {list(NEED_MORE)!r}:
    try:
        getattr(trimtab, name)
        print(name, "is there")
    except trimtab.TrimtabError as error:
        print(error)
"""
INSTALL = r"pip install '\.\[{}\]' in a checkout of Trimtab"
TYPED = """
from trimtab.cli.main import run
for arguments in {commands!r}:
    print("code", run(arguments), flush=True)
"""


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_checked_packages_are_those_of_pyproject(extra: str) -> None:
    core = {item.name for item in requirements()}
    wanted = [item for item in requirements(extra) if item.name not in core]
    checked = {*EXTRAS[extra], *(() if extra == "diagnose" else EXTRAS["train"])}
    for item in wanted:
        assert modules_of(item) & checked, f"plugins.EXTRAS has no module of {item.name}"
    assert len(wanted) == len(checked)


def test_the_core_is_torch_numpy_and_little_else() -> None:
    of_torch = closure([item for item in requirements() if item.name == "torch"])
    others = closure(requirements()) - of_torch
    assert others == {"numpy", "jaxtyping", "wadler-lindig"}


def test_every_extra_is_checked_or_for_developers() -> None:
    assert set(PROJECT["optional-dependencies"]) - {"bench", "dev", "docs"} == set(EXTRAS)


def test_the_core_works_alone() -> None:
    done = run_installed(IMPORT_ALL + own_trainer())
    assert done.returncode == 0, done.stderr[-2000:]
    assert "k3" in done.stdout or "ρ" in done.stdout


def test_what_the_core_lacks_is_named_with_its_command() -> None:
    done = run_installed(REFUSED)
    assert done.returncode == 0, done.stderr[-2000:]
    for line, name in zip(done.stdout.splitlines(), NEED_MORE, strict=True):
        pattern = rf"trimtab\.{name} needs what is not installed \(.*\): {INSTALL.format(NEED_MORE[name])}"
        assert re.fullmatch(pattern, line)


@pytest.mark.parametrize(
    ("arguments", "what", "extra"),
    [
        ([], "the command line", "diagnose"),
        (["--help"], "the command line", "diagnose"),
        (["diagnose", "x.parquet"], "trimtab diagnose", "diagnose"),
        (["train", "quickstart"], "trimtab train", "train"),
        (["eval", "--help"], "trimtab eval", "train"),
    ],
)
def test_the_command_line_needs_an_extra_and_says_so(arguments: list[str], what: str, extra: str) -> None:
    code = f"import sys; sys.argv[1:] = {arguments!r}; from trimtab.__main__ import main; main()"
    done = run_installed(code)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(rf"trimtab: {what} needs what is not installed \(.*\): {INSTALL.format(extra)}\n", done.stderr)


@pytest.mark.e2e
def test_every_command_runs_with_the_extra_of_diagnose_or_names_that_of_train(tmp_path: Path) -> None:
    run, page = str(fake_run(tmp_path / "run", steps=3, every=1)), str(tmp_path / "page.html")
    works = [
        ["diagnose", run, "--out", page],
        ["report", run, "--out", str(tmp_path)],
        ["recipes"],
        ["show", "quickstart"],
        ["explain", "token-tis"],
    ]
    refused = [
        ["train", "quickstart"],
        ["sft", "quickstart"],
        ["export", run, str(tmp_path / "model")],
        ["eval", run],
        ["compare"],
        ["preflight", "laboratory"],
        ["rescore", run, "--model", "laboratory"],
    ]
    done = run_installed(TYPED.format(commands=[*works, *refused]), "diagnose")
    assert done.returncode == 0, done.stderr[-2000:]
    codes = [line for line in done.stdout.splitlines() if line.startswith("code ")]
    assert codes == ["code 0"] * len(works) + ["code 2"] * len(refused), done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if "pip install '.[train]' in a checkout" in line]
    assert len(lines) == len(refused), done.stderr
    assert "Traceback" not in done.stderr


def test_the_extras_need_a_newer_python_than_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 12))
    with pytest.raises(TrimtabError, match=r"^x needs Python 3\.11 or newer, this is "):
        require_extra("diagnose", "x")


def test_the_message_has_some_of_the_names_and_what_else_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EXTRAS["train"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        TrimtabError, match=r"^x needs what is not installed \(jinja2, matplotlib, pyarrow, \.\.\.\): pip"
    ):
        require_extra("train", "x")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        TrimtabError, match=r"^y .*\(wandb\): pip install '\.\[wandb\]' in a checkout of Trimtab, or leave it$"
    ):
        require_extra("wandb", "y", "or leave it")


def test_a_folder_of_the_same_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "absent_package").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(EXTRAS, "ray", ("absent_package",))
    with pytest.raises(
        TrimtabError, match=r"needs what is not installed .absent_package.: pip install '..ray.' in a checkout"
    ):
        require_extra("ray", "it")
