"""One of two ranks, with the variables of torchrun. Exits with an assertion error when the ranks disagree."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.testing import assert_close

from trimtab.objectives import PolicyLogps, objective

ROWS, TIME = 6, 8


def batch() -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(5)
    base = -torch.rand(ROWS, TIME, generator=make, dtype=torch.float64)
    names = ("current", "behavior", "proximal")
    tensors = {name: base + 0.3 * torch.randn(ROWS, TIME, generator=make, dtype=torch.float64) for name in names}
    return tensors | {"mask": torch.rand(ROWS, TIME, generator=make) < 0.7}


def data_parallel(rank: int) -> None:
    """Each rank holds some rows; the states are reduced, and the losses of the ranks add up to the whole."""
    whole, advantage = batch(), torch.linspace(-1, 1, ROWS, dtype=torch.float64)[:, None]
    share = slice(0, 2) if rank == 0 else slice(2, ROWS)
    for name, keywords in (
        ("m2po", {"tau": 0.02}),
        ("m2po", {"tau": 0.02, "form": "mask"}),
        ("seq-tis", {"normalize": True}),
        ("icepop", {"denominator": "kept"}),
        ("opsm", {"denominator": "kept"}),
    ):
        obj = objective(name, **keywords)
        part = PolicyLogps(**{key: tensor[share] for key, tensor in whole.items()})
        state = obj.prepare(part, advantage[share]).all_reduce()
        loss = obj(part, advantage[share], state=state).loss
        dist.all_reduce(loss)
        assert_close(loss, obj(PolicyLogps(**whole), advantage).loss)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    data_parallel(dist.get_rank())
    dist.destroy_process_group()
