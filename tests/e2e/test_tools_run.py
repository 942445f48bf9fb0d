"""Training with multi-turn episodes: the real model calls a real interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.turns import check_episodes

import trimtab
from trimtab.cli.main import run as command
from trimtab.diagnosis.output.as_json import as_dict
from trimtab.runs.trajectories import read
from trimtab.trainer.config import load_config
from trimtab.trainer.observer import NullObserver
from trimtab.trainer.run import train

pytestmark = pytest.mark.slow

# With the one example of the recipe the untrained model hardly ever calls; with two it does, with two calls it checks.
CALL, OTHER = (f"<python>{a}</python><output>{b}</output>" for a, b in (("412 * 739", 304468), ("127 * 856", 108712)))
TWO = f"\nQuestion: 412 * 739 =\nAnswer: {CALL} 304468\n\nQuestion: 127 * 856 =\nAnswer: {OTHER} 108712\n\n"
CHECKED = TWO.replace(CALL, f"{CALL} {CALL}").replace(OTHER, f"{OTHER} {OTHER}")
SMALL = (
    "trainer.prompts=2",
    "trainer.samples=4",
    "trainer.steps=2",
    "eval.problems=2",
    "checkpoint.every=1",
    f"environment.instructions={json.dumps(TWO)}",
)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools") / "run"
    train(load_config("quickstart-tools", [*SMALL, "checkpoint.keep=2"]), out=folder, observer=NullObserver())
    return folder


def test_calls_are_made_and_their_results_are_not_trained(run: Path) -> None:
    assert check_episodes(run) > 0
    for row in rows(run):
        assert row["episode/calls"] > 0
        assert row["episode/failed"] == 0
        assert row["trajectories/dropped"] == 0
        assert row["mismatch/k3"] < 0.01
    assert {row["length/episode"] > row["length/mean"] for row in rows(run)} == {True}


def test_invariant_numerics_have_no_mismatch_over_three_turns(tmp_path: Path) -> None:
    sets = [*SMALL, "trainer.steps=1", "numerics=invariant", "environment.max_turns=3", "sampling.max_tokens=72"]
    sets.append(f"environment.instructions={json.dumps(CHECKED)}")
    train(load_config("quickstart-tools", sets), out=tmp_path / "run", observer=NullObserver())
    [row] = rows(tmp_path / "run")
    assert row["mismatch/k3"] == row["mismatch/abs_diff_max"] == 0.0
    assert row["mismatch/tokens"] > 100
    [file] = (tmp_path / "run" / "trajectories").iterdir()
    assert max(int(one.trajectory.completion.turn[-1]) for one in read(file)) == 2


def test_diagnose_shows_turns_and_no_fault(run: Path) -> None:
    found = as_dict(trimtab.diagnose(run / "trajectories"))
    assert {"turn-number", "observation"} <= set(found["views"])
    causes = {cause["name"] for cause in found["causes"]}
    assert not {"retokenized", "misaligned"} & causes, "turns are appended as ids"


class Multiply:
    def reset(self, **row: Any) -> None:
        self.answer, self.right = row["answer"], False

    def python(self, code: str) -> str:
        """Multiplies.

        Args:
            code: two numbers and a star.
        """
        left, star, right = code.split()
        assert star == "*"
        self.right = str(int(left) * int(right)) == self.answer
        return self.answer

    def get_reward(self) -> float:
        return 0.5 * self.right


def test_a_class_with_a_reward_of_its_own(tmp_path: Path) -> None:
    result = trimtab.train(
        "quickstart-tools",
        environment=Multiply,
        overrides=[*SMALL, "trainer.steps=1", "checkpoint.every=0"],
        out=tmp_path / "run",
        progress=False,
    )
    [row] = rows(result.run)
    assert 0 < row["reward/environment"] <= 0.5
    assert row["reward/mean"] == row["reward/environment"]


def test_a_run_is_evaluated_with_its_environment(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the tool the model solves none of these products."""
    command(["eval", str(run), "--problems", "4", "--json"])
    with_tool = json.loads(capsys.readouterr().out)
    command(["eval", str(run), "--problems", "4", "--json", "--task", "arithmetic:operation=*,digits=3,examples=2"])
    without = json.loads(capsys.readouterr().out)
    assert [accuracy(with_tool) > 0.5, accuracy(without) < 0.5] == [True, True]
    episodes = with_tool["results"][0]["episodes"]
    assert episodes["calls"] > 0.5
    assert episodes["failed"] == 0
    assert without["results"][0]["episodes"] is None


def accuracy(results: dict[str, Any]) -> float:
    [result] = results["results"]
    return result["accuracy"]
