"""Runs that save themselves: real runs of the laboratory that collapse, lose weights, or are killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from tests.support import forked
from tests.support.faulty_engines import LosesWeights, Wrapped
from tests.support.run_results import Messages, untimed, weights
from torch import Tensor

from trimtab.cli.main import run
from trimtab.errors import DivergedError, TrimtabError
from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import CONFIG, METRICS, checkpoint_folder
from trimtab.trainer import tasks
from trimtab.trainer.checkpoint import run_state, store
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.engines.factory import build_engines
from trimtab.trainer.models.load import LoadedModel
from trimtab.trainer.observer import Sink
from trimtab.trainer.rollout.source import SyncSource
from trimtab.trainer.run import train
from trimtab.types import Engine

pytestmark = pytest.mark.e2e

SMALL = ("trainer.steps=16", "trainer.prompts=4", "trainer.samples=4", "eval.problems=64", "eval.every=4")
SMALL += ("checkpoint.every=0", "log.trajectories_every=0", "trainer.max_idle_steps=0", "objective.name=grpo")
GUARD = ('guard.on=["reward","ess","mismatch","nonfinite"]', "guard.every=4")
COLLAPSES = ("optim.lr=4e-3", "optim.warmup=0")


def recipe(*overrides: str) -> Config:
    return load_config("laboratory", ('unset=["objective"]', *SMALL, *overrides))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose learning rate is far too high. Its metrics are named after a data set: `task.name` may be "hf"."""
    out, build = tmp_path_factory.mktemp("guard") / "saved", tasks.build
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "build", lambda name, **words: replace(cast(Any, build(name, **words)), name="a"))
        train(recipe(*GUARD, *COLLAPSES, "guard.lr_factor=0.1"), out=out)
    return out


def test_a_collapse_is_discarded_and_the_run_learns_with_a_lower_rate(saved: Path) -> None:
    rows = read_metrics(saved / METRICS)
    continued = [row for row in rows if "guard/continues_from" in row]
    assert continued
    assert continued[0]["guard/continues_from"] == 0
    assert "accuracy" in continued[0]["guard/event"]
    discarded = continued[0]["step"] - 1
    assert continued[0]["optim/lr"] == pytest.approx(4e-4)
    assert [row["step"] for row in rows] == list(range(1, rows[-1]["step"] + 1)), "discarded steps stay in the file"
    assert rows[-1]["updates"] == 16, "the steps that count are those of the recipe"
    assert rows[-1]["step"] >= 16 + discarded
    assert rows[discarded - 1]["eval/a/greedy"] < rows[-1]["eval/a/greedy"]


def test_without_a_sign_the_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    for name, guard in (("with", GUARD), ("without", ())):
        train(recipe(*guard, "trainer.steps=6"), out=tmp_path / name)
    assert untimed(tmp_path / "with") == untimed(tmp_path / "without")
    one, other = weights(tmp_path / "with"), weights(tmp_path / "without")
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_after_so_many_returns_it_stops_with_the_last_good_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, sent = tmp_path / "run", list[tuple[int, int]]()
    sink = Sink(lambda step, metrics: sent.append((step, metrics["step"])), lambda: None)
    monkeypatch.setattr("trimtab.trainer.run.open_sinks", lambda *_, **__: [sink])
    sets = (*GUARD, *COLLAPSES, "guard.lr_factor=0.99")
    with pytest.raises(DivergedError, match=r"the guard has returned 1 times.*step-\d+ has the last policy") as ended:
        train(recipe(*sets, "guard.times=1"), out=out)
    rows = read_metrics(out / METRICS)
    assert rows[-1]["guard/returns"] == 2
    restored = store.latest(out / "checkpoints")
    assert restored is not None
    assert restored.step == rows[-1]["step"]
    assert rows[-1]["eval/sort/greedy"] == rows[0]["eval/sort/before"], "the policy before training is back"
    assert all(step == logged for step, logged in sent)
    with pytest.raises(DivergedError, match=re.escape(str(ended.value))):
        train(recipe(*sets, "guard.times=1"), out=out, resume=True)
    assert run(["train", str(out / "config.toml"), "--out", str(out), "--resume"]) == 3, "a job script sees it"
    assert read_metrics(out / METRICS) == rows, "it does not go on"
    train(recipe(*GUARD, *COLLAPSES, "guard.times=2", "guard.lr_factor=0.1"), out=out, resume=True)
    assert read_metrics(out / METRICS)[-1]["updates"] == 16


