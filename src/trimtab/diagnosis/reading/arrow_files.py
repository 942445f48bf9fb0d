"""Reads parquet and arrow files, a bounded number of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trimtab.diagnosis.reading.batches import Batch, is_list, list_lengths, to_batch
from trimtab.diagnosis.reading.counts import ReadCounts
from trimtab.errors import TrimtabError
from trimtab.files import MAX_RESPONSE, MAX_ROW_VALUES, limit, open_parquet, too_long

_MAX_ROWS = 65_536
_Opened = pq.ParquetFile | pa.ipc.RecordBatchFileReader | pa.RecordBatchReader


class ArrowFile:
    """A parquet file (only requested columns are read), or a memory-mapped arrow file or stream."""

    def __init__(self, path: Path, *, is_parquet: bool) -> None:
        self.path = path
        self._is_parquet = is_parquet

    def names(self) -> frozenset[str]:
        with self._opened() as file:
            schema = _schema(file)
        if len(set(schema.names)) < len(schema.names):
            raise TrimtabError(f"{self.path} has two columns of one name: rename one")
        return frozenset(schema.names).union(*map(_names_inside, schema))

    def batches(self, columns: Mapping[str, str], tokens: int, _tally: ReadCounts) -> Iterator[Batch]:
        first = 1
        with self._opened() as file:
            names = _schema(file).names
            outer = {name: name if name in names else name.partition(".")[0] for name in columns.values()}
            for rows in self._parts(file, sorted(set(outer.values())), outer[columns["logp_behavior"]], tokens):
                part: dict[str, pa.Array] = {}
                for role, name in columns.items():
                    column = rows.column(outer[name])
                    if is_list(column.type):
                        longest = pc.call_function("max", [list_lengths(column)]).as_py() or 0
                        if longest > limit(MAX_RESPONSE):
                            raise too_long(self.path, name, longest, 1, limit(MAX_RESPONSE))
                    part[role] = column if name in names else _inside(column, name.partition(".")[2])
                yield to_batch(part, range(first, first + rows.num_rows))
                first += rows.num_rows

    def _parts(self, file: _Opened, names: Sequence[str], behavior: str, tokens: int) -> Iterator[pa.RecordBatch]:
        if isinstance(file, pq.ParquetFile):
            for rows, leaf in _leaves(file.metadata, behavior):
                if leaf.num_values > max(limit(MAX_ROW_VALUES), 64 * leaf.total_compressed_size):
                    # Log-probs do not compress that far: one of the rows may hold nearly all of the values.
                    raise too_long(self.path, behavior, leaf.num_values, rows, limit(MAX_ROW_VALUES))
            leaves = [leaf for name in names for leaf in _leaves(file.metadata, name)]
            longest = max([1.0, *(leaf.num_values / rows for rows, leaf in leaves)])  # mean of the longest lists
            size = min(max(1, int(tokens / longest)), _MAX_ROWS)
            yield from file.iter_batches(batch_size=size, columns=list(names))
            return
        is_file = isinstance(file, pa.ipc.RecordBatchFileReader)
        for batch in map(file.get_batch, range(file.num_record_batches)) if is_file else file:
            batch.validate(full=True)  # without this, offsets beyond the file would be read
            size = max(1, batch.num_rows * tokens * 4 // max(1, batch.column(behavior).nbytes))
            yield from (batch.slice(start, size) for start in range(0, batch.num_rows, size))

    @contextmanager
    def _opened(self) -> Iterator[_Opened]:
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


def _schema(file: _Opened) -> pa.Schema:
    return file.schema_arrow if isinstance(file, pq.ParquetFile) else file.schema


def _names_inside(field: pa.Field) -> set[str]:
    """Returns the names `column.field` of the fields of a structure, or of a list of structures."""
    kind = field.type.value_type if is_list(field.type) else field.type
    return {f"{field.name}.{inner.name}" for inner in kind} if pa.types.is_struct(kind) else set()


def _inside(column: pa.Array, field: str) -> pa.Array:
    """Returns a field of a column of structures; from lists of structures, lists of the field."""
    if not is_list(column.type):
        return pc.call_function("struct_field", [column], pc.StructFieldOptions([field]))
    column = column.cast(pa.large_list(column.type.value_type))  # a list of a fixed size has no offsets
    values = pc.call_function("struct_field", [column.values], pc.StructFieldOptions([field]))
    return pa.LargeListArray.from_arrays(pa.array(column.offsets.to_numpy()), values, mask=column.is_null())


def _leaves(metadata: pq.FileMetaData, column: str) -> Iterator[tuple[int, pq.ColumnChunkMetaData]]:
    """Yields the leaves of a column in each row group that has rows, each with the group's number of rows."""
    for group in (metadata.row_group(index) for index in range(metadata.num_row_groups)):
        for leaf in (group.column(index) for index in range(group.num_columns)):
            if leaf.path_in_schema.split(".")[0] == column and group.num_rows:
                yield group.num_rows, leaf
