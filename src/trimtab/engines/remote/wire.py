"""The messages between a process and an engine in another process: JSON, raw arrays, file descriptors.

    magic (4 bytes) | length of the header | length of the body | header: JSON | body: concatenated arrays

Nothing in a frame is executed or unpickled, and numbers arrive bit for bit. Both ends are processes of one machine,
connected by a Unix socket; file descriptors (weights) are sent with the first bytes of their frame.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.types import Completion, IntArray, Problem, Prompt, Sampling

Arrays = Mapping[str, NDArray[Any]]
Groups = Sequence[Sequence[Completion]]

MAGIC = b"trm1"
START = struct.Struct("<4sQQ")
ALIGN = 8  # bytes; torch requires that an array starts at a multiple of its item size
DTYPES = frozenset({"int64", "int16", "float32"})


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A received message: `head` as sent, writable arrays by name, and descriptors the receiver must close."""

    head: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    files: list[int]


def send(
    connection: socket.socket, head: Mapping[str, Any], arrays: Arrays | None = None, files: Sequence[int] = ()
) -> None:
    """Sends one frame with at most one file descriptor. Raises `OSError` when the other end is gone."""
    parts = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    layout = [[name, array.dtype.name, list(array.shape)] for name, array in parts.items()]
    header = json.dumps({"head": head, "arrays": layout}).encode()
    body = sum(_padded(array.nbytes) for array in parts.values())
    preamble = START.pack(MAGIC, len(header), body)
    sent = socket.send_fds(connection, [preamble], files) if files else 0
    connection.sendall(preamble[sent:] + header)
    for array in parts.values():
        connection.sendall(array.reshape(-1).view(np.uint8).data)
        connection.sendall(bytes(_padded(array.nbytes) - array.nbytes))


def receive(connection: socket.socket) -> Frame:
    """Returns the next frame. Raises `ConnectionError` if the connection ends or holds anything else."""
    preamble, files, _, _ = socket.recv_fds(connection, START.size, 1)
    for file in files:
        os.set_inheritable(file, False)
    if not preamble:
        raise ConnectionError("the other end has closed the connection")
    preamble += bytes(_receive_bytes(connection, START.size - len(preamble)))
    magic, length, body = START.unpack(preamble)
    if magic != MAGIC:
        raise ConnectionError(f"not a frame: it begins with {magic!r}")
    header = json.loads(bytes(_receive_bytes(connection, length)))
    data = _receive_bytes(connection, body)
    arrays: dict[str, NDArray[Any]] = {}
    offset = 0
    for name, kind, shape in header["arrays"]:
        if kind not in DTYPES:
            raise ConnectionError(f"not a frame: array {name!r} of type {kind!r}")
        count = math.prod(shape)
        arrays[name] = np.frombuffer(data, dtype=kind, count=count, offset=offset).reshape(shape)
        offset += _padded(arrays[name].nbytes)
    return Frame(header["head"], arrays, list(files))


def _receive_bytes(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if received == 0:
            raise ConnectionError("the connection ended in the middle of a frame")
        view = view[received:]
    return data


def _padded(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


def pack_prompts(prompts: Sequence[Prompt]) -> tuple[list[list[str]], dict[str, NDArray[Any]]]:
    """Packs id, text and tokens of each prompt; the answer and the other fields of its problem are not sent."""
    names = [[prompt.problem.id, prompt.text] for prompt in prompts]
    return names, _concatenate("prompt", [prompt.ids for prompt in prompts], np.int64)


def unpack_prompts(names: Sequence[Sequence[str]], arrays: Arrays) -> list[Prompt]:
    parts = _split("prompt", arrays)
    return [Prompt(Problem(name, "", ""), text, ids) for (name, text), ids in zip(names, parts, strict=True)]


def pack_sampling(sampling: Sampling) -> dict[str, Any]:
    return asdict(sampling)


def unpack_sampling(data: Mapping[str, Any]) -> Sampling:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return Sampling(**values)


def pack_completions(groups: Groups) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Packs completions into one array per field. All per-token fields must be as long as the ids."""
    rows = [completion for group in groups for completion in group]
    head = {
        "groups": [len(group) for group in groups],
        "finish": [row.finish for row in rows],
        "text": [row.text for row in rows],
        "entropy": [row.entropy is not None for row in rows],
        "kept": [row.kept is not None for row in rows],
        "routes": [None if row.routes is None else list(row.routes.shape[1:]) for row in rows],
    }
    arrays = (
        _concatenate("ids", [row.response_ids for row in rows], np.int64)
        | _concatenate("logp", [row.logp_behavior for row in rows], np.float32)
        | _concatenate("version", [row.policy_version for row in rows], np.int64)
        | _concatenate("entropy", [row.entropy for row in rows if row.entropy is not None], np.float32)
        | _concatenate("kept", [ids for row in rows for ids in row.kept or ()], np.int64)
        | _concatenate("routes", [row.routes.reshape(-1) for row in rows if row.routes is not None], np.int16)
    )
    return head, arrays


def unpack_completions(head: Mapping[str, Any], arrays: Arrays) -> list[list[Completion]]:
    ids, logp, version = (_split(name, arrays) for name in ("ids", "logp", "version"))
    entropies, masks, routes = (iter(_split(name, arrays)) for name in ("entropy", "kept", "routes"))
    rows = iter(
        [
            Completion(
                response_ids=ids[i],
                logp_behavior=logp[i],
                policy_version=version[i],
                finish=finish,
                text=text,
                entropy=next(entropies) if has_entropy else None,
                kept=tuple(next(masks) for _ in ids[i]) if has_kept else None,
                routes=None if choices is None else next(routes).reshape(-1, *choices),
            )
            for i, (finish, text, has_entropy, has_kept, choices) in enumerate(
                zip(*(head[name] for name in ("finish", "text", "entropy", "kept", "routes")), strict=True)
            )
        ]
    )
    return [[next(rows) for _ in range(size)] for size in head["groups"]]


def _concatenate(name: str, parts: Iterable[Any], dtype: Any) -> dict[str, NDArray[Any]]:
    """Returns the concatenated arrays and their lengths."""
    arrays = [np.asarray(part, dtype=dtype) for part in parts]
    lengths = np.array([len(part) for part in arrays], dtype=np.int64)
    return {f"{name}.length": lengths, name: np.concatenate([np.empty(0, dtype=dtype), *arrays])}


def _split(name: str, arrays: Arrays) -> list[NDArray[Any]]:
    lengths: IntArray = arrays[f"{name}.length"]
    return np.split(arrays[name], np.cumsum(lengths)[:-1]) if len(lengths) else []
