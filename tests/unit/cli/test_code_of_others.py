"""What a recipe or run of others names is imported by `train` and `sft` only, or where the user names it as well."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.support.commands import Printed

from trimtab import plugins
from trimtab.cli.main import named_functions, run
from trimtab.errors import TrimtabError

MODULE = """
from pathlib import Path
import trimtab
Path("imported").touch()
def method(): return trimtab.objective("grpo")
def score(response, problem): return 1.0
class Room: ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    Path("planted.py").write_text(MODULE)
    return tmp_path


SECTIONS = {
    "reward": 'base = "quickstart"\n[[reward]]\nname = "planted:score"\n',
    "environment": 'base = "quickstart-tools"\n[environment]\nname = "planted:Room"\n',
    "objective": 'base = "quickstart"\n[objective]\nname = "planted:method"\n',
}


@pytest.mark.parametrize("section", ["reward", "environment"])
@pytest.mark.parametrize("words", [["theirs"], ["laboratory", "--task", "theirs/config.toml"]])
def test_eval_names_the_code_of_a_run_and_does_not_import_it(
    section: str, words: list[str], folder: Path, printed: Printed
) -> None:
    Path("theirs").mkdir()
    Path("theirs/config.toml").write_text(SECTIONS[section])
    error = printed("eval", *words, "--problems", "1", code=2)
    assert f"{section} 'planted:" in error
    assert f"it would import {folder / 'planted.py'}; read that first, then add --allow-code" in error
    assert not Path("imported").exists()


@pytest.mark.parametrize(
    ("words", "imports"),
    [
        (["explain", "theirs.toml"], False),
        (["show", "theirs.toml"], False),
        (["explain", "theirs.toml", "--allow-code"], True),
        (["explain", "planted:method"], True),
        (["explain", "quickstart", "--set", "objective.name=planted:method"], True),
    ],
)
@pytest.mark.usefixtures("folder")
def test_explain_imports_what_its_command_line_names(words: list[str], imports: bool) -> None:
    Path("theirs.toml").write_text(SECTIONS["objective"])
    run(words)
    assert Path("imported").exists() == imports


@pytest.mark.usefixtures("folder")
def test_a_recipe_cannot_start_a_command_that_names_its_code() -> None:
    command = 'name = "trimtab.cli.main:run"\narguments = ["explain", "planted:method"]\n'
    Path("theirs.toml").write_text(f'base = "quickstart"\n[objective]\n{command}')
    assert run(["explain", "theirs.toml"]) == 2
    assert not Path("imported").exists()


def test_the_recipe_that_names_code_of_the_package_needs_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with plugins.only_named(set()):
        for path in plugins.SHIPPED:
            assert plugins.load_function(path, "format")
    assert run(["explain", "laboratory-tools"]) == 0, capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_a_later_command_is_not_trusted_because_an_earlier_one_was() -> None:
    Path("theirs.toml").write_text(SECTIONS["objective"])
    assert run(["explain", "theirs.toml", "--allow-code"]) == 0
    Path("imported").unlink()
    del sys.modules["planted"]
    assert run(["explain", "theirs.toml"]) == 2
    assert not Path("imported").exists()


def test_an_installed_function_is_refused_as_well() -> None:
    with plugins.only_named({"os:listdir"}):
        assert plugins.load_function("os:listdir", "reward")
        with pytest.raises(TrimtabError, match="'os:system' is code that a recipe or run names"):
            plugins.load_function("os:system", "reward")
    assert plugins.load_function("os:system", "reward")


@pytest.mark.usefixtures("folder")
def test_the_source_of_a_module_in_a_package_is_found_without_running_the_package() -> None:
    Path("kit").mkdir()
    Path("kit/__init__.py").write_text("raise SystemExit")
    with plugins.only_named(set()), pytest.raises(TrimtabError, match=r"kit/__init__\.py"):
        plugins.load_function("kit.rewards:score", "reward")


def test_the_functions_of_a_command_line() -> None:
    words = ["compare", "--methods", "my.kit:gap:tau=0.1", "--set", "environment.name='rooms:Room'", "--seeds", "1"]
    assert named_functions(words) == {"my.kit:gap", "rooms:Room"}
