"""Which runs belong together, and what they are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab.errors import TrimtabError
from trimtab.report.groups import find_runs, group_runs

KEYS = ("step", "reward/mean")


def make(make_run: Callable[..., Path], folder: Path, *changes: tuple[str, str], **options: object) -> Path:
    """A small run whose config.toml has some lines replaced."""
    path = make_run(folder, **{"steps": 2, "keys": KEYS, "every": 9, **options})
    text = (path / "config.toml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (path / "config.toml").write_text(text)
    return path


def test_seeds_of_one_recipe_belong_together(make_run: Callable[..., Path], tmp_path: Path) -> None:
    for seed in (0, 1, 10):
        for name in ("dapo", "token-tis"):
            make(make_run, tmp_path / name / f"seed{seed}", seed=seed, objective=name)
    groups, notes = group_runs(find_runs(tmp_path))
    assert {group.name: [run.path.name for run in group.runs] for group in groups} == {
        "dapo": ["seed0", "seed1", "seed10"],
        "token-tis": ["seed0", "seed1", "seed10"],
    }
    assert [group.seeds for group in groups] == [[0, 1, 10]] * 2
    assert not notes
    assert not {"seed", "out"} & {key for group in groups for key in group.config}


def test_groups_of_one_objective_have_the_names_of_their_folders(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """Folders of one name in different places are numbered, and none turns a line around."""
    evil = "x\u202e\n<b>"
    places = (tmp_path / "1" / evil, tmp_path / "2" / evil, tmp_path / "slow-seed3", tmp_path / "4" / "seed0")
    paths = [make(make_run, place, steps=index + 1) for index, place in enumerate(places)]
    names = [group.name for group in group_runs(paths)[0]]
    shown = "token-tis (x  <b>)"
    assert names == [shown, f"{shown} #2", "token-tis (slow)", "token-tis (4)"]


def test_a_directory_named_twice_counts_once(make_run: Callable[..., Path], tmp_path: Path) -> None:
    path = make(make_run, tmp_path / "a")
    groups, _ = group_runs([path, tmp_path / "b" / ".." / "a", *find_runs(tmp_path)])
    assert [len(group.runs) for group in groups] == [1]


def test_a_run_without_a_step_is_left_out_and_named(make_run: Callable[..., Path], tmp_path: Path) -> None:
    good, begun = make(make_run, tmp_path / "good"), make(make_run, tmp_path / "begun", seed=1)
    (begun / "metrics.jsonl").write_text('{"step": 1, "rew')
    groups, notes = group_runs([begun, good])
    assert [run.path for group in groups for run in group.runs] == [good]
    assert notes == [f"{begun} has no finished step yet and is left out."]
    with pytest.raises(TrimtabError, match="no finished step yet"):
        group_runs([begun])


def test_a_recipe_of_another_version_is_compared_as_written(make_run: Callable[..., Path], tmp_path: Path) -> None:
    old = make(make_run, tmp_path / "old", ("[task]", "[gone]\nkey = 1\n\n[task]"))
    groups, notes = group_runs([old, make(make_run, tmp_path / "new")])
    assert len(groups) == 2
    assert groups[0].config["gone.key"] == 1
    assert "another version" in notes[0]
    assert "gone" in notes[0]


def test_absent_defaults_make_no_difference(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """A key that is newer than a run has its default there."""
    old = make(make_run, tmp_path / "old", ("weight_decay = 0.0\n", ""))
    assert len(group_runs([old, make(make_run, tmp_path / "new", seed=1)])[0]) == 1


def test_a_folder_without_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="holds no run"):
        find_runs(tmp_path)
