"""Scalars that a run logged: what is read, which framework and quantity they are, and the alarms of their curves."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.commands import Printed
from tests.support.noisy_batch import batch
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from trimtab.cli import main
from trimtab.errors import TrimtabError
from trimtab.monitor import Alarm, Monitor
from trimtab.monitor.curves import K3, known_scalars
from trimtab.monitor.log_alarms import LogAlarms
from trimtab.monitor.scalar_files import find_scalars, read_scalars
from trimtab.monitor.scalars import METRICS, judge, terminal_lines

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
    assert judge([{"step": 1, "age": 0.0, "actor/grad_norm": 1.0}]).framework == "verl", "of most characters"
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
    advice = {alarm.name: alarm.next_step for alarm in expected}
    assert [(alarm.name, alarm.step) for alarm in raised] == [(alarm.name, alarm.step) for alarm in expected]
    assert {alarm.name: alarm.next_step for alarm in raised} == advice
    assert ("k3-jump", 31) in [(alarm.name, alarm.step) for alarm in raised]
    assert "run `trimtab diagnose` on log-probs of these steps" in advice.values()


def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="no scalar is known; those that measure the mismatch are"):
        judge(read_scalars(write(tmp_path / "a.jsonl", [{"step": 1, "loss": 2.0}])))
    with pytest.raises(TrimtabError, match=r"missing\.jsonl"):
        read_scalars(tmp_path / "missing.jsonl")


def test_steps_that_are_not_finite_are_left_out_and_said(tmp_path: Path) -> None:
    rows = [{"step": i, "rollout_corr/k3_kl": v} for i, v in enumerate([1e-3, math.inf, math.nan, 3e-3])]
    found = judge(read_scalars(write(tmp_path / "log.jsonl", rows)))
    assert found.mismatch.values == (1e-3, 3e-3)
    nothing = judge(read_scalars(write(tmp_path / "log.jsonl", rows[1:3])))
    assert (nothing.steps, nothing.mismatch.not_finite) == (0, 2)
    assert list(terminal_lines(nothing, tmp_path))
    assert any("rollout_corr/k3_kl is not finite at 2 of 4 steps" in line for line in terminal_lines(found, tmp_path))


def test_a_mismatch_of_exactly_zero_is_said(tmp_path: Path) -> None:
    name = "train/train_rollout_kl"
    for value, said in ((0.0, True), (1e-12, False)):
        found = judge(read_scalars(write(tmp_path / "log.jsonl", [{"step": 0, name: 0.0}, {"step": 1, name: value}])))
        assert any("0 at every step" in line for line in terminal_lines(found, tmp_path)) is said


def test_the_command_prints_curves_alarms_and_limits(tmp_path: Path, printed: Printed) -> None:
    rows = [{"step": step, "mismatch/k3": 1e-4 if step < 10 else 2e-2, "mismatch/ess_token": 0.9} for step in range(12)]
    log = str(write(tmp_path / "log.jsonl", rows))
    text = printed("diagnose", "--scalars", log)
    assert "step 11: k3-jump: k3 0.02 per token" in text
    assert "limits    Scalars are means over the tokens of a step" in text
    values = json.loads(printed("diagnose", "--scalars", log, "--json"))
    assert [alarm["name"] for alarm in values["alarms"]] == ["k3-jump"]
    assert {row["name"] for row in values["scalars"]} == {"mismatch/k3", "mismatch/ess_token"}
    assert main.run(["diagnose", log, "--scalars", log]) == 2


def log_history(lengths: Iterable[float], clipped: Iterable[float]) -> list[dict[str, Any]]:
    """What TRL 1.16's GRPOTrainer without vLLM leaves in trainer_state.json, with an evaluation and a summary."""
    rows: list[dict[str, Any]] = []
    for step, (length, share) in enumerate(zip(lengths, clipped, strict=True), start=1):
        ends = ("_length", "_terminated_length")
        kinds = [f"completions/{kind}{end}" for kind in ("max", "mean", "min") for end in ends]
        completions = dict.fromkeys(kinds, length) | {"completions/clipped_ratio": share}
        update = {"epoch": step / 100, "grad_norm": 0.4, "learning_rate": 1e-6, "loss": 0.01}
        reward = {"reward": 0.5, "reward_std": 0.1, "rewards/digits/mean": 0.5, "rewards/digits/std": 0.1}
        rows.append(update | completions | reward | {"num_tokens": 100.0 * step, "entropy": 1.0, "step": step})
        if step % 10 == 0:
            evaluated = {f"eval_{name}": 900.0 if "length" in name else 0.9 for name in completions}
            rows.append(evaluated | {"epoch": step / 100, "eval_loss": 0.1, "eval_reward": 9.0, "step": step})
    summary = {"total_flos": 0.0, "train_loss": 0.01, "train_runtime": 9.0, "train_steps_per_second": 1.0}
    return [*rows, summary | {"epoch": 1.0, "step": len([row for row in rows if "loss" in row])}]


