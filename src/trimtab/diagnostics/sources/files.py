"""Which files a path means, and which reader each needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from trimtab.diagnostics.sources.jsonl import JsonlTable
from trimtab.diagnostics.sources.parquet import ParquetTable
from trimtab.diagnostics.sources.tables import Table
from trimtab.diagnostics.sources.torch_file import TorchTable
from trimtab.errors import TrimtabError

_FOLDERS = ("trajectories", "token_exports", "train_data", "completions")
"""Where a run of Trimtab, prime-rl, Miles or TRL keeps its tokens."""
_PARQUET, _JSONL, _TORCH = (".parquet",), (".jsonl", ".ndjson", ".json"), (".pt", ".pth")
_READABLE = _PARQUET + _JSONL + _TORCH


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files that paths mean, a folder's in the order of the numbers in their names. `TrimtabError` when none."""
    if not paths:
        raise TrimtabError("no file given: name trajectory files, or the directory of a run")
    files = [file for path in paths for file in ([path] if not path.is_dir() else _of_folder(path))]
    # However a file is spelled, its rows count once.
    return list({file.resolve(): file for file in reversed(files)}.values())[::-1]


def _of_folder(folder: Path) -> list[Path]:
    known = [folder / name for name in _FOLDERS if (folder / name).is_dir()]
    if not known and (folder / "metrics.jsonl").is_file() and (folder / "config.toml").is_file():
        raise TrimtabError(f"{folder} is a run that kept no trajectories: nothing to diagnose")
    found = [item for root in known or [folder] for item in root.rglob("*") if item.suffix.lower() in _READABLE]
    files = [item for item in found if item.is_file() and not item.name.startswith((".", "_"))]
    if not files:
        raise TrimtabError(f"{folder} holds no parquet, JSONL or torch file")
    return sorted(files, key=_by_number)


def _by_number(path: Path) -> list[tuple[bool, int, str]]:
    parts = re.split(r"(\d+)", str(path))
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def open_table(path: Path) -> Table | None:
    """The reader of a file, by its first bytes and name; None for an empty one. `TrimtabError` for anything else."""
    head = _head(path)
    suffix = path.suffix.lower()
    if not head.strip():
        return None
    if head.startswith(b"PAR1") or suffix in _PARQUET:
        return ParquetTable(path)
    if head.startswith(b"PK\x03\x04") or suffix in _TORCH:
        return TorchTable(path)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"["):
        raise TrimtabError(f"{path} is one JSON array: write one object per line (jq -c '.[]' FILE)")
    if start.startswith(b"{") or suffix in _JSONL:
        return JsonlTable(path)
    if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        raise TrimtabError(f"{path} is compressed: unpack it first")
    if head.startswith(b"\x80"):
        raise TrimtabError(f"{path} is a pickle, which is not opened: save its tensors with torch.save instead")
    raise TrimtabError(f"{path} is neither a parquet, a JSONL nor a torch file")


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4096)
    except FileNotFoundError:
        raise TrimtabError(f"no file {path}: check the path") from None
    except OSError as error:
        raise TrimtabError(f"cannot read {path}: {error.strerror or error}") from None
