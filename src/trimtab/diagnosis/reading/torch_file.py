"""Reads files of `torch.save`, unpickling only tensors, arrays and plain values.

A file has one of three shapes: `samples`, one dictionary per response; `rollout_data`, one list per column; or a plain
dictionary of padded tensors (batch, time).
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.diagnosis.reading.batches import plain, to_array
from trimtab.diagnosis.reading.counts import ReadCounts
from trimtab.diagnosis.reading.row_files import RowFile, Rows
from trimtab.errors import TrimtabError
from trimtab.files import MAX_RESPONSE, MAX_UNPACKED_BYTES, MAX_UNPACKED_TIMES, RAISE_LIMITS, limit, too_large_unpacked

_VALUES_A_BYTE = 16
"""Values for each byte of a file: one of a byte each is written once, prompts and advantages are often shared."""
_VERSION = re.compile("[0-9]{1,18}")


class TorchFile(RowFile):
    """A file of `torch.save`. It is held in memory until it has been read, since a pickle cannot be read in parts."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, self._rows)
        self._held: dict[str, Sequence[Any]] | None = None

    def names(self) -> frozenset[str]:
        if self._held is None:
            self._held = _read_columns(self.path)
        return frozenset(self._held)

    def close(self) -> None:
        """Releases the content of the file; `names` and `batches` read it again."""
        self._held = None

    def _rows(self, path: Path, tally: ReadCounts) -> Rows:
        columns = self._held if self._held is not None else _read_columns(path)
        self.close()
        if (versions := _parse_versions(columns)) is not None:
            tally.odd["several-versions"] += sum(len(set(several)) > 1 for several in versions)
        for number, cells in enumerate(zip(*columns.values(), strict=True), start=1):
            yield number, dict(zip(columns, cells, strict=True))


def _read_columns(path: Path) -> dict[str, Sequence[Any]]:
    payload = _load(path)
    if not isinstance(payload, dict):
        raise TrimtabError(f"{path} holds a {type(payload).__name__}: a dictionary of tensors is needed")
    samples, lists = payload.get("samples"), payload.get("rollout_data")
    if isinstance(samples, list):
        if not all(isinstance(sample, dict) for sample in samples):
            raise TrimtabError(f"{path}: samples is not a list of dictionaries: save one for each response")
        names = dict.fromkeys(name for sample in samples for name in sample)
        given: Mapping[Any, Any] = {"raw_reward": payload.get("raw_reward")}
        given = {**given, **{name: [sample.get(name) for sample in samples] for name in names}}
        rows = len(samples)
    elif isinstance(lists, dict):
        if payload.get("cp_size", 1) != 1:
            raise TrimtabError(
                f"{path} is one of {payload['cp_size']} context-parallel shards, which hold parts of responses: "
                f"dump with --context-parallel-size 1"
            )
        given, lengths = lists, lists.get("response_lengths")
        rows = len(lengths) if isinstance(lengths, Sequence) else 0
    else:
        sizes = [len(value) for value in payload.values() if getattr(value, "ndim", 0) == 2]
        if not sizes:
            raise TrimtabError(
                f"{path} holds no tensors of shape (batch, time): see docs/reference-frameworks.md for what is read"
            )
        given, rows = payload, sizes[0]
    columns = {name: value for name, value in given.items() if isinstance(name, str) and _is_column(value, rows)}
    if isinstance(payload.get("rollout_id"), int):
        columns.setdefault("step", [payload["rollout_id"]] * rows)
    if (versions := _parse_versions(columns)) is not None:
        columns["weight_version"] = [min(several) for several in versions]
    return columns | _hash_prompts(columns)


