"""Checkpoints (`checkpoints/step-000010/`): atomic, with digests verified on loading, without pickle.

    manifest.json            format, step, and size + sha256 of every other file
    meta.json                counters and everything that is not a tensor
    <section>.safetensors    named tensors: model, optimizer, ...
    <section>/*.safetensors  the same, a part from every rank (`sharded_sections.py`), where tensors are sharded
    <anything else>          files of the caller, e.g. pending.parquet

`checkpoints/best.json` points at the best one; it and its folder survive `prune`.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from trimtab.errors import TrimtabError, TrimtabWarning
from trimtab.models.sharding import is_sharded
from trimtab.runs import atomic
from trimtab.runs.layout import (
    BEST,
    best_checkpoint,
    checkpoint_folder,
    checkpoint_step,
    list_checkpoints,
)
from trimtab.training.checkpoint.sharded_sections import Shards, write
from trimtab.training.ranks import SINGLE, Ranks, here

FORMAT = 1
MANIFEST, META = "manifest.json", "meta.json"
_SECTION = ".safetensors"


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A verified checkpoint. CPU tensors are mapped from its files: copy them into place, do not keep them.

    Sections that ranks wrote together are `sharded.Shards`, which read what is asked for.
    `skipped` says, newest first and one line each, which newer checkpoints were damaged.
    """

    step: int
    folder: Path
    tensors: dict[str, Mapping[str, Tensor]]
    meta: Any
    files: dict[str, bytes] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


