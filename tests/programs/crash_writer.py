"""A process that writes checkpoints until it is killed; run by test_checkpoint_crash.py, which names the moments.

Each line on standard input starts one forked writer (one import of torch serves them all): `ROOT FIRST SAME KILL_AT`.
The writer saves steps FIRST, FIRST+1, ... (or FIRST again and again if SAME is 1), says so after each, and kills itself
before its KILL_AT-th change of the disk (0: never, somebody else kills it).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

from trimtab.trainer.checkpoint import store

WORDS = 100_000


def payload(serial: int) -> dict[str, dict[str, torch.Tensor]]:
    """Every value is the serial number of the save, so that a mixture of two saves shows."""
    whole = {"w": torch.full((WORDS,), float(serial)), "b": torch.full((3,), serial, dtype=torch.int64)}
    return {"model": whole, "optimizer": {"m": torch.full((WORDS,), float(serial))}}


def die_before(kill_at: int) -> None:
    """Count the calls that change names or force data to the disk, and die in place of one of them."""
    calls: Iterator[int] = count(1)

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, deadly(getattr(os, name)))


def write_for_ever(root: Path, first: int, same: bool, kill_at: int) -> None:
    if kill_at:
        die_before(kill_at)
    for serial in count(first):
        store.save(root, first if same else serial, payload(serial), {"serial": serial})
        print("saved", serial, flush=True)
        if not same:
            store.delete_old(root, keep=2)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        root, first, same, kill_at = line.split()
        child = os.fork()
        if child == 0:
            write_for_ever(Path(root), int(first), same == "1", int(kill_at))
        print("writer", child, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)


if __name__ == "__main__":
    main()
