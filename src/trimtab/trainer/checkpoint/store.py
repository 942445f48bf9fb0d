"""Checkpoints (`checkpoints/step-000010/`): atomic, with digests verified on loading, without pickle.

    manifest.json            format, step, and size + sha256 of every other file
    meta.json                counters and everything that is not a tensor
    <section>.safetensors    named tensors: model, optimizer, ...
    <section>/*.safetensors  sharded tensors, a file from every rank (`sharded_sections.py`)
    <anything else>          files of the caller, e.g. pending.parquet

`checkpoints/best.json` names the best checkpoint, which `delete_old` keeps.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from trimtab.errors import TrimtabError, TrimtabWarning
from trimtab.files import new_folder, parse_json, regular_file
from trimtab.runs import atomic
from trimtab.runs.layout import BEST, best_checkpoint, checkpoint_folder, checkpoint_step, list_checkpoints
from trimtab.trainer.checkpoint.sharded_sections import Shards, write
from trimtab.trainer.models.sharding import is_sharded
from trimtab.trainer.ranks import SINGLE_RANK, RankGroup, current_ranks

FORMAT = 8
MANIFEST, META = "manifest.json", "meta.json"
_SECTION = ".safetensors"


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A verified checkpoint.

    CPU tensors are memory-mapped from its files: copy them, do not keep them. Sharded sections are
    `sharded_sections.Shards`, which read on access.
    """

    step: int
    folder: Path
    tensors: dict[str, Mapping[str, Tensor]]
    meta: Any
    files: dict[str, bytes] = field(default_factory=dict)


def save(
    root: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    meta: Any,
    files: Mapping[str, bytes] | None = None,
    *,
    later: Callable[[Callable[[], None]], None] | None = None,
) -> Path:
    """Writes `root/step-<step>` atomically and returns it; a checkpoint of the same step is replaced.

    All ranks must call it; `meta`, `files` and unsharded tensors are the leader's.

    Args:
        tensors: section -> name -> tensor. No two may share memory, see `state_tensors.model_state`.
        meta: JSON values; non-finite floats are allowed, because only `load` reads them.
        files: further files by name.
        later: called with the final fsync-and-rename step; default: the step runs before `save` returns.

    Raises `TrimtabError` if the disk is full; earlier checkpoints are unchanged.
    """
    folder, ranks = checkpoint_folder(root, step), current_ranks()
    sharded = {section: named for section, named in sorted(tensors.items()) if any(map(is_sharded, named.values()))}
    with ExitStack() as stack:

        def start() -> str:
            return str(stack.enter_context(new_folder(folder, replace=True))) if ranks.is_leader else ""

        temporary = Path(ranks.broadcast(ranks.run_on_all_ranks(start).encode()).decode())
        local = ranks.run_on_all_ranks(partial(_write_shards, folder, temporary, sharded, ranks.rank))
        described: dict[str, Any] = {}
        for part in ranks.gather(json.dumps(local).encode()):
            described |= json.loads(part)

        @atomic.readable_errors(folder)
        def finish() -> None:
            for section, named in tensors.items():
                if section not in sharded:
                    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
                    save_file(whole, temporary / f"{section}{_SECTION}")
            (temporary / META).write_text(json.dumps(meta), encoding="utf-8")
            for name, data in (files or {}).items():
                (temporary / name).write_bytes(data)
            items = {item.name: _describe(item) for item in sorted(temporary.iterdir()) if item.is_file()}
            manifest = {"format": FORMAT, "step": step, "files": items | described}
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")

        ranks.run_on_all_ranks(finish if ranks.is_leader else lambda: None)
        if later is None:
            ranks.run_on_all_ranks(stack.close)
        else:
            later(stack.pop_all().close)
    return folder


def load(folder: Path, sections: Collection[str] | None = None) -> LoadedCheckpoint:
    """Verifies and reads one checkpoint, or only `sections` of its tensors and `meta`.

    Raises `TrimtabError` naming the file that is missing, truncated, changed or unreadable.
    """
    return _read(folder, _verify_files(folder, sections, SINGLE_RANK), sections)


def _verify_files(folder: Path, sections: Collection[str] | None, ranks: RankGroup) -> list[str]:
    """Returns the names of the files of `sections`, after verifying them; each of several ranks verifies a part."""
    files = _manifest(folder)["files"]
    needed = [
        name
        for name in files
        if sections is None or name == META or name.removesuffix(_SECTION).partition("/")[0] in sections
    ]
    for name in needed[ranks.rank :: ranks.size]:
        _verify(folder / name, files[name])
    return needed


def _read(folder: Path, needed: Sequence[str], sections: Collection[str] | None) -> LoadedCheckpoint:
    """Reads the files `needed`, which must be verified before: a damaged header may crash the reader."""
    tensors: dict[str, Mapping[str, Tensor]] = {}
    others: dict[str, bytes] = {}
    for name in needed:
        section, inner, _ = name.partition("/")
        if inner:
            tensors[section] = tensors.get(section) or Shards(folder / section)
        elif name.endswith(_SECTION):
            tensors[name.removesuffix(_SECTION)] = load_file(folder / name)
        elif name != META:
            others[name] = (folder / name).read_bytes()
    missing = sorted(set(sections or ()) - set(tensors))
    if missing:
        raise TrimtabError(f"checkpoint {folder} has no {missing[0]!r} tensors")
    try:
        meta = parse_json((folder / META).read_bytes())
    except ValueError as error:
        raise TrimtabError(f"checkpoint {folder} is damaged: {META} cannot be read ({error})") from None
    return LoadedCheckpoint(checkpoint_step(folder), folder, tensors, meta, others)