def test_a_guard_that_returned_cannot_be_left_out_later(saved: Path) -> None:
    before = {name: (saved / name).read_bytes() for name in (CONFIG, METRICS)}
    with pytest.raises(TrimtabError, match=r"has returned \d times.*resume it with guard\.on"):
        train(recipe(*COLLAPSES, "trainer.steps=30"), out=saved, resume=True)
    assert {name: (saved / name).read_bytes() for name in before} == before, "a refusal changes nothing"
    train(recipe(*GUARD, *COLLAPSES, "guard.lr_factor=0.1", "eval.every=8"), out=saved, resume=True)
    assert "every = 8" in (saved / CONFIG).read_text()


def losing(first: int, *, for_good: bool, says: bool = False) -> Any:
    def build(config: Config, loaded: LoadedModel, folder: Path) -> Sequence[Engine]:
        (engine,) = build_engines(config, loaded, folder, lambda _: None)
        return [LosesWeights(engine, first, for_good=for_good, says=says)]

    return build


SLOW = pytest.mark.slow
LOSING = ("trainer.steps=16", "eval.every=0", "optim.lr=1e-4", "optim.warmup=0")
AHEAD = ("engine.workers=1", "trainer.max_lag=2", "objective.name=token-tis")
COARSE = ("engine.quantize=int4", "engine.noise=0.1")


@pytest.mark.parametrize(
    ("sets", "says", "steps"),
    [
        pytest.param((), False, range(10, 14), id="one"),
        pytest.param(("engine.workers=1", "trainer.max_lag=0"), False, range(10, 14), id="apart", marks=SLOW),
        pytest.param((), True, [9], id="exact"),
        pytest.param(COARSE, True, [9], id="coarse"),
        pytest.param(AHEAD, True, range(9, 12), id="ahead", marks=SLOW),
    ],
)
def test_lost_weights_are_published_again_without_a_return(
    tmp_path: Path, sets: tuple[str, ...], says: bool, steps: Sequence[int]
) -> None:
    """At once where the engine says which weights it has, else when the mismatch shows it."""
    observer, config = Messages(), recipe(*GUARD, *LOSING, *sets)
    train(config, out=tmp_path / "run", engines=losing(8, for_good=False, says=says), observer=observer)
    rows = read_metrics(tmp_path / "run" / METRICS)
    assert [row["step"] for row in rows] == list(range(1, 17))
    assert not any("guard/returns" in row for row in rows)
    (repaired,) = [row for row in rows if "guard/event" in row]
    assert "published the weights again" in repaired["guard/event"]
    assert ("is not that of version 8" in repaired["guard/event"]) == says
    assert repaired["step"] in steps
    assert says or repaired["mismatch/k3"] < rows[repaired["step"] - 2]["mismatch/k3"] / 100
    assert sum("published the weights again" in line for line in observer.lines) == 1


def test_weights_that_are_lost_for_good_are_a_reason_to_return(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="the guard has returned 0 times"):
        train(recipe(*GUARD, *LOSING, "guard.times=0"), out=tmp_path / "run", engines=losing(8, for_good=True))
    assert "publication" in read_metrics(tmp_path / "run" / METRICS)[-1]["guard/event"]


def test_an_engine_that_says_twice_that_it_has_not_the_weights_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="did not reach it; start the engine again"):
        train(recipe(*GUARD, *LOSING), out=tmp_path / "run", engines=losing(8, for_good=True, says=True))


class FailsInTraining(Wrapped):
    """Answers evaluations, and raises where a prompt has several samples."""

    def generate(self, prompts: Any, samples: int, sampling: Any, **rest: Any) -> Any:
        if samples > 1:
            raise TrimtabError("the engine is broken")
        return self.engine.generate(prompts, samples, sampling, **rest)


