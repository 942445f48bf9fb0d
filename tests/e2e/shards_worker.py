"""Every rank of a test: `torchrun ... shards_worker.py FOLDER TOLD` saves, damages, fails to save and reads checkpoints."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trimtab.errors import TrimtabError
from trimtab.training import checkpoint
from trimtab.training.ranks import Ranks, join


def whole(serial: int) -> dict[str, Tensor]:
    """Tensors whose first dimension is smaller than, equal to, or no multiple of the number of ranks."""
    make = torch.Generator().manual_seed(serial)
    shapes = {"one": (1, 4), "three": (3,), "seven": (7, 5), "deep": (4, 2, 3), "rounded": (5, 2)}
    tensors = {name: torch.randn(shape, generator=make) for name, shape in shapes.items()}
    return {**tensors, "rounded": tensors["rounded"].bfloat16()}


def save(root: Path, serial: int, ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (ranks.size,))
    shards = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole(serial).items()}
    plain = {"step": torch.tensor(float(serial)), "shared": torch.arange(3) + serial}
    # What is not sharded is the leader's: the others' is ignored.
    own = plain if ranks.leads else {name: tensor * 0 for name, tensor in plain.items()}
    meta = {"serial": serial if ranks.leads else -1}
    checkpoint.save(root, serial, {"model": {**shards, **own}, "random": own}, meta, {"note": b"%d" % serial})


def main(root: Path, told: Path) -> None:
    with join() as ranks:
        save(root, 1, ranks)
        save(root, 2, ranks)
        failed = refused(root, ranks)
        ranks.gather(b"")  # the leader has cleaned up
        assert sorted(item.name for item in root.iterdir()) == ["step-000001", "step-000002"]
        ranks.gather(b"")
        if ranks.rank == 1:
            part = next((root / "step-000002" / "model").glob("shard-00003*"))
            part.write_bytes(part.read_bytes()[:-1] + b"\x7f")
        ranks.gather(b"")
        notes: list[str] = []
        found = checkpoint.latest(root, notify=notes.append)
        assert found is not None
        here = {"failed": failed, "notes": notes, "step": found.step, "meta": found.meta}
        # A file each: what ranks print at once may share a line.
        (told / f"{ranks.rank}.json").write_text(json.dumps(here))


def refused(root: Path, ranks: Ranks) -> str:
    """One rank's disk is full while it writes its part."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        save(root, 3, ranks)
    except TrimtabError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