def trainer_state(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"hidden_size": 64}')
    state = {"best_metric": None, "global_step": rows[-1]["step"], "log_history": rows, "stateful_callbacks": {}}
    (folder / "trainer_state.json").write_text(json.dumps(state, indent=2, sort_keys=True))
    return folder / "trainer_state.json"


def test_a_trainer_state_without_a_mismatch_is_judged_by_length_truncation_and_gradient(
    tmp_path: Path, printed: Printed
) -> None:
    state = trainer_state(tmp_path, log_history([100.0] * 15 + [300.0] * 15, [0.0] * 15 + [0.5] * 15))
    rows = read_scalars(state)
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[-1]["train_runtime"] == 9.0
    found = judge(rows)
    assert (found.framework, found.steps, found.mismatch) == ("trl", 30, None)
    assert {alarm.name: alarm.step for alarm in found.alarms} == {"truncation": 18, "length": 18}
    curves = {curve.logged_as: curve for curve in found.curves}
    assert curves["reward"].scalar.quantity == "reward"
    assert curves["completions/mean_length"].values == (100.0,) * 15 + (300.0,) * 15  # the evaluations are not in it
    text = printed("diagnose", "--scalars", str(state))
    assert "no scalar measures the mismatch of trainer and sampler: trl logs it as " in text
    assert "sampling/sampling_logp_difference/mean with use_vllm=True" in text


@pytest.mark.parametrize(
    ("steps", "norm", "expected"),
    [
        (2, 0.4, ["note      too few steps to judge (2, the rules"]),
        (30, 0.4, ["note      too few steps to judge by every rule (30, "]),
        (40, 0.4, ["ok        no alarm"]),
        (50, math.nan, ["fail      grad_norm is not finite at 50 of 50", "note      too few steps to judge (0, "]),
    ],
)
def test_no_alarm_is_said_only_where_the_rules_could_judge(
    steps: int, norm: float, expected: list[str], tmp_path: Path
) -> None:
    found = judge(read_scalars(write(tmp_path / "log.jsonl", [{"step": i, "grad_norm": norm} for i in range(steps)])))
    said = list(terminal_lines(found, tmp_path))
    judged = [line for line in said if line.split()[0] in ("ok", "note", "fail")]
    assert [line.startswith(start) for line, start in zip(judged, expected, strict=True)] == [True] * len(expected)
    assert any("not judged, because it is not logged: length" in line for line in said)


def test_an_evaluation_under_a_name_of_training_is_another_scalar(tmp_path: Path) -> None:
    """As W&B and TensorBoard get them from transformers."""
    rows = [{"train/grad_norm": 1.0, "train/completions/mean_length": 100.0, "eval/completions/mean_length": 900.0}]
    (curve,) = [c for c in judge(read_scalars(write(tmp_path / "a.jsonl", rows))).curves if "length" in c.logged_as]
    assert curve.values == (100.0,)
    table = tmp_path / "a.csv"
    table.write_text("Step,test - eval/completions/mean_length,test - train/completions/mean_length\n1,900,100\n")
    assert [c.values for c in judge(read_scalars(table)).curves] == [(100.0,)]


def test_the_extremes_that_wandb_exports_beside_a_scalar_are_not_the_scalar(tmp_path: Path) -> None:
    """Its CSV has three columns of each curve: the mean of grouped runs, and the smallest and largest of them."""
    columns = ["Step", *(f"run - mismatch/k3{end}" for end in ("__MIN", "", "__MAX"))]
    table = tmp_path / "wandb.csv"
    table.write_text("\n".join([",".join(columns), *(f"{step},1e-5,{1e-3 * step},9" for step in (1, 2, 3))]))
    found = judge(read_scalars(table))
    assert [(curve.logged_as, curve.values) for curve in found.curves] == [("run - mismatch/k3", (1e-3, 2e-3, 3e-3))]
    table.write_text(",".join([columns[0], columns[1], columns[3]]) + "\n1,1e-5,9\n")
    with pytest.raises(TrimtabError):
        judge(read_scalars(table))


