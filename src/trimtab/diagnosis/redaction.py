"""Leaves out of a diagnosis what would tell whose data it is: ids, texts, names of files and cells (`--redact`)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from trimtab.diagnosis.records import DataSummary, Measured, Settings, View
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import TrimtabError

_IDS = 1 << 20
"""Largest vocabulary; ids beyond it, and negative ones, are all replaced by -1."""
_NUMERICS = re.compile(r"(float|bfloat|int|uint|fp|mxfp|nvfp)\d+(_e\dm\d)?(_(static|dynamic))?|auto|none|[\d.e-]+")


@contextmanager
def errors_kept_back(redaction: Redaction | None) -> Iterator[None]:
    """Replaces the text of a `TrimtabError`, which may name files and quote their cells; not without a redaction."""
    try:
        yield
    except TrimtabError:
        if redaction is None:
            raise
        raise TrimtabError(
            "this cannot be done. The reason names files or quotes them, so --redact keeps it back: run again without "
            "--redact to see it"
        ) from None


class Redaction:
    """The replacements of one invocation.

    Token ids are replaced as they are read, before anything is measured, so that no later stage knows one. The table of
    replacements is a permutation drawn from the operating system's entropy and is never written: to try all ids against
    a hash, as would be possible with a fixed or a known salt, says nothing.
    """

    def __init__(self) -> None:
        self._replacements = np.argsort(np.frombuffer(os.urandom(8 * _IDS), dtype=np.uint64))

    def table(self, table: TokenTable) -> TokenTable:
        """Returns the table with other ids; equal ids stay equal."""
        if table.ids is None:
            return table
        known = (table.ids >= 0) & (table.ids < _IDS)
        return replace(table, ids=np.where(known, self._replacements[np.where(known, table.ids, 0)], -1))

    def measured(self, measured: Measured) -> Measured:
        """Returns the measurements with ids marked as hashes, and with known words only in the run's settings."""
        views = {name: _hashed(view) if name == "token" else view for name, view in measured.views.items()}
        return replace(measured, origin=_origin(measured.origin), views=views)


def _hashed(view: View) -> View:
    labels = tuple(f"hash {int(label):05x}" if label.isdigit() else label for label in view.labels)
    return replace(view, labels=labels, columns={**view.columns, "id": np.full(len(labels), -1)})


def _origin(origin: DataSummary) -> DataSummary:
    settings = origin.settings
    if settings is None:
        return origin
    coarse = None if settings.coarse is None else tuple(_known_value(pair) for pair in settings.coarse)
    sampler, trainer, autocast = map(_known, (settings.sampler, settings.trainer, settings.autocast))
    return replace(origin, settings=Settings(sampler, trainer, autocast, coarse))


def _known(word: str) -> str:
    """Returns the name of a dtype or of a quantization; other words, which a user may have chosen, are left out."""
    return word if _NUMERICS.fullmatch(word) else "(left out)"


def _known_value(pair: str) -> str:
    key, _, value = pair.partition(" = ")
    return f"{key} = {_known(value)}"
