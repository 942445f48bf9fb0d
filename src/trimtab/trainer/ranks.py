"""The process group of a run and its collectives: broadcast, gather, sum, run on all ranks.

`torchrun` starts one process for each device and numbers them in the environment. Every rank runs the same program;
rank 0 is the leader: only it has the engines and the run directory, samples and scores. Ranks exchange tensors and
bytes (JSON, safetensors, parquet), never pickles. A run of one process uses `SINGLE_RANK`, which exchanges nothing.
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

# Timeout of tensor collectives between training ranks. Publishing weights to slow servers may delay one of them.
TENSOR_TIMEOUT = timedelta(hours=1)
# Timeout of the control group: followers wait while the leader samples or evaluates, however long that takes. A rank
# that dies is noticed at once, because its connection closes.
CONTROL_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True, eq=False)
class RankGroup:
    """The rank of this process and its collectives."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None  # of its model; None: the device of the model's parameters
    control: Any = None  # the gloo process group for bytes

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def broadcast(self, data: bytes) -> bytes:
        """Returns the leader's `data` on every rank; other ranks' argument is ignored."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0, group=self.control)
        buffer = _tensor(data) if self.is_leader else torch.empty(int(length), dtype=torch.uint8)
        if int(length):
            dist.broadcast(buffer, 0, group=self.control)
        return data if self.is_leader else buffer.numpy().tobytes()

    def broadcast_bool(self, value: bool) -> bool:
        """Returns the leader's `value` on every rank."""
        return self.broadcast(b"1" if value else b"0") == b"1"

    def gather(self, data: bytes) -> list[bytes]:
        """Returns the `data` of all ranks, in the order of ranks, on every rank."""
        if self.size == 1:
            return [data]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.control)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest + 1, dtype=torch.uint8)  # gloo exchanges no empty tensors
        padded[: len(data)] = _tensor(data)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.control)
        return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def all_reduce_sum(self, value: float) -> float:
        """Returns the sum over ranks, added in the order of ranks: the same bits on every rank."""
        return sum(struct.unpack("<d", part)[0] for part in self.gather(struct.pack("<d", value)))

    def all_reduce_max(self, value: float) -> float:
        """Returns the largest value over ranks, on every rank."""
        return max(struct.unpack("<d", part)[0] for part in self.gather(struct.pack("<d", value)))

    def all_reduce_(self, tensor: Tensor) -> None:
        """Replaces a tensor on this rank's device by its sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def run_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Runs `work` on every rank and returns its result; a `TrimtabError` or `OSError` on one rank is raised on all.

        The rank where it happened raises the error itself, the others a `TrimtabError` with its message.
        """
        if self.size == 1:
            return work()
        result, failure, message = None, None, ""
        try:
            result = work()
        except (TrimtabError, OSError) as error:
            failure, message = error, str(error) or type(error).__name__  # an empty message means success
        messages = [part.decode() for part in self.gather(message.encode())]
        if failure is not None:
            raise failure
        for rank, message in enumerate(messages):
            if message:
                raise TrimtabError(f"rank {rank}: {message}")
        return result  # pyright: ignore[reportReturnType]  # `work` returned it


SINGLE_RANK = RankGroup()
_current = SINGLE_RANK


def current_ranks() -> RankGroup:
    """Returns the ranks of the run, as seen from this process; `SINGLE_RANK` outside of `join`."""
    return _current


def launched_by_torchrun() -> bool:
    """Whether torchrun started this process as one of several ranks."""
    return _world_size() > 1


def is_follower() -> bool:
    """Whether this process is one of several ranks, but not the leader."""
    return launched_by_torchrun() and os.environ.get("RANK") != "0"


def _world_size() -> int:
    value = os.environ.get("WORLD_SIZE", "1")
    if not value.isdecimal():
        raise TrimtabError(f"WORLD_SIZE = {value!r} is not a number of ranks: unset it")
    return int(value)


@contextmanager
def join() -> Iterator[RankGroup]:
    """Joins the process group of the ranks that torchrun started (gloo on CPU, nccl between GPUs).

    Yields `SINGLE_RANK` for a run of one process. A nested call does not join again. Inside, the ranks that notice the
    loss of a rank raise `TrimtabError`. Also raises it if torchrun's environment variables are incomplete or invalid,
    or if there are fewer GPUs than local ranks.
    """
    global _current
    size = _world_size()
    if size == 1 or _current is not SINGLE_RANK:
        yield _current
        return
    device = _device()
    with _lost_rank_as_user_error():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=TENSOR_TIMEOUT)
        control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        _current = RankGroup(dist.get_rank(), size, device, control)
        try:
            yield _current
            # A rank that finishes early must not close its connections while others still read from them.
            _current.gather(b"")
            dist.destroy_process_group()
        finally:
            _current = SINGLE_RANK


def _device() -> torch.device:
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise TrimtabError(
            f"WORLD_SIZE is set but {missing[0]} is not: start several ranks with "
            "`torchrun --nproc-per-node N -m trimtab train ...`, or unset WORLD_SIZE"
        )
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= count:
        raise TrimtabError(f"local rank {local} has no GPU, there are {count}: lower --nproc-per-node")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


@contextmanager
def _lost_rank_as_user_error() -> Iterator[None]:
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
