"""Weight updates of engines: checks against the engine's model, and transfer as an unnamed file or as a folder.

Inference engines accept any set of weights: unknown names are skipped and missing names keep their old values, both
without an error. Therefore `WeightManifest` checks an update completely before any weight is handed over.

`SharedWeights` is for processes of this machine. Its file has no name: it is in memory (`memfd`) or, on systems without
memfd, a deleted temporary file. The file descriptor is sent to the other processes. The system frees the file when the
last descriptor is closed, so a crash leaves no file behind, and the size limit of /dev/shm (64 MB in a container) does
not apply. `WeightFolder` is for servers: one safetensors file in a folder that the servers see.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import socket
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.files import sync
from trimtab.trainer.models.sharding import shared_parameters

ALIGN = 64  # bytes: a cache line, and more than any dtype requires
# (name, dtype without "torch.", shape, first byte)
Entry = Sequence[Any]

SUMMED_WEIGHTS, SUMMED_VALUES = 8, 4096  # numbers of weights, and of values of each, whose checksums are compared
MEMORY = Path("/dev/shm")
PREFIX = "trimtab-weights-"
FILE = "model.safetensors"


@dataclass(frozen=True)
class WeightManifest:
    """The weights of a model: shapes by name, and which names share one tensor.

    `aliases` maps each additional name of a tied parameter to its first name. `required` lists the names that an update
    must contain; buffers and additional names may be left out.
    """

    shapes: Mapping[str, torch.Size]
    aliases: Mapping[str, str]
    required: tuple[str, ...]

    @classmethod
    def of(cls, model: Any) -> WeightManifest:
        """Returns the manifest of a transformers model on any device."""
        shapes = {name: tensor.shape for name, tensor in model.state_dict(keep_vars=True).items()}
        return cls(shapes, shared_parameters(model), tuple(name for name, _ in model.named_parameters()))

    @classmethod
    def read(cls, folder: Path | str) -> WeightManifest:
        """Returns the manifest of a model folder, from its config.json; no weight is read or allocated."""
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            return cls.of(AutoModelForCausalLM.from_config(config, trust_remote_code=False))

    def check(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Validates an update; returns the weights by their first names, each tied tensor once.

        Raises `TrimtabError` if a name is missing, unknown or repeated, a shape differs, values are not finite, or two
        names of one tied weight carry different values.
        """
        given: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name in given:
                raise TrimtabError(f"weight {name!r} was published twice; publish each name once")
            given[name] = tensor.detach()
        chosen: dict[str, Tensor] = {}
        for name, tensor in given.items():
            self._check_one(name, tensor)
            first = chosen.setdefault(self.aliases.get(name, name), tensor)
            if first is not tensor and first.data_ptr() != tensor.data_ptr() and not torch.equal(first, tensor):
                raise TrimtabError(
                    f"weight {name!r} is tied in the engine but differs from its twin; tie them or publish one name"
                )
        missing = [name for name in self.required if name not in chosen]
        if missing:
            raise TrimtabError(
                f"weight {missing[0]!r} is missing ({len(missing)} in all); publish every weight of the model"
            )
        return chosen

    def _check_one(self, name: str, tensor: Tensor) -> None:
        if name not in self.shapes:
            raise TrimtabError(f"weight {name!r} is not in the engine's model{did_you_mean(name, self.shapes)}")
        if tensor.shape != self.shapes[name]:
            shapes = f"{tuple(tensor.shape)}, the engine's is {tuple(self.shapes[name])}"
            raise TrimtabError(f"weight {name!r} has shape {shapes}; publish merged weights of the same model")
        # The sum takes one cheap pass. If it is not finite (a bad value, or an overflow), every value is checked.
        if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
            raise TrimtabError(f"weight {name!r} has non-finite values; the engine keeps the weights it has")


def checksum(weight: Tensor, dtype: torch.dtype) -> int:
    """Returns the CRC-32 of at most `SUMMED_VALUES` evenly spaced values of a weight, cast to `dtype`."""
    flat = weight.detach().reshape(-1)
    values = flat[:: max(1, -(-len(flat) // SUMMED_VALUES))].to("cpu", dtype).contiguous()
    return crc32(values.view(torch.uint8).numpy().data)


class SharedWeights:
    """Named weights in an unnamed file; each iteration yields all (name, tensor) pairs.

    The tensors are views of a private mapping on the CPU. Writing to them does not change the file, and they stay valid
    after `close`, which garbage collection also calls. One object may be published to several engines.
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
    """Returns a copy of `weights` that other processes can map. Tied weights are stored once."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("trimtab-weights")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        return SharedWeights(descriptor, _write(descriptor, weights))
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise TrimtabError(f"weights cannot be handed to the engine: {error.strerror}; free memory") from error
        raise


def with_first_names(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, str]]:
    """Yields (name, weight, first name). The first name is the one under which the same tensor came first."""
    known: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], str]] = {}
    for name, weight in weights:
        key = (weight.device, weight.data_ptr(), weight.dtype, weight.shape, weight.stride())
        # Equal addresses mean equal weights only while the first tensor is alive: otherwise it was a temporary (a
        # merged adapter) whose memory was reused. Tensors without elements share an address.
        if not weight.numel() or key not in known or known[key][0]() is None:
            known[key] = weakref.ref(weight), name
        yield name, weight, known[key][1]


