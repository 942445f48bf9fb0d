"""Weights on their way to an engine: everything, once, by its name, finite; in an unnamed file, or in a folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.engines import CONFIGS, tiny
from tests.unit.trainer.checkpoint.test_store import small_files

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.weight_transfer import FILE, PREFIX, WeightFolder, WeightManifest, share

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3-moe", "gpt2"])
def test_a_config_alone_says_what_weights_there_are(name: str, tmp_path: Path) -> None:
    CONFIGS[name]().save_pretrained(tmp_path)
    assert WeightManifest.read(tmp_path) == WeightManifest.of(tiny(name))


def test_a_tied_head_comes_out_once_whichever_name_it_had() -> None:
    model = tiny()
    inventory = WeightManifest.of(model)
    assert inventory.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    both = inventory.check(model.state_dict().items())
    head = [(name, tensor) for name, tensor in model.state_dict().items() if name != "model.embed_tokens.weight"]
    for chosen in (both, inventory.check(model.named_parameters()), inventory.check(head)):
        assert set(chosen) == {name for name, _ in model.named_parameters()}
        assert chosen["model.embed_tokens.weight"].data_ptr() == model.lm_head.weight.data_ptr()


def test_a_copy_of_a_tied_weight_may_be_equal_but_not_differ() -> None:
    state = dict(tiny().state_dict())
    state["lm_head.weight"] = state["lm_head.weight"].clone()
    inventory = WeightManifest.of(tiny())
    inventory.check(state.items())
    state["lm_head.weight"][0, 0] += 1
    with pytest.raises(TrimtabError, match="differs from its twin"):
        inventory.check(state.items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_the_model_is_refused(value: float) -> None:
    inventory, good = WeightManifest.of(tiny()), dict(tiny().named_parameters())
    bad = good[UP].detach().clone()
    bad[1, 2] = value
    for weights, message in [
        ([*good.items(), (UP, good[UP])], f"{UP}' was published twice"),
        ([(name, tensor) for name, tensor in good.items() if name != UP], f"{UP}' is missing .1 in all"),
        ([*good.items(), ("model.layers.0.mlp.up.weight", bad)], "not in the engine's model .did you mean"),
        ((good | {UP: bad.t()}).items(), r"has shape \(48, 64\), the engine's is \(64, 48\)"),
        ((good | {UP: bad}).items(), f"{UP}' has non-finite values"),
    ]:
        with pytest.raises(TrimtabError, match=message):
            inventory.check(weights)


def test_large_finite_weights_pass_although_their_sum_overflows() -> None:
    good = dict(tiny().named_parameters())
    good[UP] = torch.full_like(good[UP], 3e38)
    WeightManifest.of(tiny()).check(good.items())


EVERY_TYPE = {
    "float32": torch.tensor([[1.5, -0.0], [float("inf"), 3e-45]]),
    "bfloat16": torch.randn(3, 5).bfloat16(),
    "int64": torch.tensor([2**62, -1]),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(6.0).view(2, 3).T,
}


def is_open(file: os.stat_result) -> bool:
    """Whether any descriptor of this process leads to the file. Only this one is asked after: threads of earlier tests
    (Ray's, say) open and close their own meanwhile."""
    for item in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed since it was listed
            if os.path.samestat(item.stat(), file):
                return True
    return False


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "disk"])
def test_weights_come_back_bit_for_bit(memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not memory:
        monkeypatch.delattr(os, "memfd_create")
    shared = share(EVERY_TYPE.items())
    for _ in range(2):
        result = dict(shared)
        assert list(result) == list(EVERY_TYPE)
        for name, tensor in EVERY_TYPE.items():
            assert result[name].shape == tensor.shape
            assert torch.equal(result[name].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert dict(share({}.items())) == {}


def test_writes_affect_no_other_reader_and_tensors_outlive_the_file() -> None:
    shared = share([("a", torch.zeros(4))])
    [(_, mine)] = shared
    mine += 1
    [(_, other)] = shared
    shared.close()
    shared.close()
    assert other.tolist() == [0.0] * 4
    assert mine.tolist() == [1.0] * 4
    with pytest.raises(OSError, match="descriptor"):
        list(shared)


def test_tied_weights_are_stored_once_but_addresses_used_again_are_not_ties() -> None:
    model = tiny()
    shared = share(model.state_dict().items())
    size = os.fstat(shared.descriptor).st_size
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert whole <= size < whole + 64 * len(list(model.parameters()))

    def merged():
        for i in range(6):
            yield f"w{i}", torch.full((1000,), float(i))  # freed after its turn: the next one gets the same address

    assert [float(weight[0]) for _, weight in share(merged())] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "disk"])
