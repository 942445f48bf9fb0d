"""What is kept of a run, and when a finished one is taken up again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from trimtab.errors import TrimtabError
from trimtab.runs.reader import Run
from trimtab.runs.summary import SCHEMA, RunSummary, summarize
from trimtab.trainer.config import Config
from trimtab.trainer.lab.experiment import plan_experiment
from trimtab.trainer.lab.regimes import regime
from trimtab.trainer.lab.results import read, write, write_results

K3, CHI2, ESS, LARGEST = "mismatch/k3", "mismatch/chi2_token", "mismatch/ess_token", "mismatch/log_ratio_seq_max"


def config(out: Path, *sets: str) -> Config:
    return plan_experiment(["dapo"], [regime("on-policy")], 1, out, sets=("trainer.steps=3", *sets)).runs[0].config


def rows() -> list[dict[str, Any]]:
    greedy, before = "eval/sort/greedy", "eval/sort/before"
    return [
        {"step": 1, "updates": 1, "reward/mean": 0.25, K3: 0.5, ESS: 0.9, greedy: 0.4, before: 0.4, "clip/low": 0.25},
        {"step": 2, "updates": 2, "reward/mean": 0.5, K3: None, ESS: 0.3, greedy: 0.8, "optim/grad_norm": 7.0},
        {
            "step": 3,
            "updates": 2,
            "reward/mean": 0.75,
            K3: 0.2,
            ESS: 0.6,
            greedy: 0.6,
            "clip/low": 0.125,
            "clip/high": 0.125,
            "clip/tenth/1": 0.25,  # the same tokens by place, which are not added
            "clip/weight": 0.9,
        }
        | {"optim/grad_norm": 3.0, "optim/skipped": 1, "reject/tokens": 0.5, CHI2: 2.0, LARGEST: 1.5},
    ]


def test_a_run_in_numbers(tmp_path: Path) -> None:
    summary = summarize(run(rows(), config(tmp_path, "eval.every=2")), "done", 9.0)
    assert summary == RunSummary(
        status="done",
        steps=3,
        updates=2,
        seconds=9.0,
        accuracy_before=0.4,
        accuracy=0.6,
        accuracy_best=0.8,
        curve_steps=(0, 2, 3),
        curve=(0.4, 0.8, 0.6),
        reward=0.75,
        k3=0.2,
        k3_worst=0.5,
        chi2=2.0,
        chi2_worst=2.0,
        ess=0.6,
        ess_worst=0.3,
        log_ratio_seq=1.5,
        log_ratio_seq_worst=1.5,
        grad_norm_max=7.0,
        clipped=0.25,
        rejected=0.5,
        skipped=1,
    )


def test_step_one_is_on_the_curve_only_where_it_was_evaluated(tmp_path: Path) -> None:
    summary = summarize(run(rows(), config(tmp_path, "eval.every=1")), "done", 0.0)
    assert (summary.curve_steps, summary.curve) == ((0, 1, 2, 3), (0.4, 0.4, 0.8, 0.6))


def test_a_diverged_run_has_no_accuracy_at_its_end(tmp_path: Path) -> None:
    summary = summarize(run(rows()[:2], config(tmp_path, "eval.every=2")), "diverged", 1.0, "not finite")
    assert (summary.status, summary.accuracy, summary.accuracy_best, summary.steps) == ("diverged", None, 0.8, 2)
    assert summarize(run([], config(tmp_path)), "failed", 1.0).k3 is None


def run(rows: list[dict[str, Any]], made: Config) -> Run:
    return Run(Path(str(made.out)), made.model_dump(mode="json"), rows)


def kept(made: Config, result: RunSummary) -> Config:
    """As a finished cell leaves them."""
    place = Path(str(made.out))
    place.mkdir(parents=True)
    (place / "config.toml").write_text(made.dump())
    write(place, result)
    return made


def test_a_finished_cell_is_read_back_whole_and_an_unfinished_one_is_to_do(tmp_path: Path) -> None:
    result = summarize(run(rows(), config(tmp_path)), "done", 1.25)
    made = kept(config(tmp_path), result)
    assert read(made) == result
    assert read(config(tmp_path / "other")) is None
    write(Path(str(made.out)), replace(result, status="failed"))
    assert read(made) is None, "a failed cell is tried again"


def test_a_changed_setting_is_refused_by_name(tmp_path: Path) -> None:
    kept(config(tmp_path), summarize(run(rows(), config(tmp_path)), "done", 1.0))
    with pytest.raises(TrimtabError, match=r"was trained with optim\.lr = 0\.0001, now it is 0\.001: .*another --out"):
        read(config(tmp_path, "optim.lr=1e-3"))


def test_a_grid_may_be_moved(tmp_path: Path) -> None:
    made = kept(config(tmp_path / "a"), summarize(run(rows(), config(tmp_path)), "done", 1.0))
    (tmp_path / "a").rename(tmp_path / "b")
    assert read(config(tmp_path / "b")) is not None
    assert read(made) is None


@pytest.mark.parametrize("content", ["{", "[]", '{"status": "done"}', '{"status": "done", "new": 1}'])
def test_a_damaged_result_names_its_file(tmp_path: Path, content: str) -> None:
    made = kept(config(tmp_path), summarize(run(rows(), config(tmp_path)), "done", 1.0))
    (Path(str(made.out)) / "result.json").write_text(content)
    with pytest.raises(TrimtabError, match=r"result\.json.*delete"):
        read(made)


def test_the_table_has_a_row_for_every_cell_that_ended_and_every_pair_left_out(tmp_path: Path) -> None:
    result = plan_experiment(["soup", "dapo"], [regime("on-policy"), regime("stale-32")], 2, tmp_path)
    first = result.runs[0]
    file = write_results(tmp_path, result, {first.name: summarize(run(rows(), first.config), "done", 2.0)})
    table = pq.read_table(file)
    assert table.schema.equals(SCHEMA)
    done, refused = table.to_pylist()
    assert (done["method"], done["regime"], done["seed"], done["run"]) == (
        "soup",
        "on-policy",
        0,
        "on-policy/soup/seed0",
    )
    assert (done["accuracy"], done["curve"], done["k3_worst"], done["status"]) == (0.6, [0.4, 0.8, 0.6], 0.5, "done")
    assert (refused["status"], refused["regime"], refused["seed"], refused["accuracy"]) == (
        "refused",
        "stale-32",
        None,
        None,
    )
