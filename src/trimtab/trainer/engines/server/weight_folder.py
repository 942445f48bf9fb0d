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

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.remote.shared_weights import Entry

MEMORY = Path("/dev/shm")
PREFIX = "trimtab-weights-"
FILE = "model.safetensors"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "I32": "int32", "BOOL": "bool"}


class WeightFolder:
    """The last published weights in a folder. They stay until the next update: a server that restarts needs them again.

    The folder name contains machine and process id, so that the next engine on this machine removes the folders of a
    killed one. `dtype` is the servers' dtype; weights are cast to it before they are written.
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
        """Writes these weights to a new folder; returns the complete folder and a label that is unique to them."""
        self._count += 1
        folder = self._base / str(self._count)
        temporary = folder.with_name(f".{folder.name}")
        try:
            temporary.mkdir(parents=True, mode=0o755)
            cast = {
                name: tensor.detach().to("cpu", self._dtype if tensor.is_floating_point() else None).contiguous()
                for name, tensor in tensors.items()
            }
            save_file(cast, temporary / FILE)
            # safetensors creates it with mode 0600; the servers may run as another user.
            (temporary / FILE).chmod(temporary.stat().st_mode & 0o666)
            for path in (temporary / FILE, temporary):
                _sync(path)
            temporary.rename(folder)
            _sync(self._base)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            message = getattr(error, "strerror", None) or error
            raise TrimtabError(
                f"cannot write weights to {folder}: {message}; free space there or set engine.server.folder"
            ) from error
        if self.current is not None:
            shutil.rmtree(self.current, ignore_errors=True)
        self.current = folder
        return folder, f"{self.token}-{self._count}-v{version}"

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights written last."""
        if self.current is None:
            raise TrimtabError("the servers have not been given any weights yet: publish first")
        with safe_open(self.current / FILE, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                yield name, file.get_tensor(name)

    def remove(self) -> None:
        self._finalizer()
        self.current = None


def entries(folder: Path) -> tuple[Path, list[Entry]]:
    """Returns the file in a published folder and the entries of its weights (`shared_weights.SharedWeights`)."""
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
    if os.getpid() == owner:  # a forked copy of the process must not remove its weights
        shutil.rmtree(home, ignore_errors=True)


def _machine_prefix() -> str:
    """Returns the name prefix of this machine's folders.

    It contains the process-id namespace, because containers may share host name and folder, but not process ids.
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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