def test_nothing_is_left_open_or_behind(memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not memory:
        monkeypatch.delattr(os, "memfd_create")
    shared = share(EVERY_TYPE.items())
    file = os.fstat(shared.descriptor)
    assert file.st_nlink == 0  # it has no name, so nothing can be left behind
    assert is_open(file)
    del shared
    assert not is_open(file)


def test_nothing_is_left_open_where_a_weight_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    create = os.memfd_create

    def remembered(name: str) -> int:
        made.append(create(name))
        return made[-1]

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(3)
        file.append(os.fstat(made[0]))
        raise KeyError("the caller's own")

    file: list[os.stat_result] = []
    monkeypatch.setattr(os, "memfd_create", remembered)
    with pytest.raises(KeyError):
        share(broken())
    assert not is_open(file[0])


def test_a_full_shared_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", lambda _: os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(TrimtabError, match="No space left on device"):
        share([("a", torch.zeros(4))])


class TestPublished:
    def test_the_file_holds_the_weights_in_the_dtype_of_the_servers(self, tmp_path: Path) -> None:
        weights = {"a": torch.randn(3, 5), "b": torch.arange(4), "c": torch.randn(7)}
        weights |= {str(dtype): torch.arange(3).to(dtype) for dtype in (torch.uint8, torch.int8, torch.int16)}
        published = WeightFolder(str(tmp_path), torch.bfloat16)
        folder, label = published.write(weights, 3)
        loaded, read = load_file(folder / FILE), dict(published.read())
        for name, weight in weights.items():
            wanted = weight.bfloat16() if weight.is_floating_point() else weight
            assert torch.equal(loaded[name], wanted)
            assert torch.equal(read[name], wanted)
        again, other = published.write(weights, 3)
        assert other != label  # the same version of other weights has another name
        assert not folder.exists()
        assert again.exists()
        published.remove()
        published.remove()
        assert list(tmp_path.iterdir()) == []

    def test_what_a_killed_process_left_is_removed_and_nothing_else(self, tmp_path: Path) -> None:
        host = f"{socket.gethostname()}-{Path('/proc/self/ns/pid').stat().st_ino}"
        dead = next(pid for pid in range(4_000_000, 5_000_000) if not Path(f"/proc/{pid}").exists())
        names = [f"{PREFIX}{host}-{dead}-x", f"{PREFIX}{host}-{os.getpid()}-x", f"{PREFIX}other-{dead}-x", "mine"]
        for name in names:
            (tmp_path / name).mkdir()
        WeightFolder(str(tmp_path), torch.float32)
        assert sorted(item.name for item in tmp_path.iterdir()) == sorted(names[1:])

    def test_a_full_disk_is_reported_and_leaves_nothing(self, tmp_path: Path) -> None:
        published = WeightFolder(str(tmp_path), torch.float32)
        with small_files(4096), pytest.raises(TrimtabError, match="free space there"):
            published.write({"a": torch.zeros(100_000)}, 1)
        assert not list(tmp_path.glob("*/*"))

    def test_mistakes_are_reported(self, tmp_path: Path) -> None:
        with pytest.raises(TrimtabError, match=r"engine\.server\.folder"):
            WeightFolder(str(tmp_path / "none"), torch.float32)
        with pytest.raises(TrimtabError, match="publish first"):
            next(WeightFolder(str(tmp_path), torch.float32).read())
