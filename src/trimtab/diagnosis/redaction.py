"""Removes what identifies the data from a diagnosis: ids, texts, names of files, quoted cells (`--redact`)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from trimtab.diagnosis.records import Measured
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import TrimtabError

_IDS = 1 << 20  # largest vocabulary; larger and negative ids are all replaced by -1
_NUMERICS = re.compile(r"(float|bfloat|int|uint|fp|mxfp|nvfp)\d+(_e\dm\d)?(_(static|dynamic))?|auto|none|[\d.e-]+")


class Redaction:
    """Replaces token ids and removes names, for one invocation.

    Token ids are replaced as they are read, before anything is measured, so no later stage sees an original id. The
    replacements are a permutation drawn from the operating system's entropy and never written. So nobody can recover
    ids by hashing all of them, which a fixed or known salt would allow.
    """

    def __init__(self) -> None:
        self._replacements = np.argsort(np.frombuffer(os.urandom(8 * _IDS), dtype=np.uint64))

    @contextmanager
    def hide_errors(self) -> Iterator[None]:
        """Replaces the text of a `TrimtabError`, which may name files and quote their cells."""
        try:
            yield
        except TrimtabError:
            raise TrimtabError(
                "the files cannot be diagnosed. The reason names or quotes files, which --redact hides: run again "
                "without --redact to see it"
            ) from None

    def redact_table(self, table: TokenTable) -> TokenTable:
        """Returns the table with replaced ids; equal ids stay equal."""
        if table.ids is None:
            return table
        known = (table.ids >= 0) & (table.ids < _IDS)
        return replace(table, ids=np.where(known, self._replacements[np.where(known, table.ids, 0)], -1))

    def redact_measured(self, measured: Measured) -> Measured:
        """Returns the measurements with ids labeled as hashes, and without unknown words in the run's numerics."""
        views, origin = dict(measured.views), replace(measured.origin, model="")
        if (view := views.get("token")) is not None:
            pairs = zip(view.columns["id"].tolist(), view.labels, strict=True)
            labels = tuple(f"hash {id_:05x}" if id_ >= 0 else label for id_, label in pairs)
            views["token"] = replace(view, labels=labels, columns={**view.columns, "id": np.full(len(labels), -1)})
        if (numerics := origin.numerics) is not None and numerics.is_recorded:
            pairs = None if numerics.coarse is None else [pair.partition(" = ") for pair in numerics.coarse]
            coarse = None if pairs is None else tuple(f"{key} = {_redact_word(value)}" for key, _, value in pairs)
            sampler, trainer, autocast = map(_redact_word, (numerics.sampler, numerics.trainer, numerics.autocast))
            parts = {"sampler": sampler, "trainer": trainer, "autocast": autocast, "coarse": coarse}
            origin = replace(origin, numerics=replace(numerics, **parts))
        return replace(measured, origin=origin, views=views)


def _redact_word(word: str) -> str:
    """Returns a word that names a dtype or a quantization; "(left out)" for others, which a user may have chosen."""
    return word if _NUMERICS.fullmatch(word) else "(left out)"
