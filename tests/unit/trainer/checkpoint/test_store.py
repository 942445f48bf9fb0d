"""Checkpoints: bit for bit round trips, every kind of damage noticed and named, a full disk survived."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trimtab.errors import TrimtabError, TrimtabWarning
from trimtab.files import new_folder
from trimtab.runs import atomic
from trimtab.runs.layout import BestCheckpoint, best_checkpoint, list_checkpoints, move_aside_after
from trimtab.trainer.checkpoint import store


def contents(serial: int) -> dict[str, dict[str, Tensor]]:
    return {"model": {"w": torch.full((64,), float(serial))}, "optimizer": {"m": torch.full((32,), float(serial))}}


def save(root: Path, *steps: int) -> None:
    for step in steps:
        store.save(root, step, contents(step), {"serial": step}, {"pending.parquet": b"bytes %d" % step})


def serials(result: store.LoadedCheckpoint | None) -> set[float]:
    """All numbers in a checkpoint made by `contents`; one number if it is whole."""
    numbers = {float(x) for section in result.tensors.values() for t in section.values() for x in t}
    return numbers | {float(result.meta["serial"])}


def steps(root: Path) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in list_checkpoints(root)]


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []


def test_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    payload_nan = torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32)
    tensors = {
        "float32": torch.tensor([0.1, -0.0, float("inf"), 1e-45]),
        "nan": payload_nan,
        "bfloat16": torch.tensor([[1.0, 2.5], [-3.0, 0.0]], dtype=torch.bfloat16),
        "float64": torch.tensor(0.1, dtype=torch.float64),
        "int64": torch.tensor([2**62, -1]),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "uint32": torch.tensor([2**32 - 1], dtype=torch.uint32),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "odd name/with $ signs": torch.ones(1),
    }
    meta = {"lr": 0.1 + 0.2, "inf": float("-inf"), "words": ["ü", None, True], "big": 2**100}
    folder = store.save(tmp_path, 12, {"model": tensors, "none": {}}, meta, {"x.bin": b"\0\xff"})
    names = {item.name for item in folder.iterdir()}
    assert names == {"manifest.json", "meta.json", "model.safetensors", "none.safetensors", "x.bin"}, "no pickle"
    result = store.load(folder)
    assert folder == tmp_path / "step-000012"
    assert result.step == 12
    assert result.meta == meta
    assert result.files == {"x.bin": b"\0\xff"}
    assert set(result.tensors) == {"model", "none"}
    assert set(result.tensors["model"]) == set(tensors)
    for name, tensor in tensors.items():
        loaded = result.tensors["model"][name]
        assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape), name
        assert bits(loaded) == bits(tensor), name


def test_sections_are_read_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-000001" / "optimizer.safetensors").write_bytes(b"broken, and nobody asked for it")
    loaded = store.load(tmp_path / "step-000001", ["model"])
    assert list(loaded.tensors) == ["model"]
    assert loaded.files == {}
    with pytest.raises(TrimtabError, match="no 'critic' tensors"):
        store.load(tmp_path / "step-000001", ["model", "critic"])


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def list_in_manifest(folder: Path, name: str, content: bytes) -> None:
    """Someone else's file, whose size and digest are right."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if not name.startswith("/"):
        (folder / name).write_bytes(content)


