"""The actor that hosts an engine, the remote end of `RayEngine`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trimtab.cluster.object_store_weights import Publication, fetch, pack, publication, unpack
from trimtab.engines.engine_spec import build
from trimtab.engines.remote import wire
from trimtab.types import Engine


class EngineHost:
    """Calls come one at a time, but for `interrupt` and `sign`: Ray runs them beside the call they are about."""

    _engine: Engine

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._folder = tempfile.TemporaryDirectory(prefix="trimtab-engine-")
        self._interrupted = 0
        self._signs = 0
        self._generating = False

    def start(self, spec: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
        """Build the engine from its specification and the files of its model; says where it is."""
        folder = Path(self._folder.name)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        self._engine = build({**spec, "model": str(folder)})
        return {"pid": os.getpid(), "node": os.uname().nodename}

    def generate(self, call: int, request: Mapping[str, Any], arrays: wire.Arrays) -> tuple[Any, ...]:
        """The completions as `wire` packs them, then tokens decoded and prefilled since the engine's start."""
        prefixes = request["prefixes"]
        self._generating = True
        try:
            groups = self._engine.generate(
                wire.unpack_prompts(request["prompts"], arrays),
                request["samples"],
                wire.unpack_sampling(request["sampling"]),
                seed=request["seed"],
                prefixes=None if prefixes is None else wire.unpack_completions(prefixes, arrays),
                interrupt=_Interrupt(self, call),
            )
        finally:
            self._generating = False
        return (*wire.pack_completions(groups), self._engine.decoded, self._engine.prefilled)

    def sign(self) -> int:
        """Of life: another number than last time, if it works.

        While it generates, its engine looks at the interrupt before every token; one that no longer does is stuck.
        """
        self._signs += not self._generating
        return self._signs

    def alive(self) -> None:
        """Answers when what it hosts is alive, or alive again."""
        engine = getattr(self, "_engine", None)  # it may still be starting
        if engine is not None:
            engine.recover()

    def interrupt(self, call: int) -> None:
        """End call number `call` soon, even if it has not begun."""
        self._interrupted = max(self._interrupted, call)

    def publish(self, news: Publication, exact: bool) -> None:
        shards = unpack(fetch(news.references), news.key, news.version)
        self._engine.publish(shards, news.version, exact=exact)

    def weights(self, limit: int) -> Publication:
        """The weights in use, as objects in the store of this node."""
        return publication(pack(self._engine.weights(), "", self._engine.policy_version, limit))

    def close(self) -> None:
        engine = getattr(self, "_engine", None)  # it may still be starting
        if engine is not None:
            engine.close()
        self._folder.cleanup()


class _Interrupt:
    """Whether one call of a host was interrupted."""

    def __init__(self, host: EngineHost, call: int) -> None:
        self._host = host
        self._call = call

    def is_set(self) -> bool:
        self._host._signs += 1
        return self._host._interrupted >= self._call