def test_a_run_whose_first_step_fails_leaves_a_folder_that_can_be_used_again(tmp_path: Path) -> None:
    def build(config: Config, loaded: LoadedModel, folder: Path) -> Sequence[Engine]:
        return [FailsInTraining(engine) for engine in build_engines(config, loaded, folder, lambda _: None)]

    config = recipe(*GUARD, "trainer.steps=1", "eval.problems=4")
    with pytest.raises(TrimtabError, match="the engine is broken"):
        train(config, out=tmp_path / "run", engines=build)
    train(config, out=tmp_path / "run")


def becomes_infinite(monkeypatch: pytest.MonkeyPatch, calls: Container[int]) -> None:
    """Plants a fault: the losses of these calls are infinite."""
    from trimtab.trainer.learner import Learner

    own, count = Learner._step_if_finite, iter(range(10_000))

    def planted(self: Learner, loss_sum: Tensor, stats: Any) -> None:
        own(self, loss_sum + torch.inf if next(count) in calls else loss_sum, stats)

    monkeypatch.setattr(Learner, "_step_if_finite", planted)


def test_losses_that_are_not_finite_return_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    becomes_infinite(monkeypatch, range(6, 9))  # three in a row, which ends a run without a guard
    train(recipe(*GUARD, "trainer.steps=10", "eval.every=0"), out=tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / METRICS)
    (continued,) = [row for row in rows if "guard/continues_from" in row]
    assert "nonfinite" in continued["guard/event"]
    assert rows[-1]["step"] == 10, "no finished step is discarded: skipped updates changed nothing"
    assert rows[-1]["updates"] == 8


def test_a_second_return_keeps_the_line_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    becomes_infinite(monkeypatch, {*range(6, 9), *range(10, 13)})  # after 6 and after 7 of 12 updates
    train(recipe(*GUARD, "trainer.steps=12", "eval.every=0", "optim.warmup=0"), out=tmp_path / "run")
    rates = [row["optim/lr"] for row in read_metrics(tmp_path / "run" / METRICS)]
    assert [rates[5], rates[8], rates[11]] == pytest.approx([1e-4, 1e-4 / 4, 1e-4 / 16 * 5 / 6])


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, observer = run_state.go_back, Messages()

    def from_damaged(trainer: Any, steps: Sequence[int], halvings: int) -> Any:
        file = checkpoint_folder(trainer.run.checkpoint_root, max(steps)) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        return own(trainer, steps, halvings)

    monkeypatch.setattr(run_state, "go_back", from_damaged)
    becomes_infinite(monkeypatch, range(6, 9))
    train(recipe(*GUARD, "trainer.steps=10", "eval.every=0"), out=tmp_path / "run", observer=observer)
    assert sum("step-000008 is damaged" in line and "using step-000004" in line for line in observer.lines) == 1
    rows = read_metrics(tmp_path / "run" / METRICS)
    (continued,) = [row for row in rows if "guard/continues_from" in row]
    assert continued["guard/continues_from"] == 4
    assert rows[-1]["step"] == 14, "four finished steps are discarded"


def test_losses_that_stay_infinite_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    becomes_infinite(monkeypatch, range(6, 10_000))
    with pytest.raises(DivergedError, match="the guard has returned 3 times"):
        train(recipe(*GUARD, "trainer.steps=30", "eval.every=0"), out=tmp_path / "run")


def test_a_return_that_no_step_followed_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    becomes_infinite(monkeypatch, range(16, 19))  # right after the return at step 4
    out = tmp_path / "run"
    train(recipe(*GUARD, *COLLAPSES, "guard.lr_factor=0.1", "trainer.minibatches=4", "trainer.steps=4"), out=out)
    rows = read_metrics(out / METRICS)
    assert rows[4]["guard/returns"] == 2
    assert rows[4]["guard/continues_from"] == 0, "of the policy that step 4 had got back"
    assert "accuracy" in rows[4]["guard/event"]
    assert "nonfinite" in rows[4]["guard/event"]


IDLE = ("trainer.max_idle_steps=2", "checkpoint.every=1", "eval.every=0", "trainer.steps=8")


