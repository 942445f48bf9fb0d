"""The tokens of one trajectory file as flat arrays, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.errors import TrimtabError
from trimtab.runs.reader import opened

TOKENS_READ = 200_000
"""Tokens of one file after which no further responses are read: enough for a 98th percentile in every bin drawn."""
_BATCH = 32  # responses decoded at a time
_NEEDED = ("response_ids", "logp_behavior")
_PER_TOKEN = (
    "response_ids",
    "loss_mask",
    "logp_behavior",
    "logp_proximal",
    "logp_current",
    "logp_perturbed",
    "entropy",
    "policy_version",
)
_PER_ROW = ("off_policy", "advantage")


@dataclass(frozen=True, eq=False)
class Tokens:
    """Responses with a behavior policy, flat: every array but `starts` is (tokens,). None: the file has no such column.

    clean: the trainer's log-prob without noise, proximal where the file has it, otherwise current (`clean_name`).
    perturbed: the log-prob with noise (ALP). advantage: of the token's response. entropy: the sampler's, in nats.
    external, nonfinite: responses left out as external traces, or for a trained token whose log-prob is not finite.
    rows: responses of the file; read: those looked at, fewer where the file is longer than `TOKENS_READ`.
    """

    starts: np.ndarray
    ids: np.ndarray
    trained: np.ndarray
    behavior: np.ndarray
    clean: np.ndarray | None
    clean_name: str
    perturbed: np.ndarray | None
    entropy: np.ndarray | None
    version: np.ndarray | None
    advantage: np.ndarray | None
    external: int
    nonfinite: int
    rows: int
    read: int


def read_tokens(file: Path) -> Tokens:
    """The first responses of a trajectory file, up to about `TOKENS_READ` tokens. `TrimtabError` when it is damaged."""
    with opened(file) as parquet:
        present = set(parquet.schema_arrow.names)
        missing = [name for name in _NEEDED if name not in present]
        if missing:
            raise TrimtabError(f"{file} has no column {missing[0]!r}: it is not a trajectory file")
        rows = parquet.metadata.num_rows
        table = _head(parquet, [name for name in _PER_TOKEN + _PER_ROW if name in present])
    return _tokens(file, table, rows)


def _head(parquet: pq.ParquetFile, columns: list[str]) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    tokens = 0
    for batch in parquet.iter_batches(batch_size=_BATCH, columns=columns):
        batches.append(batch)
        tokens += len(batch.column("response_ids").flatten())
        if tokens >= TOKENS_READ:
            break
    return pa.Table.from_batches(batches, pa.schema([parquet.schema_arrow.field(name) for name in columns]))


def _tokens(file: Path, table: pa.Table, rows: int) -> Tokens:
    read = table.num_rows
    own = table.filter(pa.array(~_external(table)))
    lengths = _lengths(own["response_ids"])
    flat = {name: _flat(file, own, name, lengths) for name in _PER_TOKEN if name in own.column_names}
    trained = flat.get("loss_mask", np.ones(int(lengths.sum()), dtype=np.bool_))
    keep = _finite_rows([flat[name] for name in flat if name.startswith("logp_")], trained, lengths)
    kept = np.repeat(keep, lengths)
    clean_name = "logp_proximal" if "logp_proximal" in flat else "logp_current"
    chosen = {name: values[kept] for name, values in flat.items()}
    advantage = own["advantage"].to_numpy() if "advantage" in own.column_names else None
    return Tokens(
        starts=np.concatenate([[0], np.cumsum(lengths[keep])]),
        ids=chosen["response_ids"],
        trained=trained[kept],
        behavior=chosen["logp_behavior"],
        clean=chosen.get(clean_name),
        clean_name=clean_name,
        perturbed=chosen.get("logp_perturbed"),
        entropy=chosen.get("entropy"),
        version=chosen.get("policy_version"),
        advantage=None if advantage is None else np.repeat(advantage[keep], lengths[keep]),
        external=read - own.num_rows,
        nonfinite=int((~keep).sum()),
        rows=rows,
        read=read,
    )


def _external(table: pa.Table) -> np.ndarray:
    if "off_policy" not in table.column_names:
        return np.zeros(table.num_rows, dtype=np.bool_)
    return np.array([bool(mark) for mark in table["off_policy"].to_pylist()], dtype=np.bool_)


def _lengths(column: pa.ChunkedArray) -> np.ndarray:
    lengths = column.combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
    return np.nan_to_num(lengths).astype(np.int64)  # no list at all reads as NaN


def _flat(file: Path, table: pa.Table, name: str, lengths: np.ndarray) -> np.ndarray:
    column = table[name]
    if not np.array_equal(_lengths(column), lengths):
        raise TrimtabError(f"{file}: {name} and response_ids differ in length; delete the file and write it again")
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=False)


def _finite_rows(columns: list[np.ndarray], trained: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Responses (rows,) whose trained tokens all have finite log-probs."""
    bad = trained & ~np.logical_and.reduce([np.isfinite(values) for values in columns])
    row = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(row[bad], minlength=len(lengths)) == 0
