"""Reads the tokens of one trajectory file as flat arrays, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.errors import TrimtabError
from trimtab.runs.reader import open_trajectories

TOKENS_READ = 200_000
"""Tokens of one file after which reading stops; enough for a 98th percentile in every drawn bin."""
_BATCH = 32  # responses decoded at a time
_REQUIRED_COLUMNS = ("response_ids", "logp_behavior")
_TOKEN_COLUMNS = (
    "response_ids",
    "loss_mask",
    "logp_behavior",
    "logp_proximal",
    "logp_current",
    "logp_perturbed",
    "entropy",
    "policy_version",
)
_ROW_COLUMNS = ("off_policy", "advantage")


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens of responses with a behavior policy. Every array but `starts` is (tokens,); None for absent columns.

    starts: index of the first token of each response, and the number of tokens, (responses + 1,).
    clean: the trainer's log-prob without noise: proximal if the file has it, otherwise current (`clean_name`).
    perturbed: the log-prob with noise (ALP). advantage: that of the token's response. entropy: the sampler's, in nats.
    external, nonfinite: responses left out as external traces, or for a trained token whose log-prob is not finite.
    rows: responses in the file. read: responses read, fewer if the file holds more than `TOKENS_READ` tokens.
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
    """Reads the first responses of a trajectory file, up to about `TOKENS_READ` tokens.

    Raises `TrimtabError` when the file is damaged or no trajectory file.
    """
    with open_trajectories(file) as parquet:
        present = set(parquet.schema_arrow.names)
        missing = [name for name in _REQUIRED_COLUMNS if name not in present]
        if missing:
            raise TrimtabError(f"{file} has no column {missing[0]!r}: it is not a trajectory file")
        rows = parquet.metadata.num_rows
        table = _read_first(parquet, [name for name in _TOKEN_COLUMNS + _ROW_COLUMNS if name in present])
    return _tokens(file, table, rows)


def _read_first(parquet: pq.ParquetFile, columns: list[str]) -> pa.Table:
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
    sampled = table.filter(pa.array(~_external_rows(table)))
    lengths = _lengths(sampled["response_ids"])
    flat = {name: _flatten(file, sampled, name, lengths) for name in _TOKEN_COLUMNS if name in sampled.column_names}
    trained = flat.get("loss_mask", np.ones(int(lengths.sum()), dtype=np.bool_))
    keep = _finite_rows([flat[name] for name in flat if name.startswith("logp_")], trained, lengths)
    kept_tokens = np.repeat(keep, lengths)
    clean_name = "logp_proximal" if "logp_proximal" in flat else "logp_current"
    columns = {name: values[kept_tokens] for name, values in flat.items()}
    advantage = sampled["advantage"].to_numpy() if "advantage" in sampled.column_names else None
    return Tokens(
        starts=np.concatenate([[0], np.cumsum(lengths[keep])]),
        ids=columns["response_ids"],
        trained=trained[kept_tokens],
        behavior=columns["logp_behavior"],
        clean=columns.get(clean_name),
        clean_name=clean_name,
        perturbed=columns.get("logp_perturbed"),
        entropy=columns.get("entropy"),
        version=columns.get("policy_version"),
        advantage=None if advantage is None else np.repeat(advantage[keep], lengths[keep]),
        external=read - sampled.num_rows,
        nonfinite=int((~keep).sum()),
        rows=rows,
        read=read,
    )


def _external_rows(table: pa.Table) -> np.ndarray:
    if "off_policy" not in table.column_names:
        return np.zeros(table.num_rows, dtype=np.bool_)
    return np.array([bool(mark) for mark in table["off_policy"].to_pylist()], dtype=np.bool_)


def _lengths(column: pa.ChunkedArray) -> np.ndarray:
    lengths = column.combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
    return np.nan_to_num(lengths).astype(np.int64)  # the length of a null list is NaN


def _flatten(file: Path, table: pa.Table, name: str, lengths: np.ndarray) -> np.ndarray:
    column = table[name]
    if not np.array_equal(_lengths(column), lengths):
        raise TrimtabError(f"{file}: {name} and response_ids differ in length; delete the file and write it again")
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=False)


def _finite_rows(columns: list[np.ndarray], trained: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns a mask (rows,) of the responses whose trained tokens all have finite log-probs."""
    nonfinite = trained & ~np.logical_and.reduce([np.isfinite(values) for values in columns])
    row_index = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(row_index[nonfinite], minlength=len(lengths)) == 0
