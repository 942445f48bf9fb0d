"""Weights in a file without a name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tests.support.engines import tiny

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.weights import share

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
