"""Reads JSON: one object per line, or one array of objects.

The standard parser is as fast here as arrow's (about 0.7 s for 500,000 tokens in seven columns on one core), reads the
NaN and Infinity that Python's writers emit, and confines an error to its line.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from trimtab.diagnosis.reading.read_counts import ReadCounts
from trimtab.diagnosis.reading.row_blocks import Rows
from trimtab.diagnosis.reading.text_files import BOM, LONGEST, opened
from trimtab.errors import TrimtabError

_PIECE = 1 << 20  # bytes read at once
_OPENING, _BETWEEN, _CLOSING = re.compile(r"\s*\["), re.compile(r"[\s,]*"), re.compile(r"\]?\s*")


def json_lines(path: Path, tally: ReadCounts) -> Rows:
    """Yields one object per line. Other lines are dropped and counted."""
    with opened(path) as file:
        for number, line in enumerate(_lines(path, file), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                tally.drop(_fault(line, error), row=number)
                continue
            if isinstance(row, dict):
                yield number, row
            else:
                tally.drop("not a JSON object", row=number)


def _lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    first = True
    while line := file.readline(LONGEST + 1):
        if len(line) > LONGEST:
            raise TrimtabError(f"{path} has a line of over {LONGEST >> 20} MB: it is not JSON lines")
        yield line.removeprefix(BOM) if first else line
        first = False


def _fault(line: bytes, error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    return "not JSON" if line.endswith(b"\n") else "unfinished last line"


def json_array(path: Path, tally: ReadCounts) -> Rows:
    """Yields the objects of one array, decoded one at a time. Raises `TrimtabError` if the array is truncated."""
    decoder = json.JSONDecoder()
    with opened(path) as file:
        text = _TextBuffer(path, file)
        text.skip(_OPENING)
        text.skip(_BETWEEN)
        number = 0
        while not text.at_end():
            number += 1
            row = _next_value(text, decoder, path, number)
            if isinstance(row, dict):
                yield number, row
            else:
                tally.drop("not a JSON object", row=number)
            text.skip(_BETWEEN)
        text.skip(_CLOSING)
        if text.unread:
            raise TrimtabError(f"{path} goes on after its array: write one array, or one object per line")


def _next_value(text: _TextBuffer, decoder: json.JSONDecoder, path: Path, number: int) -> Any:
    """Returns the next value; more of the file is read until it parses."""
    while True:
        try:
            value, text.position = decoder.raw_decode(text.text, text.position)
        except RecursionError:
            raise TrimtabError(f"{path}, row {number} is nested too deeply: it is not a row of numbers") from None
        except ValueError as error:
            if not text.more():
                reason = f"is not JSON or unfinished ({getattr(error, 'msg', error)})"
                raise TrimtabError(f"{path}, row {number} {reason}: fix the array") from None
        else:
            return value


class _TextBuffer:
    """A buffer of file text: `text` from `position` on is unread.

    Every read at least doubles the buffer, so that time stays linear in the size of a row.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.text, self.position = "", 0
        self._path, self._file = path, file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()

    @property
    def unread(self) -> int:
        """Number of unread characters in the buffer."""
        return len(self.text) - self.position

    def more(self) -> bool:
        """Reads more of the file; returns False at its end."""
        if self.unread > LONGEST:
            raise TrimtabError(f"{self._path} has a row of over {LONGEST >> 20} MB: write one object per line")
        data = self._file.read(max(_PIECE, self.unread))
        try:
            self.text = self.text[self.position :] + self._decode.decode(data, final=not data)
        except UnicodeDecodeError:
            raise TrimtabError(f"{self._path} is not UTF-8: write it as UTF-8") from None
        self.position = 0
        return bool(data)

    def skip(self, what: re.Pattern[str]) -> None:
        """Skips text that matches, until other text follows or the file ends."""
        while True:
            if match := what.match(self.text, self.position):
                self.position = match.end()
            if self.unread or not self.more():
                return

    def at_end(self) -> bool:
        return self.text.startswith("]", self.position)
