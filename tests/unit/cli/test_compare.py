"""The command line of a grid: lists, the remaining time, and which regimes follow from the mismatch of a run."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import pytest
import typer
from rich.progress import Progress

from trimtab.cli import advise
from trimtab.cli.compare import MultiValueCommand, register
from trimtab.cli.console import PACE_SECONDS, PlainTextConsole
from trimtab.cli.display import RunsDisplay
from trimtab.cli.main import run
from trimtab.errors import TrimtabError
from trimtab.runs.summary import RunSummary
from trimtab.trainer.config import load_config
from trimtab.trainer.lab import runner
from trimtab.trainer.lab.match import Candidate, MismatchLevel, MismatchMatch
from trimtab.trainer.lab.regimes import regime


def parsed(*words: str) -> dict[str, object]:
    app = typer.Typer()
    register(app)
    command = typer.main.get_command(app)
    assert isinstance(command, MultiValueCommand)
    return dict(command.make_context("compare", list(words)).params)


def test_words_after_a_list_option_belong_to_it_until_the_next_option() -> None:
    result = parsed("--methods", "dapo", "icepop:weight_max=3", "--seeds", "2", "--regimes", "int3", "--set", "a.b=1")
    assert result["methods"] == ["dapo", "icepop:weight_max=3"]
    assert (result["regimes"], result["seeds"], result["sets"]) == (["int3"], 2, ["a.b=1"])
    assert parsed("--methods", "a", "--methods", "b")["methods"] == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--methods", "dapo", "tokentis"], "unknown objective 'tokentis' .*token-tis"),
        (["--regimes", "stale-33"], "unknown regime 'stale-33' .*stale-32"),
        (["--methods", "--seeds", "2"], "--methods names nothing"),
        (["--regimes"], "--regimes names nothing"),
        (["--seeds", "0"], "Invalid value for '--seeds'"),
        (["--set", "trainer.epoch=2"], "unknown key 'trainer.epoch'"),
        (["--markdown", "nowhere/table.md"], "there is no folder nowhere; make it first"),
        (["dapo"], "unexpected extra argument"),
        (["--columns", "reward=r"], "--columns names columns of the file that --advise reads"),
        (["--advise", "nowhere", "--regimes", "int3"], "leave --regimes and --model out"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["compare", *words, "--out", str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert re.search(line, lines[0])
    assert not (tmp_path / "out").exists()


def test_progress_is_weighted_by_cost_and_a_line_per_run_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    time, file = [100.0], io.StringIO()
    bar = Progress(
        console=PlainTextConsole(file=file), disable=True, get_time=lambda: time[0], speed_estimate_period=PACE_SECONDS
    )
    progress = RunsDisplay(bar)
    steps = {"a": 4, "b": 4, "c": 8}
    cells = {name: load_config("laboratory", [f"trainer.steps={count}"]) for name, count in steps.items()}
    monkeypatch.setattr(runner, "cost", lambda config: 10.0 * config.trainer.steps)
    done = RunSummary("done", reward=0.5, seconds=7.0)
    progress.planned(cells, {"c": done})
    assert bar.tasks[0].total == 80  # what c cost is not counted
    for seconds, name, step in ((0, "a", 1), (10, "a", 2), (10, "b", 2)):
        time[0] += seconds
        progress.progress(name, step)
    assert bar.tasks[0].completed == 10 * (2 + 2)
    # 30 units in 20 seconds since the first report; 40 are left.
    assert bar.tasks[0].time_remaining == pytest.approx(math.ceil(40 / 1.5))
    time[0] += 20
    progress.finished("a", done)
    lines = file.getvalue().splitlines()
    assert lines[0] == "3 runs, one thread each; 1 of them finished before"
    # 50 units in 40 seconds.
    assert lines[1] == "2/3  a  reward 0.50  (7 s)  about 16 s left"


def test_a_level_is_the_mean_over_the_steps_that_measured_one() -> None:
    rows = [
        {"k3": 0.1, "ratio_q01": 0.5, "ratio_q99": 1.5},
        {"k3": 0.3, "ratio_q01": 0.9, "ratio_q99": 4.0},
        {"k3": None, "ratio_q01": 1.0, "ratio_q99": 1.0},
    ]
    result = MismatchLevel.of(rows)
    assert result.k3 == pytest.approx(0.2)
    assert result.tail == pytest.approx((0.6931472 + 1.3862944) / 2)
    with pytest.raises(TrimtabError, match="no step has a measured mismatch"):
        MismatchLevel.of(rows[2:])


def test_a_match_is_as_good_as_its_worse_number() -> None:
    target = MismatchLevel(1e-3, 0.2)
    assert MismatchLevel(1.4e-3, 0.2).quality(target) == "close"
    assert MismatchLevel(1e-3, 0.09).quality(target) == "rough"
    assert MismatchLevel(3.1e-3, 0.2).quality(target) == "far"


@pytest.mark.parametrize(
    ("causes", "lagged", "kinds"),
    [
        ((), None, ("noise", "rounding", "staleness")),
        ((), False, ("noise", "rounding")),
        (("quantized",), True, ("noise", "rounding")),
        (("stale", "precision"), None, ("noise", "rounding", "staleness")),
        (("misaligned",), None, ("noise", "rounding", "staleness")),
    ],
)
def test_causes_decide_what_is_tried(causes: tuple[str, ...], lagged: bool | None, kinds: tuple[str, ...]) -> None:
    assert advise.Measure(MismatchLevel(1e-3, 0.1), 11.0, causes, lagged).kinds == kinds


def test_a_run_and_its_match_are_described() -> None:
    result = advise.Measure(MismatchLevel(0.02, 0.6931472), 300.0, ("misaligned",))
    size, fault = advise.describe_run(Path("run"), result)
    assert "k3 0.02 nats per token, ratios out to a factor of 2 " in size
    assert fault.startswith("Fix first, no method corrects it: misaligned")
    far = Candidate("rounding", regime("int8"), MismatchLevel(0.0002, 0.01))
    lines = advise.describe_match(MismatchMatch(result.level, (far,), (far,)), result.length)
    assert "k3 0.01 and tail 0.01 times the run's: far." in lines[0]
    assert "the run's 300 on average" in lines[1]


@pytest.mark.parametrize(
    ("k3", "causes", "words"),
    [
        (0.02, (), ""),
        (0.04, (), "The match with the run is rough"),
        (0.2, (), "is far: take the ranking as a hint"),
        (0.02, ("misaligned",), "First fix what no method corrects: misaligned."),
    ],
)
def test_cautions_depend_on_the_distance_and_the_causes(k3: float, causes: tuple[str, ...], words: str) -> None:
    result = advise.Measure(MismatchLevel(0.02, 0.1), 11.0, causes)
    near = Candidate("noise", regime("int8"), MismatchLevel(k3, 0.1))
    caution = advise.caution(MismatchMatch(result.level, (near,), (near,)), result)
    assert words in caution
    assert bool(caution) == bool(words)


def test_the_level_of_a_run_without_trajectories_comes_from_its_metrics(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("seed = 0\n")
    rows = [
        {
            "step": s,
            "mismatch/k3": 0.1 * s,
            "mismatch/ratio_q01": 0.5,
            "mismatch/ratio_q99": 1.5,
            "length/mean": 10.0 * s,
        }
        | {"lag/max": s}
        for s in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured = advise.measure(tmp_path)
    assert (measured.level.k3, measured.length, measured.lagged) == (pytest.approx(0.15), 15.0, True)


def test_columns_of_another_trainer_are_read_as_by_diagnose(tmp_path: Path) -> None:
    file = tmp_path / "dump.jsonl"
    rows = [{"mu": [-0.5, -1.0], "pi": [-0.5 + 0.01 * i, -1.0]} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(TrimtabError, match="--columns"):
        advise.measure(file)
    measured = advise.measure(file, {"logp_behavior": "mu", "logp_proximal": "pi"})
    x = [0.01 * i for i in range(8)]
    # k3 of log-ratio x is exp(x) - 1 - x; half of the tokens agree exactly.
    assert measured.level.k3 == pytest.approx(sum(math.expm1(v) - v for v in x) / 16, rel=1e-4)
    assert measured.length == 2
