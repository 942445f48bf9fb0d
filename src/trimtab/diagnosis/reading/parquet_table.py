"""Reads parquet and arrow files, a bounded number of rows at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.diagnosis.reading.ragged import RowBlock, build_block
from trimtab.diagnosis.reading.read_counts import ReadCounts
from trimtab.errors import TrimtabError
from trimtab.files import MAX_ROW_VALUES, open_parquet, too_long

_MAX_ROWS = 65_536


class ParquetTable:
    """A parquet file, of which only the requested columns are read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> frozenset[str]:
        with _opened(self.path) as file:
            names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise TrimtabError(f"{self.path} has two columns of one name: rename one")
        return frozenset(names)

    def close(self) -> None:
        """Does nothing: no data is kept between calls."""

    def blocks(self, columns: Mapping[str, str], tokens: int, tally: ReadCounts) -> Iterator[RowBlock]:
        with _opened(self.path) as file:
            if not file.metadata.num_rows:
                tally.no_rows += 1
            size = _rows(self.path, file.metadata, columns["logp_behavior"], tokens)
            names = sorted(set(columns.values()))
            yield from _blocks(file.iter_batches(batch_size=size, columns=names, use_threads=False), columns)


class ArrowTable:
    """An arrow file or stream, such as those of `save_to_disk` of the library datasets. It is mapped, not loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> frozenset[str]:
        with _opened_arrow(self.path) as (schema, _):
            return frozenset(schema.names)

    def close(self) -> None:
        """Does nothing: no data is kept between calls."""

    def blocks(self, columns: Mapping[str, str], tokens: int, tally: ReadCounts) -> Iterator[RowBlock]:
        with _opened_arrow(self.path) as (_, batches):
            first = 1
            for batch in batches:
                batch.validate(full=True)  # offsets beyond the file would be read as they are
                rows = max(1, batch.num_rows * tokens * 4 // max(1, batch.column(columns["logp_behavior"]).nbytes))
                parts = (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))
                yield from _blocks(parts, columns, first)
                first += batch.num_rows
            if first == 1:
                tally.no_rows += 1


def _blocks(batches: Iterable[pa.RecordBatch], columns: Mapping[str, str], first: int = 1) -> Iterator[RowBlock]:
    for batch in batches:
        numbers = range(first, first + batch.num_rows)
        yield build_block({role: batch.column(name) for role, name in columns.items()}, numbers)
        first += batch.num_rows


@contextmanager
def _opened_arrow(path: Path) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    with _readable(path), pa.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            file = pa.ipc.open_file(source)
            yield file.schema, (file.get_batch(index) for index in range(file.num_record_batches))
        else:
            source.seek(0)
            stream = pa.ipc.open_stream(source)
            yield stream.schema, iter(stream)


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    with _readable(path), open_parquet(path) as file:
        yield file


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise TrimtabError(f"{path} is damaged or unfinished ({reason}): write it again or leave it out") from None


def _rows(path: Path, metadata: pq.FileMetaData, column: str, tokens: int) -> int:
    """Returns the number of rows with about `tokens` tokens, by the row group of the longest responses."""
    longest = 1.0
    for group in (metadata.row_group(index) for index in range(metadata.num_row_groups)):
        for leaf in (group.column(index) for index in range(group.num_columns)):
            if leaf.path_in_schema.split(".")[0] == column and group.num_rows:
                longest = max(longest, leaf.num_values / group.num_rows)
                if leaf.num_values > max(MAX_ROW_VALUES, 64 * leaf.total_compressed_size):
                    # Log-probs do not compress that far: one of the rows may hold nearly all of the values.
                    raise too_long(path, column, leaf.num_values, group.num_rows)
    return int(min(max(1, tokens / longest), _MAX_ROWS))
