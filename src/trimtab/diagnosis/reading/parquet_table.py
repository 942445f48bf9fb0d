"""Reads parquet files, a bounded number of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.diagnosis.reading.ragged import (
    RowBlock,
    arrow_fields,
    arrow_lists,
    arrow_scalars,
    build_block,
    is_arrow_list,
)
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
            first = 1
            for batch in file.iter_batches(batch_size=size, columns=names, use_threads=False):
                yield build_block(
                    {role: batch.column(name) for role, name in columns.items()},
                    range(first, first + batch.num_rows),
                    is_list=is_arrow_list,
                    lists=arrow_lists,
                    scalars=arrow_scalars,
                    fields=arrow_fields,
                )
                first += batch.num_rows


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with open_parquet(path) as file:
            yield file
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
