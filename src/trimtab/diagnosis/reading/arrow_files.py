"""Reads parquet and arrow files, a bounded number of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.diagnosis.reading.batches import Batch, to_batch
from trimtab.diagnosis.reading.read_counts import ReadCounts
from trimtab.errors import TrimtabError
from trimtab.files import MAX_ROW_VALUES, open_parquet, too_long

_MAX_ROWS = 65_536


class ArrowFile:
    """A parquet file, of which only the requested columns are read, or an arrow file or stream, which is mapped."""

    def __init__(self, path: Path, *, is_parquet: bool) -> None:
        self.path = path
        self._is_parquet = is_parquet

    def names(self) -> frozenset[str]:
        with self._opened() as file:
            names = (file.schema_arrow if isinstance(file, pq.ParquetFile) else file.schema).names
        if len(set(names)) < len(names):
            raise TrimtabError(f"{self.path} has two columns of one name: rename one")
        return frozenset(names)

    def batches(self, columns: Mapping[str, str], tokens: int, _tally: ReadCounts) -> Iterator[Batch]:
        first = 1
        with self._opened() as file:
            for rows in self._parts(file, columns, tokens):
                part = {role: rows.column(name) for role, name in columns.items()}
                yield to_batch(part, range(first, first + rows.num_rows))
                first += rows.num_rows

    def _parts(
        self,
        file: pq.ParquetFile | pa.ipc.RecordBatchFileReader | pa.RecordBatchReader,
        columns: Mapping[str, str],
        tokens: int,
    ) -> Iterator[pa.RecordBatch]:
        behavior = columns["logp_behavior"]
        if isinstance(file, pq.ParquetFile):
            size = min(max(1, int(tokens / self._longest(file.metadata, behavior))), _MAX_ROWS)
            yield from file.iter_batches(batch_size=size, columns=sorted(set(columns.values())))
            return
        is_file = isinstance(file, pa.ipc.RecordBatchFileReader)
        for batch in map(file.get_batch, range(file.num_record_batches)) if is_file else file:
            batch.validate(full=True)  # offsets beyond the file would be read as they are
            size = max(1, batch.num_rows * tokens * 4 // max(1, batch.column(behavior).nbytes))
            yield from (batch.slice(start, size) for start in range(0, batch.num_rows, size))

    def _longest(self, metadata: pq.FileMetaData, column: str) -> float:
        """Returns the mean length of a response in the row group of the longest ones."""
        longest = 1.0
        for group in (metadata.row_group(index) for index in range(metadata.num_row_groups)):
            for leaf in (group.column(index) for index in range(group.num_columns)):
                if leaf.path_in_schema.split(".")[0] == column and group.num_rows:
                    longest = max(longest, leaf.num_values / group.num_rows)
                    if leaf.num_values > max(MAX_ROW_VALUES, 64 * leaf.total_compressed_size):
                        # Log-probs do not compress that far: one of the rows may hold nearly all of the values.
                        raise too_long(self.path, column, leaf.num_values, group.num_rows)
        return longest

    @contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile | pa.ipc.RecordBatchFileReader | pa.RecordBatchReader]:
        try:
            if self._is_parquet:
                with open_parquet(self.path) as file:
                    yield file
                return
            with pa.memory_map(str(self.path)) as source:
                is_file = source.read(6) == b"ARROW1"
                source.seek(0)
                yield pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise TrimtabError(
                f"{self.path} is damaged or unfinished ({reason}): write it again or leave it out"
            ) from None
