"""Weights in an unnamed memory file that other processes of this machine map.

The file has no name. It lives in memory (`memfd`) or, where the system has no such thing, as a temporary file that is
already deleted; its open descriptor is what travels. The system frees it with the last process that has it open, so
none is left behind by a crash, and the size limit of /dev/shm (64 MB in a container) does not apply.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import TrimtabError

ALIGN = 64  # bytes: a cache line, and more than any number type asks for

# (name, dtype without "torch.", shape, first byte)
Entry = Sequence[Any]


class SharedWeights:
    """Named weights in a nameless file; iterating yields (name, tensor), each time from the start.

    The tensors are views of a private mapping on the CPU: writing to them reaches no one else, and they outlive
    `close`, which happens by itself when the object is forgotten. Published to several `ProcessEngine`s, one object
    hands the weights to all of them.
    """

    def __init__(self, descriptor: int, entries: Sequence[Entry]) -> None:
        self.descriptor = descriptor
        self.entries = entries
        self.close = weakref.finalize(self, os.close, descriptor)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        mapping = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_COPY)
        for name, kind, shape, start in self.entries:
            dtype = getattr(torch, kind)
            tensor = torch.empty(shape, dtype=dtype)
            if tensor.numel():
                tensor = torch.frombuffer(mapping, dtype=dtype, count=tensor.numel(), offset=start).view(shape)
            yield name, tensor


def share(weights: Iterable[tuple[str, Any]]) -> SharedWeights:
    """A copy of `weights` that other processes can map. Tied weights are stored once.

    Raises:
        TrimtabError: there is no room for it.
    """
    descriptor = os.memfd_create("trimtab-weights") if hasattr(os, "memfd_create") else _temporary()
    try:
        return SharedWeights(descriptor, _write(descriptor, weights))
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise TrimtabError(f"weights cannot be handed to the engine: {error.strerror}; free memory") from error
        raise


def _temporary() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(descriptor: int, weights: Iterable[tuple[str, Any]]) -> list[Entry]:
    entries: list[Entry] = []
    stored: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], int]] = {}
    end = 0
    for name, given in weights:
        tensor: Tensor = given.detach()
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        # Only a tensor that is still alive proves that equal addresses mean equal weights: others are temporaries
        # (merged adapters) whose memory has been used again.
        twin = stored.get(key)
        if twin is not None and twin[0]() is not None:
            start = twin[1]
        else:
            start = -(-end // ALIGN) * ALIGN
            end = start + _put(descriptor, tensor, start)
            stored[key] = (weakref.ref(given), start)
        entries.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start])
    os.truncate(descriptor, max(end, 1))  # nothing cannot be mapped
    return entries


def _put(descriptor: int, tensor: Tensor, start: int) -> int:
    """Write the tensor's numbers from byte `start` on; how many bytes they are."""
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    size = len(data)
    while data:  # one call writes 2 GiB at most
        written = os.pwrite(descriptor, data, start)
        data, start = data[written:], start + written
    return size