def require_all_loaded(missing: Iterable[Iterable[str]], engine: str) -> None:
    """Raises `TrimtabError` if a vLLM worker did not load a parameter. missing: names of such parameters, by worker."""
    if names := sorted({name for worker in missing for name in worker}):
        raise TrimtabError(
            f"{engine} did not take over weight {names[0]!r} ({len(names)} in all): vLLM's model is not transformers'; "
            "use another engine for this model"
        )


def _write(descriptor: int, weights: Iterable[tuple[str, Any]]) -> list[Entry]:
    entries: list[Entry] = []
    starts: dict[str, int] = {}
    end = 0
    for name, tensor, first in with_first_names(weights):
        if first == name:
            starts[name] = -(-end // ALIGN) * ALIGN
            end = starts[name] + _write_tensor(descriptor, tensor.detach(), starts[name])
        entries.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), starts[first]])
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


class WeightFolder:
    """The last published weights in a folder. They stay until the next update: a server that restarts needs them again.

    The folder name contains machine and process id, so that the next engine on this machine can remove the folders of a
    killed process. `dtype` is the servers' dtype; weights are cast to it before they are written.
    """

    def __init__(self, folder: str | None, dtype: torch.dtype) -> None:
        root = MEMORY if folder is None else Path(folder)
        if not root.is_dir():
            raise TrimtabError(
                f"engine.server.folder = {str(root)!r} is not a folder; name one that the trainer and the servers see"
            )
        self.token = secrets.token_hex(4)
        self._dtype = dtype
        self._base = root / f"{_machine_prefix()}{os.getpid()}-{self.token}"
        self._count = 0
        self.current: Path | None = None
        self._finalizer = weakref.finalize(self, _remove, self._base, os.getpid())
        _remove_leftovers(root)

    def write(self, tensors: Mapping[str, Tensor], version: int) -> tuple[Path, str]:
        """Writes these weights to a new folder; returns the folder and a unique label of the weights."""
        self._count += 1
        folder = self._base / str(self._count)
        try:
            folder.mkdir(parents=True, mode=0o755)
            cast = {
                name: tensor.detach().to("cpu", self._dtype if tensor.is_floating_point() else None).contiguous()
                for name, tensor in tensors.items()
            }
            save_file(cast, folder / FILE)
            # safetensors creates the file with mode 0600; the servers may run as another user.
            (folder / FILE).chmod(folder.stat().st_mode & 0o666)
            sync(folder / FILE)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            message = getattr(error, "strerror", None) or error
            raise TrimtabError(
                f"cannot write weights to {folder}: {message}; free space there or set engine.server.folder"
            ) from error
        if self.current is not None:
            shutil.rmtree(self.current, ignore_errors=True)
        self.current = folder
        return folder, f"{self.token}-{self._count}-v{version}"

    def read(self) -> Iterator[tuple[str, Tensor]]:
        if self.current is None:
            raise TrimtabError("the servers have not been given any weights yet: publish first")
        yield from read_weights(self.current / FILE)

    def remove(self) -> None:
        self._finalizer()
        self.current = None


def read_weights(file: Path | str) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of a safetensors file."""
    with safe_open(file, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118  (not a mapping)
            yield name, weights.get_tensor(name)


def _remove(home: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked copy of the process must not remove its weights
        shutil.rmtree(home, ignore_errors=True)


def _machine_prefix() -> str:
    """Returns the name prefix of this machine's folders.

    The prefix contains the process-id namespace: containers may share host name and folder, but not process ids.
    """
    space = Path("/proc/self/ns/pid")
    return f"{PREFIX}{socket.gethostname()}-{space.stat().st_ino if space.exists() else 0}-"


def _remove_leftovers(root: Path) -> None:
    """Removes the folders of engines of this machine whose process has exited."""
    start = _machine_prefix()
    for item in root.glob(f"{start}*-*"):
        owner = item.name.removeprefix(start).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(item, ignore_errors=True)
