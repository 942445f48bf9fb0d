"""Weight updates for servers: one safetensors file in a shared folder."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trimtab.engines.remote.shared_weights import Entry
from trimtab.errors import TrimtabError

MEMORY = Path("/dev/shm")
PREFIX = "trimtab-weights-"
FILE = "model.safetensors"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "I32": "int32", "BOOL": "bool"}


class WeightFolder:
    """The newest published weights. They stay until the next are there: a server that restarts needs them again, and
    nothing else remembers what the servers were given.

    The folder bears the names of this machine and process, so that the next engine on this machine removes what a
    killed one left. `dtype` is the one the servers compute in; rounding here is rounding there.
    """

    def __init__(self, folder: str | None, dtype: torch.dtype) -> None:
        root = MEMORY if folder is None else Path(folder)
        if not root.is_dir():
            raise TrimtabError(
                f"engine.server.folder = {str(root)!r} is not a folder; name one that the trainer and the servers see"
            )
        self.token = secrets.token_hex(4)
        self._dtype = dtype
        self._home = root / f"{_machine()}{os.getpid()}-{self.token}"
        self._count = 0
        self.current: Path | None = None
        self._end = weakref.finalize(self, _remove, self._home, os.getpid())
        _sweep(root)

    def write(self, tensors: Mapping[str, Tensor], version: int) -> tuple[Path, str]:
        """A new folder with these weights, complete when it is returned, and a label no other weights ever have."""
        self._count += 1
        folder = self._home / str(self._count)
        temporary = folder.with_name(f".{folder.name}")
        try:
            temporary.mkdir(parents=True, mode=0o755)
            save_file({name: self._own(tensor) for name, tensor in tensors.items()}, temporary / FILE)
            # safetensors makes it 0600; the servers may be another user's.
            (temporary / FILE).chmod(temporary.stat().st_mode & 0o666)
            for path in (temporary / FILE, temporary):
                _sync(path)
            temporary.rename(folder)
            _sync(self._home)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            said = getattr(error, "strerror", None) or error
            raise TrimtabError(
                f"cannot write weights to {folder}: {said}; free space there or set engine.server.folder"
            ) from error
        if self.current is not None:
            shutil.rmtree(self.current, ignore_errors=True)
        self.current = folder
        return folder, f"{self.token}-{self._count}-v{version}"

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """The weights written last."""
        if self.current is None:
            raise TrimtabError("the servers have not been given any weights yet: publish first")
        with safe_open(self.current / FILE, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                yield name, file.get_tensor(name)

    def remove(self) -> None:
        self._end()
        self.current = None

    def _own(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach().to("cpu")
        return (tensor.to(self._dtype) if tensor.is_floating_point() else tensor).contiguous()


def entries(folder: Path) -> tuple[Path, list[Entry]]:
    """The file in a published folder, and where each weight lies in it (`handover.SharedWeights`)."""
    path = folder / FILE
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    table: list[Entry] = [
        [name, _DTYPES[item["dtype"]], item["shape"], 8 + size + item["data_offsets"][0]]
        for name, item in header.items()
        if name != "__metadata__"
    ]
    return path, table


def _remove(home: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked copy of the owner must not take its weights away
        shutil.rmtree(home, ignore_errors=True)


def _machine() -> str:
    """How folders of this machine begin. Containers may share name and folder, but not the numbers of processes."""
    space = Path("/proc/self/ns/pid")
    return f"{PREFIX}{socket.gethostname()}-{space.stat().st_ino if space.exists() else 0}-"


def _sweep(root: Path) -> None:
    """Remove what engines of this machine left whose process is gone."""
    start = _machine()
    for item in root.glob(f"{start}*-*"):
        owner = item.name.removeprefix(start).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(item, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
