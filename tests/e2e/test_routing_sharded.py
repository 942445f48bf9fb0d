"""A sharded model replays like a whole one: its layers' weights come and go around the hooks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.unit.trainer.models.test_logprobs import batch, build
from tests.unit.trainer.models.test_routing import other
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from trimtab.trainer.models.logprobs import TokenScores, score
from trimtab.trainer.models.sharding import apply_fsdp, full_tensor

pytestmark = pytest.mark.slow


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def trained(model: Any, scores: TokenScores) -> dict[str, Tensor]:
    model.zero_grad()
    (scores.logp * torch.linspace(-1, 2, scores.logp.numel()).view_as(scores.logp)).sum().backward()
    return {name: full_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_sharded_layers_replay(mesh: Any, checkpointing: bool) -> None:
    plain = build("qwen3_moe").train()
    model = copy.deepcopy(plain)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    apply_fsdp(model, mesh)
    free = score(plain, batch(), record=True)
    assert free.routes is not None
    expected = score(plain, batch(), routes=other(free.routes))
    whole = trained(plain, expected)
    for routes, logp in ((free.routes, free.logp), (other(free.routes), expected.logp)):
        again = score(model, batch(), routes=routes, record=True)
        assert torch.equal(again.logp, logp)
    sharded = trained(model, again)
    assert sharded.keys() == whole.keys()
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)
    alone = score(model, batch(), record=True)
    trained(model, alone)
    assert alone.routes is not None
    assert torch.equal(alone.routes, free.routes)
