"""Weight updates through the object store, in objects of bounded size.

Each object holds whole tensors and the publication, version and position it belongs to, so that a receiver notices a
wrong or stale object. On the receiving node tensors share the memory of the object store, without a copy.
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
    """One object: its place, and (name, dtype without "torch.", shape, bytes) of each tensor."""

    key: str
    version: int
    number: int
    tensors: list[tuple[str, str, tuple[int, ...], NDArray[np.uint8]]]


@dataclass(frozen=True, slots=True)
class Publication:
    """References to all objects of one publication, in order; `key` is new for every publication."""

    key: str
    version: int
    references: tuple[Any, ...]


class Publisher:
    """Puts weights into the object store, once however many engines take the same publication.

    Matrices travel in `dtype`, into which the engine would round them on arrival. Everything else (norms, biases,
    buffers) is small, may be kept in full precision there, and travels as it is.
    """

    def __init__(self, dtype: torch.dtype, limit: int) -> None:
        self._dtype = dtype
        self._limit = limit
        self._lock = threading.Lock()
        self._source: Iterable[tuple[str, Tensor]] | None = None
        self._last: Publication | None = None

    def put(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Publication:
        """Returns the publication of `weights`; the one before it is dropped from the store once no engine reads it.

        Publications are told apart by the object that holds the weights: version numbers do not do it, because an
        evaluation publishes two sets of weights under one version.
        """
        with self._lock:
            if self._last is None or self._last.version != version or self._source is not weights:
                self._source = self._last = None  # gone from the store before the next one fills it
                self._last = publication(pack(weights, secrets.token_hex(8), version, self._limit, self._dtype))
                self._source = None if isinstance(weights, Iterator) else weights
            return self._last


def publication(shards: Iterable[Shard]) -> Publication:
    """Puts every object of a publication into the store as it is made."""
    import ray

    references, last = [], None
    for last in shards:
        references.append(ray.put(last))
    if last is None:
        raise TrimtabError("nothing to publish: the model has no weights")
    return Publication(last.key, last.version, tuple(references))


def pack(
    weights: Iterable[tuple[str, Tensor]], key: str, version: int, limit: int, dtype: torch.dtype | None = None
) -> Iterator[Shard]:
    """Groups tensors, in order, into objects of at most `limit` bytes (a larger tensor is an object of its own).

    A tied tensor travels once, under its first name.
    """
    known: dict[tuple[Any, ...], weakref.ref[Tensor]] = {}
    shard, size = Shard(key, version, 0, []), 0
    for name, weight in weights:
        place = (weight.device, weight.data_ptr(), weight.dtype, weight.shape, weight.stride())
        # Only a tensor that is still alive proves that one address means one tensor: memory is used again.
        if weight.numel() and place in known and known[place]() is not None:
            continue
        known[place] = weakref.ref(weight)
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
    """Yields the named tensors of a publication; they share the memory of the objects and must only be read.

    Raises:
        TrimtabError: an object belongs to another publication or version, or stands in another's place.
    """
    for number, shard in enumerate(shards):
        if shard[:3] != (key, version, number):
            raise TrimtabError(
                f"object {number} of the weights of version {version} is object {shard.number} of version "
                f"{shard.version} (publication {shard.key}, expected {key}): the object store mixed them up"
            )
        for name, dtype, shape, array in shard.tensors:
            yield name, _tensor(array, getattr(torch, dtype), shape)


def fetch(references: Sequence[Any]) -> Iterator[Shard]:
    """Yields the objects behind `references`, one at a time."""
    import ray

    for reference in references:
        yield ray.get(reference)


def _tensor(array: NDArray[np.uint8], dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if not array.size:  # no bytes cannot be seen as numbers
        return torch.empty(tuple(shape), dtype=dtype)
    with warnings.catch_warnings():
        # Objects of the store are read-only; torch has no such tensors and warns of it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).view(dtype).reshape(tuple(shape))
