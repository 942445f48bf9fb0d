"""Paths in recipes: what is a path, and what it is relative to."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer.config import load_config
from trimtab.trainer.config.recipes import NAMES_OR_FOLDERS


def test_paths_of_a_recipe_are_relative_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, home = tmp_path / "here", tmp_path / "home"
    for folder in (here, home / "warm", home / "org" / "name", home / "laboratory"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    (home / "base.toml").write_text(
        '[model]\npath = "warm"\n[task]\nname = "file"\npath = "data/a.jsonl"\n[engine]\ntype = "server"\n'
        '[engine.server]\nfolder = "handed"\nurls = ["http://localhost:1"]\n'
    )
    (here / "mine.toml").write_text('base = "../home/base.toml"\n[demonstrations]\npath = "traces.jsonl"\n')
    config = load_config("mine.toml", ["task.test_path=b.jsonl"])
    assert Path(config.model.path) == home / "warm"
    assert {key: Path(value) for key, value in config.task.keywords.items()} == {
        "path": home / "data" / "a.jsonl",
        "test_path": here / "b.jsonl",
    }
    assert config.demonstrations is not None
    assert Path(config.demonstrations.path) == here / "traces.jsonl"
    assert Path(str(config.engine.server.folder)) == home / "handed"
    # The resolved copy means the same wherever it lies.
    (home / "config.toml").write_text(config.dump())
    monkeypatch.chdir(tmp_path)
    again = load_config(home / "config.toml")
    assert (again.model, again.task, again.demonstrations, again.engine) == (
        config.model,
        config.task,
        config.demonstrations,
        config.engine,
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("laboratory", "laboratory"),  # there is a folder of that name as well
        ("org/name", "{home}/org/name"),
        ("org/absent", "org/absent"),
        ("absent", "absent"),
        ("./absent", "{home}/absent"),
        ("a/b/absent", "{home}/a/b/absent"),
        ("/absent", "/absent"),
        ("~/absent", "{user}/absent"),
    ],
)
def test_a_model_is_a_name_unless_it_is_written_as_a_path_or_lies_there(
    written: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    home = tmp_path / "home"
    for folder in (home / "laboratory", home / "org" / "name"):
        folder.mkdir(parents=True)
    (home / "mine.toml").write_text(f'[model]\npath = "{written}"\n')
    expected = meant.format(home=home, user=tmp_path / "user")
    assert load_config(home / "mine.toml").model.path == expected
    monkeypatch.chdir(home)
    assert load_config({"model": {"path": written}}).model.path == expected
    assert load_config({}, [f"model.path={written}"]).model.path == expected
    assert load_config({}, [f'model={{path="{written}"}}']).model.path == expected


def test_a_data_set_of_one_word_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("chain_sum", "org/math"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    meant = {"chain_sum": "chain_sum", "org/math": str(tmp_path / "org" / "math"), "org/absent": "org/absent"}
    meant["./chain_sum"] = str(tmp_path / "chain_sum")
    for written, expected in meant.items():
        config = load_config({"task": {"name": "hf", "dataset": written}})
        assert config.task.keywords["dataset"] == expected


def test_every_model_that_ships_has_a_name_no_folder_can_take() -> None:
    from trimtab.trainer.models import bundled, laboratory

    assert set(NAMES_OR_FOLDERS["model.path"]) == {bundled.NAME, *laboratory.NAMES}


def test_a_missing_home_directory_is_one_line() -> None:
    with pytest.raises(TrimtabError, match="there is no such user"):
        load_config("laboratory", ["model.path=~nobody-of-this-name/model"])


def test_paths_of_evaluated_tasks_are_relative_to_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'base = "laboratory"\n[task]\nname = "file"\npath = "a.jsonl"\n'
        '[[eval.task]]\nname = "file"\npath = "b.jsonl"\ntest_path = "c.jsonl"\n[[eval.task]]\nname = "sort"\n'
    )
    config = load_config(recipe)
    assert config.task.keywords["path"] == str(tmp_path / "a.jsonl")
    assert config.eval.task[0].keywords == {"path": str(tmp_path / "b.jsonl"), "test_path": str(tmp_path / "c.jsonl")}
    assert config.eval.task[1].keywords == {}
