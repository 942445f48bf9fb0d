"""Reads files of any known layout as a stream of chunks, and counts what was read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from trimtab.diagnosis.reading.assemble import assemble
from trimtab.diagnosis.reading.columns import Resolved, resolve
from trimtab.diagnosis.reading.ragged import Table
from trimtab.diagnosis.reading.read_counts import ReadCounts
from trimtab.diagnosis.reading.run_settings import settings_of
from trimtab.diagnosis.reading.tables import find_files, open_table
from trimtab.diagnosis.records import Chunk, Origin
from trimtab.errors import TrimtabError

_RESPONSES = {
    "step", "group", "proximal_version", "reward", "advantage", "temperature", "top_p", "top_k", "raw"
}  # fmt: skip


class Source:
    """The responses of one or several files. `chunks` reads them in one pass; `origin` is complete after it."""

    def __init__(self, tables: Sequence[Table], resolved: Resolved, tally: ReadCounts) -> None:
        self._tables = tables
        self._resolved = resolved
        self._tally = tally

    @property
    def files(self) -> list[Path]:
        return [table.path for table in self._tables]

    def chunks(self, tokens: int = 262_144) -> Iterator[Chunk]:
        """Yields whole responses, about `tokens` tokens at a time, in the order of the files.

        Raises `TrimtabError` for a damaged file.
        """
        pending: list[Chunk] = []
        for piece in self._pieces(max(1, tokens // 2)):
            pending.append(piece)
            if sum(chunk.tokens for chunk in pending) >= tokens:
                yield _concatenate(pending)
                pending = []
        if pending:
            yield _concatenate(pending)

    def origin(self) -> Origin:
        """Returns a summary of the data read. Raises `TrimtabError` without a usable response or before `chunks`."""
        tally, resolved = self._tally, self._resolved
        if not tally.responses:
            why = tally.reasons(5)
            odd = "; ".join(f"{count} x {kind}" for kind, count in tally.nonfinite.items())
            causes = [text for text in (why, odd) if text] or ["the files hold no rows"]
            raise TrimtabError(
                f"nothing to diagnose in {_several(self._tables)}: {'; '.join(causes)} (a column that is not needed is "
                f"left out with --columns NAME=)"
            )
        if wrong := tally.no_logps():
            raise TrimtabError(
                f"{_several(self._tables)}: {wrong} is above 0 at most trained tokens, so it holds no log-probs (but "
                f"probabilities, or their negative logarithms?); name the right column with --columns {wrong}=COLUMN"
            )
        settings, unread = settings_of(self.files)
        return Origin(
            framework=resolved.framework,
            files=len(self._tables),
            responses=tally.responses,
            tokens=tally.tokens,
            trained=tally.trained,
            anchor=resolved.anchor,
            dropped=dict(tally.dropped.most_common()),
            nonfinite=dict(tally.nonfinite),
            missing=resolved.missing,
            findings=(*resolved.findings, *tally.findings(f"logp_{resolved.anchor}"), *unread),
            settings=settings,
        )

    def _pieces(self, tokens: int) -> Iterator[Chunk]:
        for number, table in enumerate(self._tables):
            self._tally.file = table.path
            columns = self._columns(table)
            if columns is None:
                self._tally.skipped_files += 1
                continue
            for block in table.blocks(columns, tokens, self._tally):
                chunk = assemble(block, columns, self._resolved.layout, self._tally, number)
                if chunk is not None:
                    yield from _split(chunk, tokens)

    def _columns(self, table: Table) -> Mapping[str, str] | None:
        """Returns the columns of a file by role; None for the file of a rank without log-probs (Miles)."""
        resolved = self._resolved
        if table.path in resolved.checked:
            return resolved.columns
        present = table.names()
        missing = [role for role, name in resolved.columns.items() if name not in present]
        if not missing:
            return resolved.columns
        if resolved.layout.framework == "miles" and f"logp_{resolved.anchor}" in missing:
            table.close()
            return None
        raise TrimtabError(
            f"{table.path} has no {resolved.columns[missing[0]]!r}, which {self._tables[0].path} has: "
            f"diagnose the files apart, or leave the column out with --columns {missing[0]}="
        )


def open_source(
    paths: Sequence[Path], *, framework: str | None = None, columns: Mapping[str, str] | None = None
) -> Source:
    """Opens files and directories as one source.

    framework: a name of `layouts.LAYOUTS`; None detects it by the columns. columns: column names by role where they
    differ (`logp_behavior="rollout_lp"`); an empty name omits the column.
    Raises `TrimtabError` for a missing path, an unsupported file, or a missing required column.
    """
    tally = ReadCounts()
    tables = []
    for file in find_files([Path(path) for path in paths]):
        table = open_table(file)
        if table is None:
            tally.empty_files += 1
        else:
            tables.append(table)
    if not tables:
        raise TrimtabError(f"{paths[0]} is empty" if len(paths) == 1 else "all files are empty")
    return Source(tables, resolve(tables, framework, columns or {}), tally)


def _split(chunk: Chunk, tokens: int) -> Iterator[Chunk]:
    """Yields parts of at most `tokens` tokens, or of one response."""
    first = 0
    while first < chunk.responses:
        last = int(np.searchsorted(chunk.starts, chunk.starts[first] + tokens, side="right")) - 1
        last = min(max(last, first + 1), chunk.responses)
        yield chunk if (first, last) == (0, chunk.responses) else _part(chunk, first, last)
        first = last


def _part(chunk: Chunk, first: int, last: int) -> Chunk:
    start, end = int(chunk.starts[first]), int(chunk.starts[last])
    parts = {}
    for name, values in _arrays(chunk).items():
        parts[name] = values[first:last] if name in _RESPONSES else values[start:end]
    return Chunk(starts=chunk.starts[first : last + 1] - start, **parts)


def _concatenate(chunks: list[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    lengths = np.concatenate([np.diff(chunk.starts) for chunk in chunks])
    arrays = [_arrays(chunk) for chunk in chunks]
    joined = {name: np.concatenate([part[name] for part in arrays]) for name in arrays[0]}
    return Chunk(starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), **joined)


def _arrays(chunk: Chunk) -> dict[str, np.ndarray]:
    values = {item.name: getattr(chunk, item.name) for item in fields(chunk) if item.name != "starts"}
    return {name: value for name, value in values.items() if value is not None}


def _several(tables: Sequence[Table]) -> str:
    return str(tables[0].path) if len(tables) == 1 else f"{len(tables)} files"
