"""Weight updates through Ray's object store, in objects of bounded size.

Each object holds whole tensors, and the weight update, version and position it belongs to, so that a receiver detects a
wrong or stale object. On the receiving node, tensors share the memory of the object store without a copy.
"""

from __future__ import annotations

import secrets
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.errors import TrimtabError


class Shard(NamedTuple):
    """One object: key and version of the update, position, and (name, dtype, shape, bytes) by tensor."""

    key: str
    version: int
    number: int
    tensors: list[tuple[str, str, tuple[int, ...], NDArray[np.uint8]]]  # dtypes without the prefix "torch."


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """References to all objects of one weight update, in order; `key` is unique."""

    key: str
    version: int
    references: tuple[Any, ...]


class WeightPublisher:
    """Puts weights into the object store, once for all engines that load the same update.

    Matrices are stored in `dtype`, to which the engine would round them on arrival. Other tensors (norms, biases,
    buffers) are small and engines may keep them in full precision, so they are not converted.
    """

    def __init__(self, dtype: torch.dtype, limit: int) -> None:
        self._dtype = dtype
        self._limit = limit
        self._lock = threading.Lock()
        self._source: Iterable[tuple[str, Tensor]] | None = None
        self._last: StoredWeights | None = None

    def put(self, weights: Iterable[tuple[str, Tensor]], version: int) -> StoredWeights:
        """Returns references to the stored `weights`; the previous ones are freed once no engine reads them.

        Repeated calls are recognized by the identity of `weights`: version numbers are not enough, because an
        evaluation publishes two sets of weights under one version.
        """
        with self._lock:
            if self._last is None or self._last.version != version or self._source is not weights:
                self._source = self._last = None  # freed before the next update fills the store
                self._last = store_shards(pack(weights, secrets.token_hex(8), version, self._limit, self._dtype))
                self._source = None if isinstance(weights, Iterator) else weights
            return self._last


def store_shards(shards: Iterable[Shard]) -> StoredWeights:
    """Puts the objects of one weight update into the store."""
    import ray

    references, last = [], None
    for last in shards:
        references.append(ray.put(last))
    if last is None:
        raise TrimtabError("nothing to publish: the model has no weights")
    return StoredWeights(last.key, last.version, tuple(references))


def pack(
    weights: Iterable[tuple[str, Tensor]], key: str, version: int, limit: int, dtype: torch.dtype | None = None
) -> Iterator[Shard]:
    """Groups tensors, in order, into objects of at most `limit` bytes (a larger tensor is a separate object).

    A tied tensor is stored once, under its first name.
    """
    known: dict[tuple[Any, ...], weakref.ref[Tensor]] = {}
    shard, size = Shard(key, version, 0, []), 0
    for name, weight in weights:
        identity = (weight.device, weight.data_ptr(), weight.dtype, weight.shape, weight.stride())
        # The first tensor must still be alive, since another one may reuse its memory.
        if weight.numel() and identity in known and known[identity]() is not None:
            continue
        known[identity] = weakref.ref(weight)
        tensor = weight.detach()
        if dtype is not None and tensor.ndim > 1 and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if shard.tensors and size + raw.nbytes > limit:
            yield shard
            shard, size = Shard(key, version, shard.number + 1, []), 0
        shard.tensors.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw))
        size += raw.nbytes
    if shard.tensors:
        yield shard


def unpack(shards: Iterable[Shard], key: str, version: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the named tensors of a weight update. They share memory with the objects and must not be written to.

    Raises:
        TrimtabError: an object belongs to another update or version, or is out of order.
    """
    for number, shard in enumerate(shards):
        if shard[:3] != (key, version, number):
            raise TrimtabError(
                f"object {number} of the weights of version {version} is object {shard.number} of version "
                f"{shard.version} (update {shard.key}, expected {key}): the object store mixed them up"
            )
        for name, dtype, shape, array in shard.tensors:
            yield name, _tensor(array, getattr(torch, dtype), shape)


def fetch_shards(references: Sequence[Any]) -> Iterator[Shard]:
    """Yields the objects behind `references`, one at a time."""
    import ray

    for reference in references:
        yield ray.get(reference)


def _tensor(array: NDArray[np.uint8], dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if not array.size:  # an empty array cannot be viewed as another type
        return torch.empty(tuple(shape), dtype=dtype)
    with warnings.catch_warnings():
        # Objects of the store are read-only; torch has no read-only tensors and warns.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).view(dtype).reshape(tuple(shape))
