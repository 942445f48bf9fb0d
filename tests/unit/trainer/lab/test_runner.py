"""Runs over worker processes: one that dies costs its run only; when a finished run is taken up again."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from trimtab.errors import TrimtabError
from trimtab.runs.summary import SCHEMA, RunSummary
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.display import PlainTextConsole, RunsDisplay, progress_bar
from trimtab.trainer.lab import runner
from trimtab.trainer.lab.experiment import plan_experiment
from trimtab.trainer.lab.regimes import regime
from trimtab.trainer.lab.runner import read_result, write_results
from trimtab.trainer.processes import WorkerProcess
from trimtab.trainer.sft import supervised_warm_start

DONE = RunSummary("done", steps=3, seconds=1.25, accuracy=0.6, curve_steps=(0, 3), curve=(0.4, 0.6), k3_worst=0.5)


class Steps(RunsDisplay):
    def __init__(self) -> None:
        super().__init__(progress_bar(PlainTextConsole(quiet=True)))
        self.seen: list[tuple[str, int]] = []

    def progress(self, name: str, step: int) -> None:
        self.seen.append((name, step))


@pytest.mark.e2e
def test_a_worker_that_dies_costs_its_run_and_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(runner, "_start_process", lambda: WorkerProcess("tests.programs.two_step_worker"))
    observer = Steps()
    made = {str(seed): load_config("laboratory", [f"seed={seed}", f"out={tmp_path / str(seed)}"]) for seed in range(3)}
    results = runner.train_all(made, workers=1, observer=observer)
    assert [result.status for result in results.values()] == ["done", "failed", "done"]
    assert results["1"].error == "its process was killed (by hand, or because memory ran out)"
    assert observer.seen == [(name, step) for name in made for step in (1, 2)]


def test_a_folder_of_other_files_is_refused_and_kept(tmp_path: Path) -> None:
    made = config(tmp_path)
    foreign = Path(str(made.out)) / "thesis.tex"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("")
    with pytest.raises(TrimtabError, match="holds files but no run"):
        runner.train_all({"a": made}, workers=1, observer=Steps())
    assert foreign.exists()


def test_a_file_is_no_place_for_a_comparison_or_a_warm_start(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    for start in (partial(runner.run_recipe_comparison, observer=Steps(), resume=False), supervised_warm_start):
        with pytest.raises(TrimtabError, match=r"out: Not a directory.*choose another folder"):
            start(load_config("laboratory"), out=tmp_path / "out")


def config(out: Path, *sets: str) -> Config:
    return plan_experiment(["dapo"], [regime("on-policy")], 1, out, sets=("trainer.steps=3", *sets)).runs[0].config


def kept(made: Config, result: RunSummary) -> Config:
    """As a finished run leaves them."""
    place = Path(str(made.out))
    place.mkdir(parents=True)
    (place / "config.toml").write_text(made.dump())
    write(place, result)
    return made


def write(place: Path, result: RunSummary) -> None:
    (place / "result.json").write_text(json.dumps(asdict(result)))


def test_a_finished_cell_is_read_back_whole_and_an_unfinished_one_is_to_do(tmp_path: Path) -> None:
    made = kept(config(tmp_path), DONE)
    assert read_result(made) == DONE
    assert read_result(config(tmp_path / "other")) is None
    write(Path(str(made.out)), replace(DONE, status="failed"))
    assert read_result(made) is None, "a failed run is tried again"


def test_a_changed_setting_is_refused_by_name(tmp_path: Path) -> None:
    kept(config(tmp_path), DONE)
    with pytest.raises(TrimtabError, match=r"was trained with optim\.lr = 0\.0001, now it is 0\.001: .*another --out"):
        read_result(config(tmp_path, "optim.lr=1e-3"))


def test_a_grid_may_be_moved(tmp_path: Path) -> None:
    made = kept(config(tmp_path / "a"), DONE)
    (tmp_path / "a").rename(tmp_path / "b")
    assert read_result(config(tmp_path / "b")) is not None
    assert read_result(made) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("config.toml", content) for content in ("a =", "a = 1\n" * 2, "a = 9" + "9" * 5000)),
        *(("result.json", content) for content in ("{", "[]", '{"status": "done"}', '{"status": "done", "new": 1}')),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    made = kept(config(tmp_path), DONE)
    (Path(str(made.out)) / name).write_text(content)
    with pytest.raises(TrimtabError, match=f"{name}.*delete"):
        read_result(made)


def test_the_table_has_a_row_for_every_cell_that_ended_and_every_pair_left_out(tmp_path: Path) -> None:
    result = plan_experiment(["soup", "dapo"], [regime("on-policy"), regime("stale-32")], 2, tmp_path)
    first = result.runs[0]
    file = write_results(result, {first.name: DONE})
    table = pq.read_table(file)
    assert table.schema.equals(SCHEMA)
    done, refused = table.to_pylist()
    names = {"method": "soup", "regime": "on-policy", "seed": 0, "run": "on-policy/soup/seed0"}
    assert done | names == done
    assert (done["accuracy"], done["curve"], done["k3_worst"], done["status"]) == (0.6, [0.4, 0.6], 0.5, "done")
    assert refused | {"status": "refused", "regime": "stale-32", "seed": None, "accuracy": None} == refused
