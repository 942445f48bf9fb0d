"""`torchrun -m trimtab train`: a whole run on two ranks, and one that loses a rank."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from tests.support.commands import begin
from tests.support.processes import gone

from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import list_checkpoints
from trimtab.trainer.checkpoint import store
from trimtab.trainer.config import load_config
from trimtab.trainer.export import restore
from trimtab.trainer.run import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETS = [
    "trainer.prompts=8",
    "trainer.samples=4",
    "trainer.micro_batch_tokens=250",
    "eval.problems=8",
    "eval.every=0",
    "checkpoint.every=2",
    "log.trajectories_every=1",
]
BOUND = 120.0  # seconds: a rank that waits for a dead one would wait for days


def start(out: Path, until: str, *sets: str) -> subprocess.Popen[str]:
    """`torchrun --nproc-per-node 2 -m trimtab train laboratory`, its output in one pipe, as far as such a line."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trimtab", "train"]
    words += ["laboratory", "--out", out, *(f"--set={entry}" for entry in (*SETS, *sets))]
    return begin(words, until, stderr=subprocess.STDOUT)


def rank(run: subprocess.Popen[str], number: int) -> psutil.Process:
    for child in psutil.Process(run.pid).children():
        if child.environ().get("RANK") == str(number):
            return child
    raise AssertionError(f"torchrun has no rank {number}")


def test_two_ranks_are_one_run(tmp_path: Path) -> None:
    """One display, one report; the first rewards are those of one process, and its checkpoint is a model."""
    run = start(tmp_path / "two", "objective  token-tis", "trainer.steps=3")
    output = run.communicate()[0]
    assert run.returncode == 0, output[-4000:]
    assert "objective  token-tis" not in output, "it is printed once"
    assert (tmp_path / "two" / "report.html").is_file()
    alone = train(load_config("laboratory", [*SETS, "trainer.steps=1"]), out=tmp_path / "one")
    lines = read_metrics(tmp_path / "two" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for key in ("reward/mean", "tokens/decoded", "eval/sort/before", "trajectories/consumed"):
        assert lines[0][key] == alone.metrics[key], key
    saved = tmp_path / "two" / "checkpoints" / "step-000003"
    parts = sorted(item.name for item in (saved / "model").iterdir())
    assert parts == [f"shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2)]
    model, _, step = restore(tmp_path / "two")
    tensors = store.load(saved).tensors["model"]
    assert step == 3
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(("victim", "sets"), [(1, []), (0, ["trainer.max_lag=2"])])
def test_a_lost_rank_ends_the_others_and_the_run_resumes(tmp_path: Path, victim: int, sets: list[str]) -> None:
    """A follower of a synchronous run, and the leader of an asynchronous one with an engine in a process of its own."""
    out = tmp_path / "run"
    run = start(out, "step 4/", "trainer.steps=1000", *sets)
    ranks = [rank(run, number) for number in (0, 1)]
    family = [*ranks, *(child for process in ranks for child in process.children(recursive=True))]
    if victim == 1:
        # torchrun ends the other rank as well, and may come before that rank has reported what it saw.
        run.send_signal(signal.SIGSTOP)
    ranks[victim].send_signal(signal.SIGKILL)
    if victim == 1:
        assert gone(ranks[0].pid)
        run.send_signal(signal.SIGCONT)
    rest = run.communicate(timeout=BOUND)[0]
    assert run.returncode != 0
    _, alive = psutil.wait_procs(family, timeout=BOUND)
    assert not alive
    if victim == 1:
        assert "another rank is gone" in rest
    before = read_metrics(out / "metrics.jsonl")
    last = store.latest(out / "checkpoints")
    assert last is not None
    assert before[-1]["step"] - 2 <= last.step <= before[-1]["step"]
    target = last.step + 2
    train(load_config("laboratory", [*SETS, *sets, f"trainer.steps={target}"]), out=out, resume=True)
    after = read_metrics(out / "metrics.jsonl")
    assert [line["step"] for line in after] == list(range(1, target + 1))
    assert after[: last.step] == before[: last.step]
    assert json.loads((out / "checkpoints" / f"step-{target:06d}" / "meta.json").read_text())["updates"] == target


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_that_are_stopped_save_the_step_they_finished_together(tmp_path: Path, number: signal.Signals) -> None:
    """The signal reaches torchrun, which hands it to every rank at moments of its own."""
    out = tmp_path / "run"
    run = start(out, "step 2/", "trainer.steps=1000", "checkpoint.every=0")
    ranks = [rank(run, number) for number in (0, 1)]
    run.send_signal(number)
    rest = run.communicate(timeout=BOUND)[0]
    assert run.returncode != 0
    assert not psutil.wait_procs(ranks, timeout=BOUND)[1]
    assert rest.count("trimtab: interrupted; continue with: the same command --resume") == 1
    steps = [line["step"] for line in read_metrics(out / "metrics.jsonl")]
    [saved] = list_checkpoints(out / "checkpoints")
    assert saved.name == f"step-{steps[-1]:06d}"
    train(load_config("laboratory", [*SETS, f"trainer.steps={steps[-1] + 1}"]), out=out, resume=True)
    assert [line["step"] for line in read_metrics(out / "metrics.jsonl")] == [*steps, steps[-1] + 1]