@pytest.mark.slow
@pytest.mark.parametrize("sets", [("trainer.steps=10", "eval.every=0"), (*COLLAPSES, *IDLE)], ids=["nonfinite", "idle"])
def test_killed_before_a_return_it_returns_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...]
) -> None:
    """A failed step, and one without a signal, are saved by a run without a guard: the return must not be lost."""
    config = recipe(*GUARD, "guard.lr_factor=0.1", *sets)
    for name in ("whole", "killed"):
        with monkeypatch.context() as planted:
            if COLLAPSES[0] not in sets:
                becomes_infinite(planted, range(5, 8))
            if name == "killed":
                with planted.context() as dies:
                    dies.setattr(run_state, "go_back", Mock(side_effect=InterruptedError))
                    with pytest.raises(InterruptedError):
                        train(config, out=tmp_path / name)
            train(config, out=tmp_path / name, resume=name == "killed")
    assert any("guard/continues_from" in row for row in read_metrics(tmp_path / "whole" / METRICS))
    assert untimed(tmp_path / "killed") == untimed(tmp_path / "whole")


def guarded_in_child(out: str, resume: bool, dies_in_return: bool) -> None:
    if dies_in_return:  # the weights are restored, and nothing is saved yet
        SyncSource.restore = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # pyright: ignore[reportAttributeAccessIssue]
    train(recipe(*GUARD, *COLLAPSES, "guard.lr_factor=0.1", "trainer.minibatches=2"), out=out, resume=resume)


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trimtab.trainer.run"])

    def child(out: Path, *, dies_in_return: bool = False) -> Any:
        resume = (out / "config.toml").exists()
        process = context.Process(target=guarded_in_child, args=(str(out), resume, dies_in_return))
        process.start()
        return process

    def exit_code(process: Any) -> int:
        process.join()
        return process.exitcode

    whole, killed, rng = tmp_path / "whole", tmp_path / "killed", random.Random(1)
    assert exit_code(child(whole)) == 0
    assert exit_code(child(killed, dies_in_return=True)) == -signal.SIGKILL
    for _ in range(9):
        process = child(killed)
        before = (killed / METRICS).stat().st_size if (killed / METRICS).exists() else 0
        steps = rng.randint(0, 3)
        while process.exitcode is None and steps:
            process.join(timeout=0.005)
            size = (killed / METRICS).stat().st_size if (killed / METRICS).exists() else 0
            steps, before = steps - (size > before), size
        time.sleep(rng.uniform(0.0, 0.08))
        assert process.exitcode is None, "there must be something to kill"
        process.kill()
        process.join()
    assert exit_code(child(killed)) == 0
    assert untimed(killed) == untimed(whole)
    one, other = weights(killed), weights(whole)
    assert all(torch.equal(one[name], other[name]) for name in other)


THREADED = ("guard.lr_factor=0.1", "trainer.max_lag=2", "engine.workers=1")


@pytest.mark.slow
def test_a_run_whose_engine_has_a_thread_returns_too(tmp_path: Path) -> None:
    """Groups that were sampled ahead, by the broken policy, are dropped; the bound on the age of tokens is halved."""
    out = tmp_path / "run"
    train(recipe(*GUARD, *COLLAPSES, "objective.name=token-tis", *THREADED), out=out)
    rows = read_metrics(out / METRICS)
    first = next(row["step"] for row in rows if "guard/continues_from" in row)
    assert max(row["lag/max"] for row in rows[first - 1 :]) <= 1, "half of the recipe's 2"
    assert rows[-1]["updates"] == 16


@pytest.mark.slow
def test_two_ranks_return_together(python: forked.Run, tmp_path: Path) -> None:
    sets = (*SMALL, *GUARD, *COLLAPSES, "guard.lr_factor=0.1", "trainer.micro_batch_tokens=120")
    changes = [f"--set={entry}" for entry in sets]
    run = python("-m", "trimtab", "train", "laboratory", "--out", tmp_path / "run", *changes, ranks=2)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    rows = read_metrics(tmp_path / "run" / METRICS)
    assert run.stdout.count("returned to the policy of step") == max(row.get("guard/returns", 0) for row in rows) >= 1
    assert rows[-1]["updates"] == 16
