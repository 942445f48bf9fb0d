"""Expands paths to files, and selects the reader of each by its first bytes and its name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trimtab.diagnosis.reading.arrow_files import ArrowFile
from trimtab.diagnosis.reading.layouts import LAYOUTS
from trimtab.diagnosis.reading.row_files import (
    PACKED,
    RowFile,
    csv_rows,
    json_array,
    json_lines,
    packed_rows,
    slices_of,
)
from trimtab.diagnosis.reading.torch_file import TorchFile
from trimtab.errors import TrimtabError
from trimtab.files import Unpacked, natural_key, opened
from trimtab.runs.layout import CONFIG, METRICS

Table = ArrowFile | RowFile
"""A file of rows. `names` returns its columns; `batches` reads columns by role, about `tokens` tokens at a time."""
_FOLDERS = tuple(layout.folder for layout in LAYOUTS.values() if layout.folder)
"""Folders in which runs store their tokens."""
_DATASETS = ("dataset_info.json", "state.json", "dataset_dict.json")
"""What `save_to_disk` of the library datasets writes beside its arrow files."""
_NEMO_RL = "train_data_step"
"""How the files of NeMo-RL's training data begin."""
_PARQUET, _JSONL, _TORCH = (".parquet",), (".jsonl", ".ndjson", ".json"), (".pt", ".pth")
_ARROW = (".arrow", ".feather")
_CSV, _GZIP = (".csv",), ".gz"
_BOM = b"\xef\xbb\xbf"
_READABLE = _PARQUET + _JSONL + _TORCH + _ARROW
_KINDS = "a parquet, an arrow, a JSON, a CSV nor a torch file"


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the files of the paths, those of a folder in the order of numbers in their names.

    Raises `TrimtabError` when there is none.
    """
    if not paths:
        raise TrimtabError("no file given: name trajectory files, or the directory of a run")
    files = [file for path in paths for file in ([path] if not path.is_dir() else _of_folder(path))]
    # A file named twice, in whatever spelling, is read once.
    return list({os.path.realpath(file): file for file in reversed(files)}.values())[::-1]


def _of_folder(folder: Path) -> list[Path]:
    known = [folder / name for name in _FOLDERS if (folder / name).is_dir()]
    if not known and (folder / METRICS).is_file() and (folder / CONFIG).is_file():
        raise TrimtabError(f"{folder} is a run that kept no trajectories: nothing to diagnose")
    items = [item for root in known or [folder] for item in root.rglob("*") if not item.name.startswith((".", "_"))]
    # NeMo-RL writes them beside tables of its evaluations, open-instruct beside rollouts without the trainer's side.
    items = [item for item in items if item.name.startswith(_NEMO_RL) or PACKED.search(item.name)] or items
    if any(_suffix(item) in _ARROW for item in items):
        items = [item for item in items if item.name not in _DATASETS]
    # CSV files of a folder are read only if there is nothing else: they are often tables of metrics.
    for suffixes in (_READABLE, _CSV):
        if files := [item for item in items if _suffix(item) in suffixes and item.is_file()]:
            return sorted(files, key=lambda file: natural_key(str(file)))
    raise TrimtabError(
        f"{folder} holds no parquet, arrow, JSONL, CSV or torch file: name the folder with the tokens of the training"
    )


def _suffix(path: Path) -> str:
    """Returns the suffix that determines the format: for gzipped text files the one before `.gz`."""
    suffix = path.suffix.lower()
    if suffix != _GZIP:
        return suffix
    inner = Path(path.stem).suffix.lower()
    return inner if inner in _JSONL + _CSV else suffix


def open_table(path: Path) -> Table | None:
    """Returns the reader of a file by its first bytes and name, or None for an empty one.

    Raises `TrimtabError` for an unsupported format.
    """
    suffix = _suffix(path)
    with opened(path) as file:
        head, packed = file.read(4096), isinstance(getattr(file, "raw", None), Unpacked)
    if not head.strip(b" \t\r\n" + _BOM):
        return None
    if PACKED.search(path.name):
        return RowFile(slices_of(path)[0], packed_rows)
    if packed:
        if head.startswith((b"PAR1", b"PK\x03\x04")):
            raise TrimtabError(f"{path} is compressed: unpack it first")
    elif head.startswith(b"PAR1") or suffix in _PARQUET:
        return ArrowFile(path, is_parquet=True)
    elif suffix in _ARROW or head.startswith(b"ARROW1"):
        return ArrowFile(path, is_parquet=False)
    elif suffix in (".npz", ".npy") or head.startswith(b"\x93NUMPY"):
        raise TrimtabError(
            f"{path} holds numpy arrays, whose rows and padding nothing tells: write a parquet or JSONL file with one "
            f"response a row (docs/frameworks.md), or torch.save a dictionary of (batch, time) tensors with a loss_mask"
        )
    elif head.startswith(b"PK\x03\x04") or suffix in _TORCH:
        return TorchFile(path)
    return _text_table(path, head, suffix, packed=packed)


def _text_table(path: Path, head: bytes, suffix: str, *, packed: bool) -> Table:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise TrimtabError(f"{path} is UTF-16: write it as UTF-8")
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        raise TrimtabError(f"{path} is compressed with zstd: unpack it first (gzip is read as it is)")
    if head.startswith(b"\x80") or suffix in (".pkl", ".pickle"):
        raise TrimtabError(f"{path} is a pickle, which is not opened: save its tensors with torch.save instead")
    start = head.removeprefix(_BOM).lstrip()
    if start.startswith(b"["):
        return RowFile(path, json_array)
    if suffix in _CSV:
        return RowFile(path, csv_rows)
    if start.startswith(b"{") or suffix in _JSONL:
        return RowFile(path, json_lines)
    raise TrimtabError(f"{path} is neither {_KINDS}{' below its gzip' if packed else ''}")
