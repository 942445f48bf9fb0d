"""Weights in an unnamed memory file that other processes of this machine map.

The file has no name: it is in memory (`memfd`) or, on systems without memfd, an already deleted temporary file. Its
descriptor is sent to the other processes. The system frees it when the last descriptor is closed, so a crash leaves no
file behind, and the size limit of /dev/shm (64 MB in a container) does not apply.
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

ALIGN = 64  # bytes: a cache line, and more than any dtype requires

# (name, dtype without "torch.", shape, first byte)
Entry = Sequence[Any]


class SharedWeights:
    """Named weights in an unnamed file; each iteration yields all (name, tensor) pairs.

    The tensors are views of a private mapping on the CPU: writing to them does not change the file, and they stay valid
    after `close`, which is called when the object is garbage collected. One object may be published to several
    engines.
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
    """Returns a copy of `weights` that other processes can map. Tied weights are stored once.

    Raises:
        TrimtabError: there is not enough memory.
    """
    descriptor = os.memfd_create("trimtab-weights") if hasattr(os, "memfd_create") else _temporary_file()
    try:
        return SharedWeights(descriptor, _write(descriptor, weights))
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise TrimtabError(f"weights cannot be handed to the engine: {error.strerror}; free memory") from error
        raise


def _temporary_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(descriptor: int, weights: Iterable[tuple[str, Any]]) -> list[Entry]:
    entries: list[Entry] = []
    stored: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], int]] = {}
    end = 0
    for name, given in weights:
        tensor: Tensor = given.detach()
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        # Equal addresses mean equal weights only while the first tensor is alive: otherwise it was a temporary (a
        # merged adapter) whose memory was reused.
        earlier = stored.get(key)
        if earlier is not None and earlier[0]() is not None:
            start = earlier[1]
        else:
            start = -(-end // ALIGN) * ALIGN
            end = start + _write_tensor(descriptor, tensor, start)
            stored[key] = (weakref.ref(given), start)
        entries.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start])
    os.truncate(descriptor, max(end, 1))  # an empty file cannot be mapped
    return entries


def _write_tensor(descriptor: int, tensor: Tensor, start: int) -> int:
    """Writes the tensor from byte `start` on; returns its size in bytes."""
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    size = len(data)
    while data:  # one call writes 2 GiB at most
        written = os.pwrite(descriptor, data, start)
        data, start = data[written:], start + written
    return size
