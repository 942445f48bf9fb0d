"""Log-probs as JSON lines: which folder they go to, and what is in a row."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.adapter_calls import CALLS

import trimtab
from trimtab.adapters import recording
from trimtab.adapters.recording import Dump, response_rows
from trimtab.errors import TrimtabError, TrimtabWarning
from trimtab.objectives import PolicyLogps, correct


@pytest.mark.parametrize("trainer", ["skyrl", "openrlhf", "tinker"])
def test_the_log_probs_of_every_call_are_diagnosed(trainer: str, tmp_path: Path) -> None:
    make = torch.Generator().manual_seed(0)
    behavior = -torch.rand(30, 6, generator=make) - 0.1
    old = behavior + 0.05 * torch.randn(30, 6, generator=make)
    mask = torch.arange(6) < torch.randint(2, 7, (30,), generator=make)[:, None]
    advantage, folder = torch.randn(30, 1, generator=make).expand(30, 6), str(tmp_path / "logps")
    batch = {"behavior": behavior, "proximal": old, "mask": mask, "advantage": advantage}
    CALLS[trainer](batch, (old + 0.2).requires_grad_(), "icepop", (slice(0, 10), slice(10, 30)), {}, dump=folder)
    assert sorted(path.name for path in (tmp_path / "logps").iterdir()) == [
        "call_000001_rank_0.jsonl",
        "call_000002_rank_0.jsonl",
    ]
    measured = trimtab.diagnose(folder).measured
    assert (measured.origin.framework, measured.origin.dropped, measured.origin.findings) == ("trimtab", {}, ())
    expected = correct(old, behavior, mask).metrics.finalize()
    assert measured.size.mismatch["k3"] == pytest.approx(expected["k3"], rel=1e-4)
    assert measured.size.mismatch["tokens"] == mask.sum()


def test_a_new_run_is_written_beside_an_earlier_one_and_a_resumed_one_into_its_own(tmp_path: Path) -> None:
    def steps(dump: Dump, *numbers: int, rank: int = 0) -> list[str]:
        return [str(dump.write(step, [{"run": "x"}], rank=rank).relative_to(tmp_path).parent) for step in numbers]

    folder = tmp_path / "logps"
    assert steps(Dump(folder), 1, 2, 3, 4, 5) == ["logps"] * 5
    second = Dump(folder)
    with pytest.warns(TrimtabWarning, match=r"logps holds log-probs of an earlier run: .* are written to .*logps_2"):
        assert steps(second, 1) == ["logps_2"]
    assert steps(second, 2) == ["logps_2"]
    assert steps(Dump(folder), 6, 7) == ["logps", "logps"]  # of the run that ended at 5, not of that at 2
    assert steps(Dump(folder), 3) == ["logps_2"]
    with pytest.warns(TrimtabWarning, match="logps_3"):  # `train()` a second time
        assert steps(second, 1) == ["logps_3"]
    assert {path.name: len(list(path.iterdir())) for path in tmp_path.iterdir()} == {
        "logps": 7,
        "logps_2": 3,
        "logps_3": 1,
    }


def test_ranks_write_into_the_same_folder_whoever_is_first(tmp_path: Path) -> None:
    def write(rank: int, step: int, dump: Dump) -> str:
        return dump.write(step, [], rank=rank).parent.name

    one, two = Dump(tmp_path / "logps"), Dump(tmp_path / "logps")
    assert [write(0, 1, one), write(0, 2, one), write(1, 1, two), write(1, 2, two)] == ["logps"] * 4
    for path in (tmp_path / "logps").iterdir():  # as if another process had written them
        os.utime(path, (0, 0))
    assert write(2, 1, Dump(tmp_path / "logps")) == "logps_2"  # there were two ranks before
    with pytest.warns(TrimtabWarning, match="logps_2"):
        assert write(0, 1, Dump(tmp_path / "logps")) == "logps_2"
    assert write(2, 3, Dump(tmp_path / "logps")) == "logps"


@pytest.mark.parametrize(("ahead", "earlier", "folder"), [(3600, 0, "logps"), (-3600, 1800, "logps_2")])
def test_files_are_dated_by_the_clock_of_their_disk(
    ahead: float, earlier: float, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's clock is an hour ahead: rank 0 wrote just now, in this run. It is an hour behind: that is of an
    earlier run, half an hour ago."""
    path, start = Dump(tmp_path / "logps").write(1, [], rank=0), time.time()
    os.utime(path, (start + 1 - earlier, start + 1 - earlier))
    monkeypatch.setattr(recording, "_STARTED", start + ahead)
    monkeypatch.setattr(recording, "time", SimpleNamespace(time=lambda: time.time() + ahead))
    assert Dump(tmp_path / "logps").write(1, [], rank=1).parent.name == folder


def test_calls_of_a_second_loss_are_another_run(tmp_path: Path) -> None:
    logps = PolicyLogps(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2) > 0, proximal=torch.zeros(1, 2))
    first, second = Dump(tmp_path / "logps"), Dump(tmp_path / "logps")
    paths = [first.write_call(logps, torch.ones(1, 2)) for _ in range(2)]
    with pytest.warns(TrimtabWarning, match="logps_2"):
        paths.append(second.write_call(logps, torch.ones(1, 2)))
    paths += [dump.write_call(logps, torch.ones(1, 2)) for dump in (first, second)]
    assert [f"{path.parent.name} {path.name[:11]}" for path in paths] == [
        "logps call_000001",
        "logps call_000002",
        "logps_2 call_000001",
        "logps call_000003",
        "logps_2 call_000002",
    ]


@pytest.mark.parametrize("folder", [True, "", 3])
def test_a_dump_that_is_no_folder_or_cannot_be_written_is_named(folder: Any, tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match=rf"^dump={folder!r} is not a folder: give one, such as dump=\"logps\"$"):
        Dump(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrimtabError, match=r"cannot write .*logps"):
        Dump(tmp_path / "file" / "logps").write(1, [])


def test_columns_of_tokens_are_cut_and_what_is_not_finite_becomes_null() -> None:
    values, advantage = torch.tensor([[math.nan, 2.0, 9.0], [3.0, 9.0, 9.0]]), torch.tensor([0.5, -0.5])
    responses = {"reward": [0.5, math.inf], "advantage": advantage, "absent": None}
    assert list(response_rows(torch.tensor([2, 1]), {"entropy": values}, responses)) == [
        {"entropy": [None, 2.0], "reward": 0.5, "advantage": 0.5},
        {"entropy": [3.0], "reward": None, "advantage": -0.5},
    ]


def test_a_large_batch_is_written_in_a_second(tmp_path: Path) -> None:
    """64 responses of 8,000 tokens, which took 7 seconds with a tensor for each number."""
    values, mask = -torch.rand(64, 8000), torch.ones(64, 8000).bool()
    logps = PolicyLogps(current=values, behavior=values, proximal=values, mask=mask)
    started = time.process_time()
    Dump(tmp_path).write_call(logps, torch.ones(64, 1).expand(64, 8000))
    assert time.process_time() - started < 3
