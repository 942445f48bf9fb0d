"""Models, optimizers and random generators through tensors and JSON and back, without losing a bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError, TrimtabWarning
from trimtab.trainer.checkpoint import state_tensors, store


def same(a: Any, b: Any) -> bool:
    """Equal in type and bit for bit, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor):
        flat = [t.contiguous().view(-1).view(torch.uint8).tolist() if t.numel() else [] for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and flat[0] == flat[1]
    return a == b


class Tied(nn.Module):
    """A model as language models are built: embedding and head are one tensor, and there is a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, dtype=dtype)
        self.middle = nn.Linear(4, 4, dtype=dtype)
        self.head = nn.Linear(4, 7, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(ids)).tanh())


def adamw(model: Tied, **more: Any) -> torch.optim.AdamW:
    groups = [{"params": [model.embed.weight], "weight_decay": 0.0}, {"params": list(model.middle.parameters())}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True, **more)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, updates: int) -> None:
    for update in range(updates):
        optimizer.zero_grad()
        ids = torch.tensor([[update % 7, 1, 2]])
        model(ids).float().log_softmax(-1)[..., 3].sum().neg().backward()
        optimizer.step()


def through_the_disk(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> store.LoadedCheckpoint:
    tensors, data = state_tensors.optimizer_state(optimizer, model)
    sections = {"model": state_tensors.model_state(model), "optimizer": tensors}
    return store.load(store.save(folder, 1, sections, {"optimizer": data}))


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = Tied(), Tied()
    result = through_the_disk(tmp_path, model, adamw(model))
    assert set(result.tensors["model"]) == {"embed.weight", "middle.weight", "middle.bias", "count"}
    state_tensors.load_model_state(other, result.tensors["model"])
    assert other.head.weight is other.embed.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_restored_optimizer_takes_the_same_steps(tmp_path: Path, dtype: torch.dtype, amsgrad: bool) -> None:
    torch.manual_seed(1)
    model = Tied(dtype)
    optimizer = adamw(model, amsgrad=amsgrad)
    train(model, optimizer, 3)
    optimizer.param_groups[1]["lr"] = 0.1 + 0.2
    result = through_the_disk(tmp_path, model, optimizer)
    twin = Tied(dtype)
    twin_optimizer = adamw(twin, amsgrad=amsgrad)
    state_tensors.load_model_state(twin, result.tensors["model"])
    state_tensors.load_optimizer_state(twin_optimizer, twin, result.tensors["optimizer"], result.meta["optimizer"])
    assert same(twin_optimizer.state_dict(), optimizer.state_dict())
    train(model, optimizer, 3)
    train(twin, twin_optimizer, 3)
    assert same(dict(twin.state_dict()), dict(model.state_dict()))
    assert same(twin_optimizer.state_dict(), optimizer.state_dict())


def test_restored_moments_do_not_live_in_the_checkpoint_file(tmp_path: Path) -> None:
    model = Tied()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    result = through_the_disk(tmp_path, model, optimizer)
    state_tensors.load_optimizer_state(optimizer, model, result.tensors["optimizer"], result.meta["optimizer"])
    mapped = {tensor.data_ptr() for tensor in result.tensors["optimizer"].values()}
    moments = [value for state in optimizer.state.values() for value in state.values()]
    assert moments
    assert not mapped & {moment.data_ptr() for moment in moments}


def test_a_parameter_without_state_has_none_after_loading(tmp_path: Path) -> None:
    model, twin = Tied(), Tied()
    optimizer, twin_optimizer = adamw(model), adamw(twin)
    model.middle.weight.grad = torch.ones(4, 4)
    optimizer.step()
    result = through_the_disk(tmp_path, model, optimizer)
    state_tensors.load_optimizer_state(twin_optimizer, twin, result.tensors["optimizer"], result.meta["optimizer"])
    assert list(twin_optimizer.state) == [twin.middle.weight]
    assert same(twin_optimizer.state_dict(), optimizer.state_dict())


def test_loading_a_model_is_strict() -> None:
    good = state_tensors.model_state(Tied())
    with pytest.raises(TrimtabError, match=r"1 missing \(e\.g\. 'middle\.bias'\)"):
        state_tensors.load_model_state(Tied(), {name: t for name, t in good.items() if name != "middle.bias"})
    with pytest.raises(TrimtabError, match=r"1 unexpected \(e\.g\. 'head\.weight'\)"):
        state_tensors.load_model_state(Tied(), {**good, "head.weight": torch.zeros(7, 4)})
    with pytest.raises(TrimtabError, match=r"'middle\.weight' is torch\.float32 \(4, 5\).*torch\.float32 \(4, 4\)"):
        state_tensors.load_model_state(Tied(), {**good, "middle.weight": torch.zeros(4, 5)})
    target = Tied()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(TrimtabError, match=r"is torch\.bfloat16 .* and torch\.float32"):
        state_tensors.load_model_state(target, {**good, "middle.bias": good["middle.bias"].bfloat16()})
    assert same(dict(target.state_dict()), before), "a refused load must not change half of the model"


def test_loading_an_optimizer_is_strict() -> None:
    model = Tied()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    tensors, data = state_tensors.optimizer_state(optimizer, model)
    only_middle = torch.optim.AdamW(model.middle.parameters(), fused=True)
    with pytest.raises(TrimtabError, match=r"optimizer state do not fit.*1 unexpected \(e\.g\. 'embed\.weight'\)"):
        state_tensors.load_optimizer_state(only_middle, model, tensors, data)
    one_group = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(TrimtabError, match="groups its parameters differently"):
        state_tensors.load_optimizer_state(one_group, model, tensors, data)
    with pytest.raises(ValueError, match="3 parameters of the optimizer do not belong to the model"):
        state_tensors.optimizer_state(optimizer, Tied())


def draw() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),  # noqa: NPY002 - the global generator is the point
        float(np.random.standard_normal()),  # noqa: NPY002
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
    ]


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    draw()  # leaves half-used state behind: a cached normal
    loaded = store.load(store.save(tmp_path, 1, {}, state_tensors.rng_state()))
    expected = [draw() for _ in range(2)]
    draw()
    state_tensors.set_rng_state(loaded.meta)
    assert [draw() for _ in range(2)] == expected


def test_another_number_of_devices_is_reported() -> None:
    state = state_tensors.rng_state()
    with pytest.warns(TrimtabWarning, match="CUDA devices"):
        state_tensors.set_rng_state({**state, "cuda": [*state["cuda"], [0] * 16]})