def test_the_newest_state_of_a_folder_is_read_and_named(tmp_path: Path, printed: Printed) -> None:
    states = {
        number: trainer_state(tmp_path / f"checkpoint-{number}", log_history([50.0] * number, [0.0] * number))
        for number in (9, 10)
    }
    assert find_scalars(tmp_path) == states[10]
    own = trainer_state(tmp_path, log_history([50.0] * 9, [0.0] * 9))
    assert find_scalars(tmp_path) == states[10]  # an earlier run left its own
    trainer_state(tmp_path, log_history([50.0] * 11, [0.0] * 11))
    assert json.loads(printed("diagnose", "--scalars", str(tmp_path), "--json"))["read"] == str(own)


def test_a_folder_is_the_one_file_of_scalars_in_it(tmp_path: Path) -> None:
    rows = [{"step": step, "rollout_corr/k3_kl": 1e-3} for step in range(3)]
    with pytest.raises(TrimtabError, match="holds no file of known scalars"):
        find_scalars(tmp_path)
    array = tmp_path / "history.json"
    array.write_text(json.dumps(rows))
    (tmp_path / "config.json").write_text('{"step": 3}')
    assert find_scalars(tmp_path) == array
    assert judge(read_scalars(array)) == judge(read_scalars(write(tmp_path / "lines.txt", rows)))
    write(tmp_path / "metrics.jsonl", rows)
    with pytest.raises(TrimtabError, match=r"holds 2 files of scalars \(history.json, metrics.jsonl\): name one"):
        find_scalars(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        *((name, text, name) for name, text in (("a.jsonl", "no json"), ("b.jsonl", "[1, 2]"), ("c.jsonl", "\xff"))),
        ("deep.jsonl", "[" * 100_000, "nested too deeply"),
        ("deep_line.jsonl", '{"step": 1}\n{"a": ' + "[" * 100_000 + "\n", "nested too deeply"),
        ("digits.jsonl", '{"step": 1' + "0" * 400 + "}", "step is inf"),
        ("more_digits.jsonl", '{"step": 1, "grad_norm": 1' + "0" * 5000 + "}", "not readable as JSON"),
        ("infinite.csv", "step,grad_norm\ninf,1\n", "step is inf"),
        ("null.csv", "step,grad_norm\n1,\x00\n", ""),
        ("empty.jsonl", "", "no step yet"),
    ],
)
def test_a_hostile_file_is_one_line(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(TrimtabError) as error:
        judge(read_scalars(tmp_path / name))
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_number_of_400_digits_or_a_long_field_is_not_a_finite_scalar(tmp_path: Path) -> None:
    rows = [{"step": 1, "rollout_corr/k3_kl": 1e-3}, {"step": 2, "rollout_corr/k3_kl": 10**400}]
    rows += [{"step": 3, "actor/grad_norm": 10**400, "rollout_corr/k3_kl": 2e-3}]
    found = judge(read_scalars(write(tmp_path / "a.jsonl", rows)))
    assert (found.steps, found.mismatch.values, found.mismatch.not_finite) == (2, (1e-3, 2e-3), 1)
    square = [{"step": 1, "train_rollout_logprob_abs_diff": 1e200}]  # its square is not
    assert judge(read_scalars(write(tmp_path / "b.jsonl", square))).steps == 0
    deep: dict[str, Any] = {"grad_norm": 1.0}
    for _ in range(300):
        deep = {"a": deep}
    assert set(read_scalars(write(tmp_path / "c.jsonl", [{"step": 1, "x": deep}]))[0]) == {"step"}
    table = tmp_path / "d.csv"
    table.write_text(f"Step,notes,actor/grad_norm\n1,{'x' * 200_000},2.0\n")
    assert judge(read_scalars(table)).curves[0].values == (2.0,)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/zero")):
        with pytest.raises(TrimtabError, match="it is not a regular file"):
            read_scalars(path)
    (tmp_path / "events").mkdir()
    os.mkfifo(tmp_path / "events" / "events.out.tfevents.1")
    with pytest.raises(TrimtabError, match="it is not a regular file"):
        read_scalars(find_scalars(tmp_path / "events"))


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("run-.-tag-train_sampling_sampling_logp_difference_mean.csv", "sampling/sampling_logp_difference/mean"),
        ("mismatch_k3.csv", "mismatch/k3"),
        ("verl_rollout_corr_k3_kl.csv", "rollout_corr/k3_kl"),
        ("mismatch.csv", None),
        ("xkl.csv", None),
    ],
)
def test_a_curve_of_tensorboard_has_the_name_of_its_file(tmp_path: Path, name: str, read: str | None) -> None:
    path = tmp_path / name
    path.write_text("Wall time,Step,Value\n1790000041.5,1,0.25\n1790000083.0,2,0.5\n")
    if read is None:
        with pytest.raises(TrimtabError, match="'Value' has no name of a metric"):
            read_scalars(path)
    else:
        assert read_scalars(path) == [{"step": 1, read: 0.25}, {"step": 2, read: 0.5}]
