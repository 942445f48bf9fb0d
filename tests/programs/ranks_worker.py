"""One of two ranks: `python ranks_worker.py RANK STORE`. Exits with an assertion error when the ranks disagree."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.testing import assert_close

from trimtab.corrections import OPSM, Band, Divergence, Veto, Weight, compute_correction
from trimtab.objectives import Metrics, PolicyLogps, objective

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


def time_slices(rank: int) -> None:
    """Each rank holds some positions of every row; rules still see whole sequences."""
    whole, advantage = batch(), torch.linspace(-1, 1, ROWS, dtype=torch.float64)[:, None]
    share = slice(0, 3) if rank == 0 else slice(3, TIME)
    rules = {
        "weight": Weight("geometric", "clip", 0.9, 1.1),
        "masks": [
            Band("sequence", 0.3, 3.0),
            Divergence("k3", "mean", 0.1),
            Divergence("k2", "max", 0.3),
            OPSM(0.05),
            Veto(0.6),
        ],
        "advantage": advantage,
        "measure": True,
    }
    names = ("proximal", "behavior", "mask", "current")
    expected = compute_correction(**{key: whole[key] for key in names}, **rules)
    part = compute_correction(**{key: whole[key][:, share] for key in names}, **rules, group=dist.group.WORLD)
    assert expected.weight is not None
    assert part.weight is not None
    assert_close(part.weight, expected.weight[:, share])
    assert (part.keep == expected.keep[:, share]).all()
    assert part.mismatch is not None
    assert expected.mismatch is not None
    report = Metrics({"": part.mismatch}).finalize()
    exact = Metrics({"": expected.mismatch}).finalize()
    for key in ("chi2_seq", "ess_seq", "ppl_ratio", "log_ratio_seq_max", "sequences"):
        assert abs(report[key] - exact[key]) < 1e-12, key
    counted = torch.tensor([report["tokens"], report["tokens"] * report["k1"]], dtype=torch.float64)
    dist.all_reduce(counted)
    assert_close(counted, torch.tensor([exact["tokens"], exact["tokens"] * exact["k1"]], dtype=torch.float64))


if __name__ == "__main__":
    own_rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=own_rank, world_size=2)
    data_parallel(own_rank)
    time_slices(own_rank)
    dist.destroy_process_group()
