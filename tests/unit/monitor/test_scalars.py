"""Scalars that a run logged: what is read, which framework and quantity they are, and the alarms of their curves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.noisy_batch import batch
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from trimtab.cli import main
from trimtab.errors import TrimtabError
from trimtab.monitor import Alarm, Monitor
from trimtab.monitor.log_alarms import LogAlarms
from trimtab.monitor.scalars import K3, METRICS, judge, known_scalars, read_scalars
from trimtab.monitor.scalars_text import lines

FRAMEWORKS = sorted({scalar.framework for scalar in known_scalars()})


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_alarms_are_those_of_the_monitor_that_wrote_the_scalars(tmp_path: Path) -> None:
    raised: list[Alarm] = []
    monitor = Monitor(out=tmp_path, on_alarm=raised.append)
    for step in range(30):
        monitor.observe(**batch(step, drift=0.0 if step < 20 else 0.1 * (step - 19)))
    monitor.close()
    found = judge(read_scalars(tmp_path / "metrics.jsonl"))
    assert found.framework == "trimtab"
    assert found.steps == 30
    kept = {alarm.name: alarm.step for alarm in raised if alarm.name != "mean-ratio"}
    assert kept == {alarm.name: alarm.step for alarm in found.alarms}
    assert "undelivered" in kept


@pytest.mark.parametrize(
    "scalar", [s for s in known_scalars() if s.quantity in K3], ids=lambda s: f"{s.framework}:{s.name}"
)
def test_every_scalar_of_a_mismatch_gives_the_k3_of_gaussian_noise(scalar: Any, tmp_path: Path) -> None:
    """Noise of .1 a token, of which the formula of each quantity is known: k3 is .005 within its approximation."""
    d = 0.1 * torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logged = {
        "k3": (torch.expm1(d) - d).mean(),
        "k1": 0.005,  # its expectation where q is normalized: E[-d] = k3
        "abs_difference": d.abs().mean(),
        "k2": d.square().mean() / 2,
        "mult_prob_error": d.abs().exp().mean(),
    }[scalar.quantity]
    found = judge(read_scalars(write(tmp_path / "log.jsonl", [{"step": 1, f"train/{scalar.name}": float(logged)}])))
    k3 = K3[found.mismatch.scalar.quantity][1](found.mismatch.last)
    assert k3 == pytest.approx(0.005, rel=0.02 if scalar.quantity in ("k3", "k1", "k2") else 0.4)


def test_the_table_is_complete_and_consistent() -> None:
    assert len(FRAMEWORKS) >= 11
    allowed = {*K3, *METRICS, "ratio_mean", "ratio_max", "prob_difference", "entropy", "other"}
    for scalar in known_scalars():
        assert scalar.quantity in allowed, scalar
        assert scalar.formula, scalar
        assert scalar.source, scalar
    pairs = [(scalar.framework, scalar.name) for scalar in known_scalars()]
    assert len(set(pairs)) == len(pairs)


def test_steps_are_found_merged_and_numbered(tmp_path: Path) -> None:
    rows = [
        {"_step": 3, "mismatch/k3": 1e-4},
        {"_step": 3, "grad_norm": 2.0, "text": "x"},
        {"_step": 4, "mismatch/k3": None},
    ]
    assert read_scalars(write(tmp_path / "a.jsonl", rows)) == [
        {"_step": 3, "step": 3, "mismatch/k3": 1e-4, "grad_norm": 2.0},
        {"_step": 4, "step": 4},
    ]
    nested = [{"step": 7, "data": {"rollout_corr/k3_kl": 2e-3}}]  # as verl's file logger writes it
    (row,) = read_scalars(write(tmp_path / "c.jsonl", nested))
    assert row == {"step": 7, "data/rollout_corr/k3_kl": 2e-3}
    assert judge([row]).framework == "verl"
    assert [row["step"] for row in read_scalars(write(tmp_path / "b.jsonl", [{"a": 1}, {"a": 2}]))] == [0, 1]


def test_csv_and_tensorboard_give_the_same_report_as_json(tmp_path: Path) -> None:
    k3 = [1e-4 * (1 + step % 3) for step in range(12)] + [2e-2, 3e-2]
    whole = judge(
        read_scalars(write(tmp_path / "log.jsonl", [{"step": i, "mismatch/k3": v} for i, v in enumerate(k3)]))
    )
    table = tmp_path / "log.csv"
    table.write_text("Step,mismatch/k3\n" + "".join(f"{i},{v}\n" for i, v in enumerate(k3)))
    assert judge(read_scalars(table)) == whole
    with SummaryWriter(str(tmp_path / "events")) as writer:
        for step, value in enumerate(k3):
            writer.add_scalar("mismatch/k3", value, step)
    events = judge(read_scalars(tmp_path / "events"))
    assert events.mismatch.values == pytest.approx(whole.mismatch.values)
    assert [(a.name, a.step) for a in events.alarms] == [(a.name, a.step) for a in whole.alarms] == [("k3-jump", 13)]


def test_a_restart_shows_k3_before_and_after(tmp_path: Path) -> None:
    steps = [(1, 1e-3), (2, 2e-3), (3, 4e-3), (3, 1e-4), (4, 2e-4)]
    rows = [row for step, k3 in steps for row in ({"step": step, "mismatch/k3": k3}, {"step": step, "lr": 1.0})]
    rows[6] = {"step": 2, "mismatch/k3": 1e-4}
    rows[7] = {"step": 2, "lr": 1.0}
    (restart,) = judge(read_scalars(write(tmp_path / "log.jsonl", rows))).restarts
    assert (restart.step, restart.before, restart.after) == (2, 4e-3, 1e-4)


def test_a_callback_of_transformers_raises_the_same_alarms_once() -> None:
    difference = [0.01] * 30 + [0.2] * 10
    logs = [{"sampling/sampling_logp_difference/mean": value, "loss": 1.0} for value in difference]
    raised: list[Alarm] = []
    state = TrainerState(is_world_process_zero=True)
    handler = CallbackHandler([LogAlarms(raised.append)], None, None, None, None)
    for step, row in enumerate(logs):
        state.global_step = step
        handler.on_log(None, state, TrainerControl(), logs=row)
        handler.on_log(None, state, TrainerControl(), logs={"eval_loss": 1.0})
    expected = judge([{**row, "step": step} for step, row in enumerate(logs)]).alarms
    assert [(alarm.name, alarm.step) for alarm in raised] == [(alarm.name, alarm.step) for alarm in expected]
    assert ("k3-jump", 31) in [(alarm.name, alarm.step) for alarm in raised]


def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="no scalar measures the mismatch; known are"):
        judge(read_scalars(write(tmp_path / "a.jsonl", [{"step": 1, "loss": 2.0}])))
    for name, text in (("b.jsonl", "no json"), ("c.jsonl", "[1, 2]"), ("d.jsonl", "\xff\xfe")):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
        with pytest.raises(TrimtabError, match=name):
            read_scalars(tmp_path / name)
    with pytest.raises(TrimtabError, match=r"missing\.jsonl"):
        read_scalars(tmp_path / "missing.jsonl")


def test_steps_that_are_not_finite_are_left_out_and_said(tmp_path: Path) -> None:
    rows = [{"step": i, "rollout_corr/k3_kl": v} for i, v in enumerate([1e-3, math.inf, math.nan, 3e-3])]
    found = judge(read_scalars(write(tmp_path / "log.jsonl", rows)))
    assert found.mismatch.values == (1e-3, 3e-3)
    nothing = judge(read_scalars(write(tmp_path / "log.jsonl", rows[1:3])))
    assert (nothing.steps, nothing.mismatch.not_finite) == (0, 2)
    assert list(lines(nothing))
    assert any("rollout_corr/k3_kl is not finite at 2 steps" in line for line in lines(found))


def test_a_csv_file_of_wandb_has_the_run_in_its_names(tmp_path: Path) -> None:
    table = tmp_path / "wandb.csv"
    names = "".join(f',"my-run - rollout_corr/k3_kl{end}"' for end in ("", "__MIN", "__MAX"))
    table.write_text(f'"Step"{names}\n"1","0.002","0.001","0.003"\n"2","0.004","0.001","0.009"\n')
    found = judge(read_scalars(table))
    assert found.framework == "verl"
    assert found.mismatch.values == (0.002, 0.004)


def test_a_mismatch_of_exactly_zero_is_said(tmp_path: Path) -> None:
    name = "train/train_rollout_kl"
    for value, said in ((0.0, True), (1e-12, False)):
        found = judge(read_scalars(write(tmp_path / "log.jsonl", [{"step": 0, name: 0.0}, {"step": 1, name: value}])))
        assert any("0 at every step" in line for line in lines(found)) is said


def test_the_command_prints_curves_alarms_and_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"step": step, "mismatch/k3": 1e-4 if step < 10 else 2e-2, "mismatch/ess_token": 0.9} for step in range(12)]
    log = str(write(tmp_path / "log.jsonl", rows))
    assert main.run(["diagnose", "--scalars", log]) == 0
    text = capsys.readouterr().out
    assert "step 11: k3-jump: k3 2.0e-02 per token" in text
    assert "limits    Scalars are means over the tokens of a step" in text
    assert main.run(["diagnose", "--scalars", log, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [alarm["name"] for alarm in values["alarms"]] == ["k3-jump"]
    assert {row["name"] for row in values["scalars"]} == {"mismatch/k3", "mismatch/ess_token"}
    assert main.run(["diagnose", log, "--scalars", log]) == 2
