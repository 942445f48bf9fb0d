"""Every rank of a test: `torchrun ... shards_worker.py FOLDER RESULTS` saves, damages, fails to save and reads."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trimtab.errors import TrimtabError
from trimtab.trainer.checkpoint import store
from trimtab.trainer.ranks import RankGroup, join


def whole(serial: int) -> dict[str, Tensor]:
    """Tensors whose first dimension is smaller than, equal to, or no multiple of the number of ranks."""
    make = torch.Generator().manual_seed(serial)
    shapes = {"one": (1, 4), "three": (3,), "seven": (7, 5), "deep": (4, 2, 3), "rounded": (5, 2)}
    tensors = {name: torch.randn(shape, generator=make) for name, shape in shapes.items()}
    return {**tensors, "rounded": tensors["rounded"].bfloat16()}


def save(root: Path, serial: int, ranks: RankGroup) -> None:
    mesh = init_device_mesh("cpu", (ranks.size,))
    shards = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole(serial).items()}
    plain = {"step": torch.tensor(float(serial)), "shared": torch.arange(3) + serial}
    # What is not sharded is the leader's: the others' is ignored.
    own = plain if ranks.is_leader else {name: tensor * 0 for name, tensor in plain.items()}
    meta = {"serial": serial if ranks.is_leader else -1}
    store.save(root, serial, {"model": {**shards, **own}, "random": own}, meta, {"note": b"%d" % serial})


def main(root: Path, results: Path) -> None:
    with join() as ranks:
        save(root, 1, ranks)
        save(root, 2, ranks)
        failed = refused(root, ranks)
        ranks.gather(b"")  # the leader has cleaned up
        assert sorted(item.name for item in root.iterdir()) == ["step-000001", "step-000002"]
        leaders = [ranks.broadcast_bool(ranks.is_leader), ranks.broadcast_bool(not ranks.is_leader)]
        here: dict[str, Any] = {"failed": failed, "notes": {}, "leader's": leaders}
        for name, damage in DAMAGES.items():
            ranks.gather(b"")
            if ranks.rank == 1:
                damage(root / "step-000002")
            ranks.gather(b"")
            notes: list[str] = []
            newest = store.latest(root, notify=notes.append)
            assert newest is not None
            here["notes"][name] = notes
            here |= {"step": newest.step, "meta": newest.meta}
            ranks.gather(b"")
            if ranks.rank == 1:
                shutil.rmtree(root / "step-000002")
            ranks.gather(b"")
            save(root, 2, ranks)
        # A file each: what ranks print at once may share a line.
        (results / f"{ranks.rank}.json").write_text(json.dumps(here))


def part(folder: Path, rank: int) -> Path:
    return next((folder / "model").glob(f"shard-{rank + 1:05d}*"))


def change(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        file.write(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "numbers of a part": lambda folder: change(part(folder, 2), -1, b"\x7f"),
    "length of a part's header": lambda folder: change(part(folder, 0), 0, b"\xff" * 8),
    "header of a part": lambda folder: change(part(folder, 1), 9, b"\xff{}"),
    "a part is missing": lambda folder: part(folder, 1).unlink(),
    "a whole section is missing": lambda folder: (folder / "random.safetensors").unlink(),
    "a whole section is cut": lambda folder: os.truncate(folder / "random.safetensors", 20),
    "a file is missing": lambda folder: (folder / "note").unlink(),
    "meta is missing": lambda folder: (folder / store.META).unlink(),
    "meta is no JSON": lambda folder: change(folder / store.META, 0, b"?"),
    "manifest is cut": lambda folder: os.truncate(folder / store.MANIFEST, 9),
}


def refused(root: Path, ranks: RankGroup) -> str:
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