def save(
    root: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    meta: Any,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write `root/step-<step>` in one rename and return it; a checkpoint of the same step is replaced.

    Where there are several ranks, all must call; `meta`, `files` and what is not sharded are the leader's. `tensors`:
    section -> name -> tensor (no two may share memory, see `state_tensors.model_state`). `meta`: JSON values;
    non-finite floats are allowed here, as only `load` reads them. Raises `TrimtabError` when the disk is full; every
    checkpoint that was there before is still there.
    """
    folder, ranks = checkpoint_folder(root, step), here()
    spread = {section for section, named in tensors.items() if any(map(is_sharded, named.values()))}
    with _new_folder(folder, ranks) as temporary:
        described: dict[str, Any] = {}
        if spread:
            parts = {section: tensors[section] for section in sorted(spread)}
            mine = ranks.together(partial(_write_shards, folder, temporary, parts, ranks.rank))
            for part in ranks.gather(json.dumps(mine).encode()):
                described |= json.loads(part)
        whole = {section: named for section, named in tensors.items() if section not in spread}

        @atomic.explained(folder)
        def finish() -> None:
            for section, named in whole.items():
                _write_tensors(temporary / f"{section}{_SECTION}", named)
            (temporary / META).write_text(json.dumps(meta))
            for name, data in (files or {}).items():
                (temporary / name).write_bytes(data)
            items = {item.name: _describe(item) for item in sorted(temporary.iterdir()) if item.is_file()}
            manifest = {"format": FORMAT, "step": step, "files": items | described}
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))

        ranks.together(finish if ranks.leads else _nothing)
    return folder


def load(folder: Path, sections: Collection[str] | None = None) -> LoadedCheckpoint:
    """Check and read one checkpoint; `sections` limits both to these tensors (and to `meta`).

    Raises `TrimtabError` naming the file that is missing, cut, changed or unreadable.
    """
    return _read(folder, _verified(folder, sections, SINGLE), sections)


def _verified(folder: Path, sections: Collection[str] | None, ranks: Ranks) -> list[str]:
    """The names of the files that are wanted; of several ranks each has checked its share of them."""
    files = _manifest(folder)["files"]
    wanted = [name for name in files if _is_wanted(name, sections)]
    for name in wanted[ranks.rank :: ranks.size]:
        _verify(folder / name, files[name])
    return wanted


def _read(folder: Path, wanted: Sequence[str], sections: Collection[str] | None) -> LoadedCheckpoint:
    """Only after all of `wanted` were verified: a damaged header may make the reader do anything."""
    tensors: dict[str, Mapping[str, Tensor]] = {}
    others: dict[str, bytes] = {}
    for name in wanted:
        section, inner, _ = name.partition("/")
        if inner:
            tensors[section] = tensors.get(section) or Shards(folder / section)
        elif name.endswith(_SECTION):
            tensors[name.removesuffix(_SECTION)] = load_file(folder / name)
        elif name != META:
            others[name] = (folder / name).read_bytes()
    absent = sorted(set(sections or ()) - set(tensors))
    if absent:
        raise TrimtabError(f"checkpoint {folder} has no {absent[0]!r} tensors")
    meta = json.loads((folder / META).read_text())
    return LoadedCheckpoint(checkpoint_step(folder), folder, tensors, meta, others)


def latest(
    root: Path, sections: Collection[str] | None = None, notify: Callable[[str], None] | None = None
) -> LoadedCheckpoint | None:
    """The newest checkpoint that is intact, or None when there never was one.

    Each damaged one on the way is reported through `notify` (default: a `TrimtabWarning`). Raises `TrimtabError` when
    there are checkpoints and none is intact, so that no run silently starts over. Changes nothing on the disk.
    Where there are several ranks, all must call, and all find the same one.
    """
    skipped: list[str] = []
    ranks = here()
    listed = json.loads(ranks.broadcast(json.dumps([folder.name for folder in list_checkpoints(root)]).encode()))
    for folder in (root / name for name in reversed(listed)):
        try:
            wanted = ranks.together(partial(_verified, folder, sections, ranks))
            found = ranks.together(partial(_read, folder, wanted, sections))
        except (TrimtabError, OSError) as error:  # whichever of them it is here, all ranks have one
            skipped.append(str(error))
            continue
        for line in skipped:
            (notify or _warn)(f"{line}; using {folder.name} instead")
        return LoadedCheckpoint(found.step, folder, found.tensors, found.meta, found.files, tuple(skipped))
    if skipped:
        raise TrimtabError(f"no intact checkpoint in {root}: {skipped[0]}; start again with another --out")
    return None


def prune(root: Path, keep: int, protect: Collection[int] = ()) -> list[Path]:
    """Delete all but the newest `keep` checkpoints, the best one and the steps in `protect`; returns what went."""
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    if not here().leads:
        return []
    marked = best_checkpoint(root)
    protected = {*protect} | ({marked.step} if marked else set())
    doomed = [folder for folder in list_checkpoints(root)[:-keep] if checkpoint_step(folder) not in protected]
    for folder in doomed:
        atomic.remove_folder(folder)
    return doomed


def mark_best(root: Path, step: int, metric: str, value: float) -> bool:
    """Remember the checkpoint of `step` if `value` beats the best so far; returns whether it did.

    Higher is better, a tie keeps the older one, NaN never wins, another metric starts afresh. Calling it again with
    the same arguments changes nothing, so a resumed run may repeat the call that a kill cut off.
    """
    if not here().leads:
        return False
    if not checkpoint_folder(root, step).is_dir():
        raise ValueError(f"there is no checkpoint of step {step} in {root}")
    current = best_checkpoint(root)
    if math.isnan(value) or (current and current.metric == metric and value <= current.value):
        return False
    atomic.write_text(root / BEST, json.dumps({"step": step, "metric": metric, "value": value}))
    return True


def _is_wanted(name: str, sections: Collection[str] | None) -> bool:
    return sections is None or name == META or name.removesuffix(_SECTION).partition("/")[0] in sections


@contextmanager
def _new_folder(folder: Path, ranks: Ranks) -> Iterator[Path]:
    """`atomic.new_folder` of the leader, for all ranks to fill; it is renamed when the last one is done."""
    with ExitStack() as stack:

        def start() -> str:
            return str(stack.enter_context(atomic.new_folder(folder, replace=True))) if ranks.leads else ""

        yield Path(ranks.broadcast(ranks.together(start).encode()).decode())
        ranks.together(stack.close)


def _nothing() -> None:
    """What the others do while the leader writes."""


def _write_shards(
    folder: Path, temporary: Path, parts: Mapping[str, Mapping[str, Tensor]], rank: int
) -> dict[str, Any]:
    """This rank's part of every sharded section; the files' descriptions by their names in the checkpoint."""
    described: dict[str, Any] = {}
    with atomic.explained(folder):
        for section, named in parts.items():
            (temporary / section).mkdir(exist_ok=True)
            path = write(temporary / section, named, rank)
            if path is not None:
                described[f"{section}/{path.name}"] = _describe(path)
    return described


def _write_tensors(path: Path, named: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}, path)


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _manifest(folder: Path) -> dict[str, Any]:
    step, path = checkpoint_step(folder), folder / MANIFEST
    try:
        data = json.loads(path.read_bytes())
        listed = {name: (entry["size"], entry["sha256"]) for name, entry in data["files"].items()}
        same = (data["format"], data["step"]) == (FORMAT, step) and META in listed
    except FileNotFoundError:
        raise TrimtabError(f"checkpoint {folder} is incomplete: {MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise TrimtabError(f"checkpoint {folder} is damaged: {MANIFEST} cannot be read") from None
    if not same:
        raise TrimtabError(
            f"checkpoint {folder} is damaged or foreign: {MANIFEST} is not of format {FORMAT} and {step=}"
        )
    return data


def _verify(path: Path, entry: Mapping[str, Any]) -> None:
    broken = f"checkpoint {path.parent} is damaged: {path.name}"
    try:
        found = _describe(path)
    except OSError as error:
        raise TrimtabError(f"{broken} cannot be read ({error.strerror})") from None
    if found["size"] != entry["size"]:
        raise TrimtabError(f"{broken} has {found['size']} bytes instead of {entry['size']}")
    if found["sha256"] != entry["sha256"]:
        raise TrimtabError(f"{broken} was changed (its sha256 differs)")


def _warn(line: str) -> None:
    warnings.warn(line, TrimtabWarning, stacklevel=3)