def latest(
    root: Path,
    sections: Collection[str] | None = None,
    notify: Callable[[str], None] = lambda line: warnings.warn(line, TrimtabWarning, stacklevel=3),
    among: Collection[int] | None = None,
) -> LoadedCheckpoint | None:
    """Returns the newest intact checkpoint, or None if there are no checkpoints. Changes nothing on disk.

    Newer damaged checkpoints are reported through `notify` (default: a `TrimtabWarning`). All ranks must call it, and
    get the same checkpoint. among: the steps to choose from (the leader's counts); default: all. Raises `TrimtabError`
    if there are checkpoints but none is intact, so that no run silently starts over.
    """
    skipped: list[str] = []
    ranks = current_ranks()
    names = [one.name for one in list_checkpoints(root) if among is None or checkpoint_step(one) in among]
    listed = json.loads(ranks.broadcast(json.dumps(names).encode()))
    for folder in (root / name for name in reversed(listed)):
        try:
            needed = ranks.run_on_all_ranks(partial(_verify_files, folder, sections, ranks))
            checkpoint = ranks.run_on_all_ranks(partial(_read, folder, needed, sections))
        except (TrimtabError, OSError) as error:  # if one rank has an error, all have
            skipped.append(str(error))
            continue
        for line in skipped:
            notify(f"{line}; using {folder.name} instead")
        return checkpoint
    if skipped:
        raise TrimtabError(f"no intact checkpoint in {root}: {skipped[0]}; start again with another --out")
    return None


def delete_old(root: Path, keep: int, needed: Collection[int] = ()) -> None:
    """Deletes checkpoints except the newest `keep` (at least 1), the best, and the checkpoints of steps `needed`."""
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    if not current_ranks().is_leader:
        return
    marked = best_checkpoint(root)
    for folder in list_checkpoints(root)[:-keep]:
        if checkpoint_step(folder) not in needed and (marked is None or checkpoint_step(folder) != marked.step):
            atomic.remove_folder(folder)


def is_best(root: Path, metric: str, value: float) -> bool:
    """Whether `value` is higher than the value of the best checkpoint so far.

    A tie or NaN is not better. A best checkpoint by another metric, from before `eval.best` changed, is ignored.
    """
    best = best_checkpoint(root)
    return not math.isnan(value) and (best is None or best.metric != metric or value > best.value)


def mark_best(root: Path, step: int, metric: str, value: float) -> None:
    """Marks the checkpoint of `step`, which must exist, as best if `is_best`. A resumed run may repeat the call."""
    if not current_ranks().is_leader:
        return
    if not checkpoint_folder(root, step).is_dir():
        raise ValueError(f"there is no checkpoint of step {step} in {root}")
    if is_best(root, metric, value):
        atomic.write_text(root / BEST, json.dumps({"step": step, "metric": metric, "value": value}))


def _write_shards(
    folder: Path, temporary: Path, parts: Mapping[str, Mapping[str, Tensor]], rank: int
) -> dict[str, Any]:
    """Writes this rank's part of every sharded section; returns size and digest of its files by name."""
    described: dict[str, Any] = {}
    with atomic.readable_errors(folder):
        for section, named in parts.items():
            (temporary / section).mkdir(exist_ok=True)
            if path := write(temporary / section, named, rank):
                described[f"{section}/{path.name}"] = _describe(path)
    return described


def _describe(path: Path) -> dict[str, Any]:
    with regular_file(path).open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _manifest(folder: Path) -> dict[str, Any]:
    step, path = checkpoint_step(folder), folder / MANIFEST
    try:
        data = parse_json(regular_file(path).read_bytes())
        listed = {name: (entry["size"], entry["sha256"]) for name, entry in data["files"].items()}
        inside = not any(Path(name).is_absolute() or ".." in Path(name).parts for name in listed)
        same = (data["format"], data["step"]) == (FORMAT, step) and META in listed and inside
    except FileNotFoundError:
        raise TrimtabError(f"checkpoint {folder} is incomplete: {MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise TrimtabError(f"checkpoint {folder} is damaged: {MANIFEST} cannot be read") from None
    if not same:
        raise TrimtabError(
            f"checkpoint {folder} is damaged or foreign: {MANIFEST} is not of format {FORMAT} and step {step}"
        )
    return data


def _verify(path: Path, entry: Mapping[str, Any]) -> None:
    broken = f"checkpoint {path.parent} is damaged: {path.name}"
    try:
        described = _describe(path)
    except OSError as error:
        raise TrimtabError(f"{broken} cannot be read ({error.strerror})") from None
    if described["size"] != entry["size"]:
        raise TrimtabError(f"{broken} has {described['size']} bytes instead of {entry['size']}")
    if described["sha256"] != entry["sha256"]:
        raise TrimtabError(f"{broken} was changed (its sha256 differs)")
