"""Reads files of `torch.save`, unpickling only tensors, arrays and plain values.

Three shapes: `samples`, one dictionary a response; `rollout_data`, one list a column; or a plain dictionary of padded
tensors (batch, time).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.diagnosis.reading.cells import array_of
from trimtab.diagnosis.reading.ragged import RowBlock, build_block
from trimtab.diagnosis.reading.read_counts import ReadCounts
from trimtab.errors import TrimtabError

_LENGTHS = ("response_lengths", "response_length")


class TorchTable:
    """A file of `torch.save`. It is held in memory while it is read, since a pickle cannot be read in parts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cached: dict[str, Sequence[Any]] | None = None

    def names(self) -> frozenset[str]:
        if self._cached is None:
            self._cached = _columns(self.path)
        return frozenset(self._cached)

    def close(self) -> None:
        """Releases the content of the file; `names` and `blocks` read it again."""
        self._cached = None

    def blocks(self, columns: Mapping[str, str], tokens: int, tally: ReadCounts) -> Iterator[RowBlock]:
        table = self._cached if self._cached is not None else _columns(self.path)
        self.close()
        behavior = table[columns["logp_behavior"]]
        if not len(behavior):
            tally.no_rows += 1
        if "weight_version" in columns.values():
            tally.several_versions |= any(len(set(versions)) > 1 for versions in table["weight_versions"])
        for start, end in _ranges(behavior, tokens):
            part = {role: [_cell(value) for value in table[name][start:end]] for role, name in columns.items()}
            yield build_block(part, range(start + 1, end + 1))


def _columns(path: Path) -> dict[str, Sequence[Any]]:
    payload = _load(path)
    if not isinstance(payload, dict):
        raise TrimtabError(f"{path} holds a {type(payload).__name__}: a dictionary of tensors is needed")
    if isinstance(payload.get("samples"), list):
        table, rows = _of_samples(path, payload)
    elif isinstance(payload.get("rollout_data"), dict):
        table, rows = _of_rollout_data(path, payload)
    else:
        table, rows = _of_tensors(path, payload)
    if isinstance(payload.get("rollout_id"), int):
        table.setdefault("step", [payload["rollout_id"]] * rows)
    _add_prompts(table)
    _add_versions(table)
    return table


def _load(path: Path) -> Any:
    import torch

    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(_array_globals()):
            warnings.simplefilter("ignore")  # warnings about a damaged file, which raises an error below
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise TrimtabError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # a damaged pickle can raise anything at all
        reason = str(error).split("\n")[0].strip().rstrip(".") or type(error).__name__
        if "weights_only" in str(error) or "Weights only" in str(error):
            reason = "it holds objects other than tensors, arrays and plain values, which are not opened"
        raise TrimtabError(
            f"{path} cannot be read ({reason}): write tensors and plain values, or leave it out"
        ) from None


def _array_globals() -> list[Any]:
    """Returns the globals of a pickled numpy array of numbers, which files with recorded experts contain."""
    rebuild = np._core.multiarray._reconstruct  # pyright: ignore[reportAttributeAccessIssue]
    kinds = {type(np.dtype(code)) for code in ("?", *"bBhHiIlLqQ", *"efd")}
    return [np.ndarray, np.dtype, *kinds, rebuild, (rebuild, "numpy.core.multiarray._reconstruct")]


def _of_samples(path: Path, payload: Mapping[str, Any]) -> tuple[dict[str, Sequence[Any]], int]:
    samples = payload["samples"]
    if not all(isinstance(sample, dict) for sample in samples):
        raise TrimtabError(f"{path}: samples is not a list of dictionaries")
    names = {name: None for sample in samples for name in sample if isinstance(name, str)}
    table: dict[str, Sequence[Any]] = {name: [sample.get(name) for sample in samples] for name in names}
    whole = payload.get("raw_reward")
    if isinstance(whole, list) and len(whole) == len(samples):
        table.setdefault("raw_reward", whole)
    return table, len(samples)


def _of_rollout_data(path: Path, payload: Mapping[str, Any]) -> tuple[dict[str, Sequence[Any]], int]:
    if payload.get("cp_size", 1) != 1:
        raise TrimtabError(
            f"{path} is one of {payload['cp_size']} context-parallel shards, which hold parts of responses: "
            f"dump with --context-parallel-size 1"
        )
    columns = payload["rollout_data"]
    lengths = columns.get("response_lengths")
    rows = len(lengths) if isinstance(lengths, Sequence) else 0
    return {name: value for name, value in columns.items() if _is_column(value, rows)}, rows


def _of_tensors(path: Path, payload: Mapping[str, Any]) -> tuple[dict[str, Sequence[Any]], int]:
    sizes = [len(value) for value in payload.values() if getattr(value, "ndim", 0) == 2]
    rows = sizes[0] if sizes else 0
    table = {name: value for name, value in payload.items() if isinstance(name, str) and _is_column(value, rows)}
    if not sizes:
        raise TrimtabError(f"{path} holds no tensors of shape (batch, time): see docs/frameworks.md for what is read")
    return table, rows


def _is_column(value: Any, rows: int) -> bool:
    return (isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0) and len(value) == rows


def _add_prompts(table: dict[str, Sequence[Any]]) -> None:
    """Adds the prompt's tokens as `prompt_key`: responses to one prompt form a group."""
    name = next((name for name in _LENGTHS if name in table), None)
    if name is None or "tokens" not in table:
        return
    keys: list[bytes | None] = []
    for tokens, length in zip(table["tokens"], table[name], strict=True):
        ids, count = array_of(_cell(tokens)), _cell(length)
        known = ids is not None and isinstance(count, int)
        keys.append(ids[: max(0, len(ids) - count)].tobytes() if known and ids is not None else None)
    table["prompt_key"] = keys


def _add_versions(table: dict[str, Sequence[Any]]) -> None:
    """Returns one version per response, the oldest one that sampled it, if all are numbers."""
    if "weight_versions" in table:
        lists = [[str(v) for v in versions or ()] for versions in table["weight_versions"]]
        if all(versions and all(v.isdigit() for v in versions) for versions in lists):
            table["weight_version"] = [min(int(v) for v in versions) for versions in lists]


def _ranges(behavior: Sequence[Any], tokens: int) -> Iterator[tuple[int, int]]:
    start = size = 0
    for index, row in enumerate(behavior):
        size += len(row) if hasattr(row, "__len__") else 1
        if size >= tokens:
            yield start, index + 1
            start, size = index + 1, 0
    if start < len(behavior):
        yield start, len(behavior)


def _cell(value: Any) -> Any:
    """Converts a tensor to an array, and a tensor or array without dimensions to a number."""
    if hasattr(value, "detach"):
        tensor = value.detach()
        value = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value
