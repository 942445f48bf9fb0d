"""Which runs belong together, the numbers of their tables by hand, and what a comparison of them warns of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.errors import TrimtabError
from trimtab.report.comparison import PROCESS_COLUMNS, RESULT_COLUMNS, compare_column, differing_keys
from trimtab.report.groups import Group, find_runs, group_runs, list_cautions, same_measure
from trimtab.runs.reader import Run

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


BASE = {"task.name": "sort", "model.path": "laboratory", "eval.problems": 64, "reward": []}
BASE |= {"trainer.steps": 4, "trainer.prompts": 2, "trainer.samples": 4}


def run(accuracy: dict[int, float], seed: int = 0, steps: int = 4, **metrics: Any) -> Run:
    """A run of `steps` steps of 2 seconds; `accuracy` by step, 0 for before training; metrics by value or per step."""
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        row: dict[str, Any] = {"step": step, "reward/mean": step / 10, "time/step": 2.0}
        row |= {"eval/sort/before": accuracy[0], "eval/sort/greedy": accuracy[0]} if step == 1 and 0 in accuracy else {}
        row |= {"eval/sort/greedy": accuracy[step]} if step in accuracy else {}
        values = {key.replace("__", "/"): value for key, value in metrics.items()}
        row |= {key: value[step - 1] if isinstance(value, list) else value for key, value in values.items()}
        rows.append(row)
    return Run(Path(f"seed{seed}"), {"seed": seed, "task": {"name": "sort"}}, rows)


def group(name: str, *runs: Run, **config: Any) -> Group:
    return Group(name, list(runs), BASE | {key.replace("__", "."): value for key, value in config.items()})


def columns(groups: list[Group], *, judged: bool = True) -> dict[str, Any]:
    result = [compare_column(column, groups, judged=judged) for column in (*RESULT_COLUMNS, *PROCESS_COLUMNS)]
    return {item.column.key: item for item in result if item}


FAST = [run({0: 0.2, 1: 0.4, 2: 0.8 + seed / 100, 3: 0.9, 4: 0.85}, seed) for seed in range(3)]
SLOW = [run({0: 0.2, 1: 0.3, 2: 0.4, 3: 0.5 + seed / 100, 4: 0.7}, seed) for seed in range(3)]


def test_final_numbers_and_intervals() -> None:
    result = columns([group("fast", *FAST), group("slow", *SLOW)])
    assert [item.mean for item in result["accuracy_before"].intervals] == pytest.approx([0.2, 0.2])
    assert [item.mean for item in result["accuracy"].intervals] == pytest.approx([0.85, 0.7])
    assert [item.mean for item in result["accuracy_best"].intervals] == pytest.approx([0.9, 0.7])
    assert result["accuracy"].winner == 0
    assert result["reward"].intervals[0].mean == pytest.approx(0.4), "the last tenth of four steps is the last"
    assert result["reward"].winner is None, "equal"
    assert result["steps"].intervals[0].mean == 4
    assert result["seconds"].intervals[0].mean == 8
    assert "k3" not in result, "nobody logged it"


def test_a_seed_that_did_not_measure_is_no_part_of_the_mean_and_no_one_wins() -> None:
    groups = [group("fast", FAST[0], FAST[1], run({0: 0.2}, 2, steps=2)), group("slow", *SLOW)]
    result = columns(groups)["accuracy"]
    assert result.values[0] == [0.85, 0.85, None]
    assert result.intervals[0].count == 2
    assert result.winner is None


def test_groups_measured_differently_have_no_winner() -> None:
    groups = [group("fast", *FAST), group("slow", *SLOW, task__name="arithmetic")]
    assert not same_measure(groups)
    assert columns(groups, judged=same_measure(groups))["accuracy"].winner is None
    assert same_measure([group("fast", *FAST), group("slow", *SLOW, optim__lr=1)])


def with_accuracies(name: str, *values: float) -> Group:
    return group(name, *(run({0: 0.2, 4: value}, seed) for seed, value in enumerate(values)))


def test_the_winner_leads_by_differences_paired_by_seed() -> None:
    """Leads of .1, .2 and .3 are t = 3.46, above t(2) = 2.92 at 5%, though the ranges [.5, .9] and [.4, .6] overlap."""
    ahead, behind = with_accuracies("ahead", 0.5, 0.7, 0.9), with_accuracies("behind", 0.4, 0.5, 0.6)
    assert columns([ahead, behind])["accuracy"].winner == 0
    assert columns([behind, ahead])["accuracy"].winner == 1
    assert columns([ahead])["accuracy"].winner is None, "alone"
    twice = Group("twice", [*behind.runs, behind.runs[0]], behind.config)
    assert columns([ahead, twice])["accuracy"].winner is None, "runs of one seed are not independent"


def test_the_lower_mismatch_wins_and_seconds_are_never_judged() -> None:
    low, high = (
        group(name, *(run({}, seed, mismatch__k3=k3, time__step=100 * k3) for seed in range(3)))
        for name, k3 in (("a", 0.1), ("b", 0.2))
    )
    result = columns([low, high])
    assert (result["k3"].winner, result["seconds"].winner) == (0, None)
    assert [item.mean for item in result["seconds"].intervals] == [40, 80]


def test_alike_groups_need_no_caution() -> None:
    assert list_cautions([group("fast", *FAST), group("slow", *SLOW, optim__lr=1)]) == []
    assert list_cautions([group(name, run({0: 0.0, 4: 0.0})) for name in "ab"]) == [], "0 correct is a measurement"


def caution(*groups: Group) -> str:
    [line] = list_cautions(groups)
    return line


def test_each_reason_against_a_comparison_is_named() -> None:
    fast = group("fast", *FAST)
    assert caution(fast, group("b", *FAST, task__name="hub")).startswith(
        "task.name (fast sort; b hub) differ: accuracies"
    )
    assert caution(fast, group("b", *FAST, model__path="big")).startswith("model.path (fast laboratory; b big)")
    assert "eval.problems (fast 64; b 128)" in caution(fast, group("b", *FAST, eval__problems=128))
    assert "task.digits (fast –; b 3)" in caution(fast, group("b", *FAST, task__digits=3))
    assert "reward.0.name (fast –; b exact)" in caution(fast, group("b", *FAST, reward__0__name="exact"))
    assert "trainer.samples (fast 4; b 8) differ: a step" in caution(fast, group("b", *FAST, trainer__samples=8))
    three = [run({0: 0.2, 3: 0.5}, seed, steps=3) for seed in range(3)]
    assert "trainer.steps (fast 4; b 3)" in caution(fast, group("b", *three, trainer__steps=3))
    assert caution(fast, group("b", *three)).startswith(
        "Unfinished: b seed 0 at step 3 of 4, b seed 1 at step 3 of 4, b seed 2 at step 3 of 4."
    )
    unseen = [run({0: 0.2}, seed) for seed in range(3)]
    assert "not measured after training: b seed 0, b seed 1, b seed 2." in caution(fast, group("b", *unseen))
    assert "numbers of seeds differ (fast 3; b 2)" in caution(fast, group("b", *FAST[:2]))
    other = [run({0: 0.2, 4: 0.5}, seed) for seed in (3, 4, 5)]
    assert "The seeds differ" in caution(fast, group("b", *other))
    worse = caution(fast, group("b", *FAST[:2], run({0: 0.5, 4: 0.2}, 2, eval__sort__problems=64)))
    assert worse == "Got worse: b seed 2: held-out accuracy on sort fell from 0.500 [0.381, 0.619] to 0.200."
    twice = [run({0: 0.2, 4: 0.5}, seed) for seed in (0, 0, 1)]
    assert any("b: seed 0 more than once" in line for line in list_cautions([fast, group("b", *twice)]))


def test_only_keys_that_differ_are_listed() -> None:
    first, second = group("a", optim__lr=1e-5), group("b", optim__lr=2e-5, objective__beta=0.1)
    assert differing_keys([first, second]) == {"optim.lr": [1e-5, 2e-5], "objective.beta": [None, 0.1]}
    assert differing_keys([first, first]) == {}