DAMAGE: dict[str, tuple[Any, str]] = {
    "flipped byte": (lambda f: flip(f / "model.safetensors", -1), "model.safetensors was changed"),
    "flipped meta": (lambda f: flip(f / "meta.json", 3), "meta.json was changed"),
    "cut file": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors has 0 bytes instead of"),
    "longer file": (lambda f: (f / "meta.json").write_bytes((f / "meta.json").read_bytes() + b" "), "bytes instead of"),
    "missing file": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors cannot be read"),
    "missing manifest": (lambda f: (f / "manifest.json").unlink(), "incomplete: manifest.json is missing"),
    "manifest of something else": (lambda f: (f / "manifest.json").write_text("[1]"), "manifest.json cannot be read"),
    "deep manifest": (lambda f: (f / "manifest.json").write_text("[" * 100_000), "manifest.json cannot be read"),
    "digits in the manifest": (lambda f: (f / "manifest.json").write_text(f"[{'1' * 5000}]"), "manifest.json cannot"),
    "manifest is a pipe": (lambda f: pipe(f / "manifest.json"), "manifest.json cannot be read"),
    "file is a pipe": (lambda f: pipe(f / "model.safetensors"), "model.safetensors cannot be read"),
    "manifest of a device": (lambda f: list_in_manifest(f, "/dev/zero", b""), "damaged or foreign"),
    "manifest of another folder": (lambda f: list_in_manifest(f, "../step-000010/a", b""), "damaged or foreign"),
    "deep meta with its digest": (lambda f: list_in_manifest(f, "meta.json", b"[" * 100_000), "meta.json cannot be"),
    "empty folder": (lambda f: [item.unlink() for item in f.iterdir()], "manifest.json is missing"),
    "another step": (lambda f: (shutil.rmtree(f), shutil.copytree(f.with_name("step-000010"), f)), "step 20"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_noticed_named_and_the_previous_checkpoint_used(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 10, 20)
    damage, words = DAMAGE[kind]
    damage(tmp_path / "step-000020")
    with pytest.raises(TrimtabError, match=words):
        store.load(tmp_path / "step-000020")
    with pytest.warns(TrimtabWarning, match=f"step-000020.*{words}.*using step-000010 instead"):
        newest = store.latest(tmp_path)
    assert serials(newest) == {10.0}


def test_no_checkpoint_is_none_but_only_damaged_ones_are_an_error(tmp_path: Path) -> None:
    assert store.latest(tmp_path / "absent") is None
    assert store.latest(tmp_path) is None
    save(tmp_path, 10)
    flip(tmp_path / "step-000010" / "meta.json", 0)
    with pytest.raises(TrimtabError, match=r"no intact checkpoint in .*meta\.json was changed"):
        store.latest(tmp_path)


def test_the_newest_intact_one_of_some_steps_is_found(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    assert serials(store.latest(tmp_path, among=[10, 20])) == {20.0}
    (tmp_path / "step-000020" / "manifest.json").unlink()
    lines: list[str] = []
    assert serials(store.latest(tmp_path, notify=lines.append, among=[10, 20])) == {10.0}
    assert ["step-000020" in line for line in lines] == [True]
    assert store.latest(tmp_path, among=[5]) is None
    with pytest.raises(TrimtabError, match=r"no intact checkpoint.*step-000020"):
        store.latest(tmp_path, among=[20])


def test_one_that_is_finished_later_has_its_values_from_now_and_no_name_until_then(tmp_path: Path) -> None:
    save(tmp_path, 10)
    calls, changing = list[Any](), contents(20)
    store.save(tmp_path, 20, changing, {"serial": 20}, later=calls.append)
    changing["model"]["w"].fill_(0)
    assert serials(store.latest(tmp_path)) == {10.0}
    calls[0]()
    assert serials(store.latest(tmp_path)) == {20.0}
    assert steps(tmp_path) == [10, 20]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 10)
    store.save(tmp_path, 10, contents(11), {"serial": 11})
    assert serials(store.latest(tmp_path)) == {11.0}
    assert [item.name for item in tmp_path.iterdir()] == ["step-000010"]


def test_death_between_the_two_renames_of_a_replacement(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / "step-000010").rename(tmp_path / f"{atomic.REPLACED}step-000010")
    assert serials(store.latest(tmp_path)) == {10.0}  # a reader copes
    atomic.remove_leftovers(tmp_path)
    assert steps(tmp_path) == [10]  # the writer mends
    assert serials(store.latest(tmp_path)) == {10.0}


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    save(tmp_path, *range(10, 60, 10))
    store.mark_best(tmp_path, 20, "eval/arithmetic/greedy", 0.5)
    for keep in (2, 9):
        store.delete_old(tmp_path, keep)
        assert steps(tmp_path) == [20, 40, 50]
    with pytest.raises(ValueError, match="at least 1"):
        store.delete_old(tmp_path, keep=0)


def test_best_is_the_highest_the_earliest_and_never_nan(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 1_000_000)
    store.mark_best(tmp_path, 1, "m", float("nan"))
    assert best_checkpoint(tmp_path) is None
    marks = [(1, "m", -2.0), (2, "m", -2.0), (2, "m", float("nan")), (3, "m", 0.25), (1_000_000, "another", 0.1)]
    best = []
    for step, metric, value in marks:
        store.mark_best(tmp_path, step, metric, value)
        best.append(best_checkpoint(tmp_path))
    first, second, last = (BestCheckpoint(*marks[index]) for index in (0, 3, 4))
    assert best == [first, first, first, second, last]
    with pytest.raises(ValueError, match="no checkpoint of step 5"):
        store.mark_best(tmp_path, 5, "m", 1.0)
    (tmp_path / "best.json").write_text("{")
    with pytest.raises(TrimtabError, match=r"best\.json is damaged: delete it"):
        best_checkpoint(tmp_path)


def test_later_checkpoints_are_set_aside_and_do_not_count(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    store.mark_best(tmp_path, 30, "m", 1.0)
    move_aside_after(tmp_path, 10)
    assert steps(tmp_path) == [10]
    assert best_checkpoint(tmp_path) is None
    save(tmp_path, 20)
    move_aside_after(tmp_path, 10)  # a second time: the older one makes room
    assert sorted(item.name for item in tmp_path.iterdir()) == ["step-000010", "step-000020.aside", "step-000030.aside"]
    save(tmp_path, 15)
    store.delete_old(tmp_path, keep=1)
    assert steps(tmp_path) == [15]


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file may grow beyond `limit` bytes (a write fails with EFBIG, as with a quota)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


BIG = {"model": {"w": torch.ones(1_000_000)}}  # 4 MB


@pytest.mark.parametrize("what", ["tensors", "meta", "file"])
def test_a_full_disk_leaves_the_previous_checkpoint_and_no_rubbish(tmp_path: Path, what: str) -> None:
    save(tmp_path, 10)
    tensors = BIG if what == "tensors" else {}
    meta = {"serial": 20, "long": "x" * 4_000_000} if what == "meta" else {"serial": 20}
    files = {"pending.parquet": b"x" * 4_000_000} if what == "file" else {}
    for step in (20, 10):  # a new step, and the replacement of an old one
        line = r"cannot write .*step-0000.*: File too large; free space"
        with small_files(1_000_000), pytest.raises(TrimtabError, match=line):
            store.save(tmp_path, step, tensors, meta, files)
    assert [item.name for item in tmp_path.iterdir()] == ["step-000010"]
    assert serials(store.latest(tmp_path)) == {10.0}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    atomic.write_text(path, "old")
    with small_files(1_000_000), pytest.raises(TrimtabError, match=r"cannot write .*config\.toml: File too large"):
        atomic.write_bytes(path, b"x" * 2_000_000)
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["config.toml"]
    atomic.write_text(path, "neu: ü")
    assert path.read_bytes() == "neu: ü".encode()


def test_an_error_inside_a_new_folder_removes_it(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "deep" / "model") as temporary:  # noqa: PT012
        (temporary / "half").write_text("x")
        raise KeyboardInterrupt
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_new_folder_never_replaces_one_unasked(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("precious")
    with pytest.raises(TrimtabError, match="not empty"), new_folder(tmp_path / "model"):
        pass
    assert (tmp_path / "model" / "mine").read_text() == "precious"
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


def test_sweep_touches_only_its_own_names(tmp_path: Path) -> None:
    for name in (".tmp-theirs", ".old-theirs", "step-000001", ".lock"):
        (tmp_path / name).mkdir()
    (tmp_path / f"{atomic.TEMPORARY}x-12345678").mkdir()
    (tmp_path / f"{atomic.TEMPORARY}y-12345678").write_text("")
    (tmp_path / f"{atomic.REPLACED}step-000001").mkdir()
    atomic.remove_leftovers(tmp_path)
    atomic.remove_leftovers(tmp_path / "absent")
    assert sorted(item.name for item in tmp_path.iterdir()) == [".lock", ".old-theirs", ".tmp-theirs", "step-000001"]


def test_the_manifest_is_readable_by_other_tools(tmp_path: Path) -> None:
    save(tmp_path, 3)
    data = json.loads((tmp_path / "step-000003" / "manifest.json").read_text())
    assert (data["format"], data["step"]) == (store.FORMAT, 3)
    # sha256 of b"bytes 3", by sha256sum
    assert data["files"]["pending.parquet"] == {
        "size": 7,
        "sha256": "cc25d11f43a02fd14b32f7de55b6e7ebc86504b052ae8a34073e63cd731ae803",
    }


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_files_are_as_readable_as_the_umask_says(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        save(tmp_path, 1)
        atomic.write_text(tmp_path / "config.toml", "text")
        atomic.write_output(tmp_path / "report.html", b"page")
    finally:
        os.umask(before)
    files = [item for item in tmp_path.rglob("*") if item.is_file()]
    assert {item.suffix for item in files} >= {".safetensors", ".json", ".parquet", ".toml", ".html"}
    assert {oct(item.stat().st_mode & 0o777) for item in files} == {oct(0o666 & ~mask)}
