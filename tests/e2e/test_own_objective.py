"""An objective of one's own, in real training: named in a recipe or given in code, resumed, reported, refused."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.run_results import untimed

import trimtab
from trimtab.cli import main
from trimtab.errors import TrimtabError
from trimtab.objectives import Clipped, Objective, Ratio, objective
from trimtab.runs.directory import read_metrics
from trimtab.trainer.config import load_config
from trimtab.trainer.run import train

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
DPPO = "tests.unit.objectives.own_rule:dppo"
SMALL = ("trainer.prompts=2", "trainer.samples=4", "trainer.minibatches=2", "eval.problems=4", "checkpoint.every=1")


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def run(out: Path, *changes: str, steps: int = 2, **arguments: Any) -> dict[str, Any]:
    overrides = ["objective.name=own", f"trainer.steps={steps}", *SMALL, *changes]
    return trimtab.train("laboratory", overrides=overrides, out=out, **arguments).metrics


def saved(out: Path) -> dict[str, Any]:
    return tomllib.loads((out / "config.toml").read_text())["objective"]


def test_a_recipe_names_a_function_and_the_run_writes_its_equation_down(tmp_path: Path) -> None:
    last = run(tmp_path / "run", f"objective.name={DPPO}", "objective.tv_max=0.0")
    assert 0 < last["reject/tv"] < 1  # after the first update some tokens have moved, half of them outward
    assert last["mismatch/anchor"] == "current", "a rule over current/behavior must cost no proximal pass"
    built = objective(DPPO, tv_max=0.0)
    assert saved(tmp_path / "run") == {"name": DPPO, "calibrate": False, "tv_max": 0.0, "equation": built.equation()}
    assert "|π(y_t) − μ(y_t)| &gt; 0)" in (tmp_path / "run" / "report.html").read_text()


def test_an_objective_in_code_trains_as_the_preset_of_the_same_parts(tmp_path: Path) -> None:
    custom = replace(objective("token-tis", weight_max=1.5), name="mine")
    run(tmp_path / "code", objective=custom)
    run(tmp_path / "preset", "objective.name=token-tis", "objective.weight_max=1.5")
    assert untimed(tmp_path / "code", "eval/") == untimed(tmp_path / "preset", "eval/")
    assert saved(tmp_path / "code") == {
        "name": "mine",
        "calibrate": False,
        "code": repr(custom),
        "equation": custom.equation(),
    }
    assert "sg[min(ρ_t, 1.5)]" in (tmp_path / "code" / "report.html").read_text()


def test_it_resumes_with_the_same_and_with_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    custom = Objective("mine", Ratio("token", "behavior"), Clipped(0.2, 0.28))
    run(tmp_path / "whole", objective=custom, steps=3)
    parts = tmp_path / "parts"
    run(parts, objective=custom, steps=2)
    for other in (replace(custom, surrogate=Clipped(0.2, 0.3)), replace(custom, name="other")):
        with pytest.raises(TrimtabError, match=f"another objective than the one given now .'{other.name}'."):
            run(parts, objective=other, steps=3, resume=True)
    with pytest.raises(TrimtabError, match=r"given in code \('mine'.*resume it with trimtab.train"):
        trimtab.train("laboratory", out=parts, resume=True)
    assert main.run(["train", str(parts / "config.toml"), "--out", str(parts), "--resume"]) == 2
    assert "'mine' was given in code" in capsys.readouterr().err
    run(parts, objective=custom, steps=3, resume=True)
    assert untimed(parts, "eval/") == untimed(tmp_path / "whole", "eval/")


@dataclass(frozen=True)
class Scaled(Clipped):
    """A surrogate that holds a function; the function's address is another one in each process."""

    scale: Callable[[float], float] = abs


def test_an_objective_that_holds_a_function_resumes_in_another_process(tmp_path: Path) -> None:
    def custom() -> Objective:
        return Objective("mine", Ratio("token", "behavior"), Scaled(0.2, 0.28, scale=lambda value: value))

    first, second = custom(), custom()
    assert repr(first) != repr(second), "the two functions have addresses of their own"
    run(tmp_path / "run", objective=first, steps=1)
    run(tmp_path / "run", objective=second, steps=2, resume=True)
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_a_function_that_builds_something_else_now_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "my_rule_of_today.py"
    text = "from trimtab.objectives import objective\ndef mine():\n    return objective('dapo', clip_high={})\n"
    module.write_text(text.format(0.3))
    monkeypatch.chdir(tmp_path)
    named = "objective.name=my_rule_of_today:mine"
    run(tmp_path / "run", named, steps=1)
    module.write_text(text.format(0.45))
    del sys.modules["my_rule_of_today"]
    with pytest.raises(TrimtabError, match="another objective than the one given now"):
        run(tmp_path / "run", named, steps=2, resume=True)
    with pytest.raises(TrimtabError, match=r"no longer builds what objective\.equation says"):
        train(load_config(tmp_path / "run" / "config.toml"), out=tmp_path / "again")


@pytest.mark.parametrize(
    ("changes", "objective_name", "line"),
    [
        (("objective.weight_max=3",), "mine", r"objective.weight_max of the recipe would have no effect.*name=mine"),
        (("objective.name=icepop", "objective.calibrate=true"), "icepop", "objective.calibrate.*objective.name=own"),
        (("placement=ray",), "mine", r"cannot be sent to a cluster.*objective.name = \"module:function\""),
        (("advantage.kind=optimal",), "mine", "does not fit objective 'mine'"),
        (("trainer.max_lag=4",), "mine", "'mine' tokens of older policies"),
    ],
)
def test_what_the_recipe_says_besides_is_refused(
    tmp_path: Path, changes: tuple[str, ...], objective_name: str, line: str
) -> None:
    custom = Objective(objective_name, Ratio(), Clipped())
    with pytest.raises(TrimtabError, match=line) as error:
        run(tmp_path / "run", *changes, objective=custom)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "config.toml").exists()
