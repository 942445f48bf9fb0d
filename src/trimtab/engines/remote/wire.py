"""Messages between a process and the engine hosted in another: JSON, raw arrays, file descriptors.

    magic (4 bytes) | length of the header | length of the body | header: JSON | body: arrays, one after the other

Nothing in a frame is ever run or unpickled. Numbers come out as they went in, bit for bit. The two ends are processes
of one machine, joined by a Unix socket; open files (weights) travel beside the first bytes of their frame.
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
ALIGN = 8  # torch refuses arrays whose numbers straddle their natural places
DTYPES = frozenset({"int64", "int16", "float32"})


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """What was received: `head` as it was sent, arrays by name (writable), and descriptors the receiver must close."""

    head: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    files: list[int]


def send(
    connection: socket.socket, head: Mapping[str, Any], arrays: Arrays | None = None, files: Sequence[int] = ()
) -> None:
    """Send one frame; at most one open file with it. `OSError` when the other end is gone."""
    parts = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    layout = [[name, array.dtype.name, list(array.shape)] for name, array in parts.items()]
    header = json.dumps({"head": head, "arrays": layout}).encode()
    body = sum(_padded(array.nbytes) for array in parts.values())
    start = START.pack(MAGIC, len(header), body)
    sent = socket.send_fds(connection, [start], files) if files else 0
    connection.sendall(start[sent:] + header)
    for array in parts.values():
        connection.sendall(array.reshape(-1).view(np.uint8).data)
        connection.sendall(bytes(_padded(array.nbytes) - array.nbytes))


def receive(connection: socket.socket) -> Frame:
    """The next frame. `ConnectionError` where the connection ends, or holds something else than a frame."""
    start, files, _, _ = socket.recv_fds(connection, START.size, 1)
    for file in files:
        os.set_inheritable(file, False)
    if not start:
        raise ConnectionError("the other end has closed the connection")
    start += bytes(_exactly(connection, START.size - len(start)))
    magic, length, body = START.unpack(start)
    if magic != MAGIC:
        raise ConnectionError(f"not a frame: it begins with {magic!r}")
    header = json.loads(bytes(_exactly(connection, length)))
    data = _exactly(connection, body)
    arrays: dict[str, NDArray[Any]] = {}
    place = 0
    for name, kind, shape in header["arrays"]:
        if kind not in DTYPES:
            raise ConnectionError(f"not a frame: array {name!r} of type {kind!r}")
        count = math.prod(shape)
        arrays[name] = np.frombuffer(data, dtype=kind, count=count, offset=place).reshape(shape)
        place += _padded(arrays[name].nbytes)
    return Frame(header["head"], arrays, list(files))


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if got == 0:
            raise ConnectionError("the connection ended in the middle of a frame")
        view = view[got:]
    return data


def _padded(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


def pack_prompts(prompts: Sequence[Prompt]) -> tuple[list[list[str]], dict[str, NDArray[Any]]]:
    """An engine is told a prompt's id, text and tokens; never its answer, nor anything else of its problem."""
    names = [[prompt.problem.id, prompt.text] for prompt in prompts]
    return names, _joined("prompt", [prompt.ids for prompt in prompts], np.int64)


def unpack_prompts(names: Sequence[Sequence[str]], arrays: Arrays) -> list[Prompt]:
    parts = _parted("prompt", arrays)
    return [Prompt(Problem(name, "", ""), text, ids) for (name, text), ids in zip(names, parts, strict=True)]


def pack_sampling(sampling: Sampling) -> dict[str, Any]:
    return asdict(sampling)


def unpack_sampling(data: Mapping[str, Any]) -> Sampling:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return Sampling(**values)


def pack_completions(groups: Groups) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Completions in few arrays, however many they are. All their per-token fields must be as long as their ids."""
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
        _joined("ids", [row.response_ids for row in rows], np.int64)
        | _joined("logp", [row.logp_behavior for row in rows], np.float32)
        | _joined("version", [row.policy_version for row in rows], np.int64)
        | _joined("entropy", [row.entropy for row in rows if row.entropy is not None], np.float32)
        | _joined("kept", [ids for row in rows for ids in row.kept or ()], np.int64)
        | _joined("routes", [row.routes.reshape(-1) for row in rows if row.routes is not None], np.int16)
    )
    return head, arrays


def unpack_completions(head: Mapping[str, Any], arrays: Arrays) -> list[list[Completion]]:
    ids, logp, version = (_parted(name, arrays) for name in ("ids", "logp", "version"))
    entropies, sets, routes = (iter(_parted(name, arrays)) for name in ("entropy", "kept", "routes"))
    rows = iter(
        [
            Completion(
                response_ids=ids[i],
                logp_behavior=logp[i],
                policy_version=version[i],
                finish=finish,
                text=text,
                entropy=next(entropies) if has_entropy else None,
                kept=tuple(next(sets) for _ in ids[i]) if has_kept else None,
                routes=None if choices is None else next(routes).reshape(-1, *choices),
            )
            for i, (finish, text, has_entropy, has_kept, choices) in enumerate(
                zip(*(head[name] for name in ("finish", "text", "entropy", "kept", "routes")), strict=True)
            )
        ]
    )
    return [[next(rows) for _ in range(size)] for size in head["groups"]]


def _joined(name: str, parts: Iterable[Any], dtype: Any) -> dict[str, NDArray[Any]]:
    """Many short arrays as one, and their lengths."""
    listed = [np.asarray(part, dtype=dtype) for part in parts]
    lengths = np.array([len(part) for part in listed], dtype=np.int64)
    return {f"{name}.length": lengths, name: np.concatenate([np.empty(0, dtype=dtype), *listed])}


def _parted(name: str, arrays: Arrays) -> list[NDArray[Any]]:
    lengths: IntArray = arrays[f"{name}.length"]
    return np.split(arrays[name], np.cumsum(lengths)[:-1]) if len(lengths) else []