def _load(path: Path) -> Any:
    import torch

    try:
        _check_packing(path)
        with warnings.catch_warnings(), torch.serialization.safe_globals(_array_globals()):
            warnings.simplefilter("ignore")  # warnings about a damaged file, which raises an error below
            payload = torch.load(path, map_location="cpu", weights_only=True)
    except TrimtabError:
        raise
    except OSError as error:
        raise TrimtabError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # a damaged pickle can raise anything at all
        reason = str(error).split("\n")[0].strip().rstrip(".") or type(error).__name__
        if "weights_only" in str(error) or "Weights only" in str(error):
            reason = "it holds objects other than tensors, arrays and plain values, which are not opened"
        raise TrimtabError(
            f"{path} cannot be read ({reason}): write tensors and plain values, or leave it out"
        ) from None
    most = max(limit(MAX_RESPONSE), limit(_VALUES_A_BYTE) * path.stat().st_size)
    try:
        values = _count(payload, path, {})
    except RecursionError:
        raise TrimtabError(f"{path} holds a list that is inside itself: write plain lists of numbers") from None
    if values > most:
        raise TrimtabError(
            f"{path} has {path.stat().st_size:,} bytes and stands for {values:,} values, by repetition: save copies "
            f"(tensor.contiguous()), or {RAISE_LIMITS}"
        )
    return payload


def _check_packing(path: Path) -> None:
    """Raises `TrimtabError` for a zip file that unpacks to many times its size; `torch.save` does not compress."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            size = sum(part.file_size for part in file.infolist())
        if size > max(limit(MAX_UNPACKED_BYTES), limit(MAX_UNPACKED_TIMES) * path.stat().st_size):
            raise too_large_unpacked(path, size)


def _count(value: Any, path: Path, counted: dict[int, int]) -> int:
    """Returns the number of values in all containers, tensors and arrays, counted as often as they are reached.

    Repeated values (a tensor with strides of 0, a list in many places) take memory once, but count each time. Raises
    `TrimtabError` for a tensor that is not a plain array of numbers. counted: the numbers so far, by `id`.
    """
    if id(value) not in counted:
        if isinstance(value, list | tuple | dict):
            parts = value.values() if isinstance(value, dict) else value
            inner = (part for part in parts if isinstance(part, list | tuple | dict | np.ndarray) or _is_tensor(part))
            counted[id(value)] = len(value) + sum(_count(part, path, counted) for part in inner)
        else:
            counted[id(value)] = _count_elements(value, path)
    return counted[id(value)]


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage")


def _count_elements(value: Any, path: Path) -> int:
    """Returns the number of elements of a tensor or array; 1 for another value."""
    if not _is_tensor(value):
        return value.size if isinstance(value, np.ndarray) else 1
    is_odd = value.is_nested or value.is_quantized or value.is_meta or value.is_complex()
    if is_odd or str(value.layout) != "torch.strided":
        raise TrimtabError(
            f"{path} holds a nested, quantized, meta, sparse or complex tensor, which is not read: save a dense one of "
            f"real numbers, or leave it out"
        )
    return value.numel()


def _array_globals() -> list[Any]:
    """Returns the globals of a pickled numpy array of numbers, which files with recorded experts contain."""
    rebuild = np._core.multiarray._reconstruct  # pyright: ignore[reportAttributeAccessIssue]
    kinds = {type(np.dtype(code)) for code in ("?", *"bBhHiIlLqQ", *"efd")}
    return [np.ndarray, np.dtype, *kinds, rebuild, (rebuild, "numpy.core.multiarray._reconstruct")]


def _is_column(value: Any, rows: int) -> bool:
    return (isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0) and len(value) == rows


def _parse_versions(columns: Mapping[str, Sequence[Any]]) -> list[list[int]] | None:
    """Returns the versions that sampled each response, if all are known numbers."""
    given = columns.get("weight_versions", ())
    lists = [[str(version) for version in several] if isinstance(several, list | tuple) else [] for several in given]
    if lists and all(several and all(map(_VERSION.fullmatch, several)) for several in lists):
        return [[int(version) for version in several] for several in lists]
    return None


def _hash_prompts(columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Returns a hash of each prompt's tokens as `prompt_key`: responses to one prompt form a group."""
    lengths = columns.get("response_lengths", columns.get("response_length"))
    if lengths is None or "tokens" not in columns:
        return {}
    keys: list[int | None] = []
    for ids, count in zip(map(to_array, map(plain, columns["tokens"])), map(plain, lengths), strict=True):
        is_known = ids is not None and isinstance(count, int)
        keys.append(hash(ids[: max(0, len(ids) - count)].tobytes()) if is_known and ids is not None else None)
    return {"prompt_key": keys}
