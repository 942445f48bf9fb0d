"""The process group of a run and its collectives: broadcast, gather, sum, run on all ranks.

`torchrun` starts one process for each device and numbers them in the environment. Every rank runs the same program;
rank 0 leads: it has the data, the engines and the run directory. What ranks exchange besides tensors is bytes (JSON,
safetensors, parquet), never a pickle. One process without torchrun is `SINGLE`, which exchanges nothing.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.errors import RESUME, TrimtabError

T = TypeVar("T")

# Tensors between ranks that work at the same time; a publication to slow servers may fall in between.
TENSOR_TIMEOUT = timedelta(hours=1)
# Followers wait here while the leader samples or evaluates, however long that takes. A rank that dies is noticed at
# once, because its connection closes.
CONTROL_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True, eq=False)
class Ranks:
    """This process among the others. `device` is where its model computes; None: wherever the model lies."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    control: Any = None  # a process group of gloo

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def broadcast(self, data: bytes) -> bytes:
        """The leader's `data` on every rank; what the others pass is ignored."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0, group=self.control)
        buffer = _tensor(data) if self.leads else torch.empty(int(length), dtype=torch.uint8)
        if int(length):
            dist.broadcast(buffer, 0, group=self.control)
        return data if self.leads else buffer.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, in the order of ranks, on every rank."""
        if self.size == 1:
            return [data]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.control)
        longest = max(int(length) for length in lengths)
        if not longest:
            return [b""] * self.size
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = _tensor(data)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.control)
        return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def total(self, value: float) -> float:
        """The sum over ranks, added in their order: the same bits on every rank."""
        return sum(struct.unpack("<d", part)[0] for part in self.gather(struct.pack("<d", value)))

    def most(self, value: float) -> float:
        """The largest over ranks, on every rank."""
        return max(struct.unpack("<d", part)[0] for part in self.gather(struct.pack("<d", value)))

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor on this rank's device by its sum over ranks."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; an error of a user or of the disk on any of them stops all, before anybody goes on.

        Where it happened it is raised as it is, elsewhere as a `TrimtabError`.
        """
        if self.size == 1:
            return work()
        result, mine = None, None
        try:
            result = work()
        except (TrimtabError, OSError) as error:
            mine = error
        said = [part.decode() for part in self.gather(b"" if mine is None else _line(mine))]
        if mine is not None:
            raise mine
        for rank, line in enumerate(said):
            if line:
                raise TrimtabError(f"rank {rank}: {line}")
        return result  # pyright: ignore[reportReturnType]  # `work` returned it


SINGLE = Ranks()
_current = SINGLE


def here() -> Ranks:
    """This process's place in the run; `SINGLE` outside of `join`."""
    return _current


def several() -> bool:
    """Whether torchrun started this process as one of several ranks."""
    return _size() > 1


def follows() -> bool:
    """Whether this process is one of several ranks, and not the one that leads and reports."""
    return several() and os.environ.get("RANK") != "0"


def _size() -> int:
    given = os.environ.get("WORLD_SIZE", "1")
    if not given.isdecimal():
        raise TrimtabError(f"WORLD_SIZE = {given!r} is no number of ranks: unset it")
    return int(given)


@contextmanager
def join() -> Iterator[Ranks]:
    """Meet the other ranks that torchrun started (gloo on CPU, nccl between GPUs); `SINGLE` where there are none.

    May be nested: they meet once. Inside, a rank that is lost becomes a `TrimtabError` on those that notice. Raises
    `TrimtabError` for an environment that is not torchrun's, or fewer GPUs than local ranks.
    """
    global _current
    size = _size()
    if size == 1 or _current is not SINGLE:
        yield _current
        return
    device = _device()
    with _explained():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=TENSOR_TIMEOUT)
        control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        _current = Ranks(dist.get_rank(), size, device, control)
        try:
            yield _current
            # The first rank to finish must not close its connections while others still read.
            _current.gather(b"")
            dist.destroy_process_group()
        finally:
            _current = SINGLE


def _device() -> torch.device:
    absent = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise TrimtabError(
            f"WORLD_SIZE is set but {absent[0]} is not: start several ranks with "
            "`torchrun --nproc-per-node N -m trimtab train ...`, or unset WORLD_SIZE"
        )
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= count:
        raise TrimtabError(f"local rank {local} has no GPU of its own, there are {count}: lower --nproc-per-node")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise TrimtabError(
            f"another rank is gone, its own message says why: {RESUME}, on any number of ranks"
        ) from error


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _line(error: Exception) -> bytes:
    """Never empty: that would say that all is well."""
    return (str(error) or type(error).__name__).encode()
