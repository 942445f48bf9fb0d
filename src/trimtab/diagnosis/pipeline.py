"""The diagnosis pipeline: reads, measures, finds causes and recommends, in one pass over the files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.diagnosis.advice.rules import advise
from trimtab.diagnosis.against import DiagnosisComparison, compare_samples
from trimtab.diagnosis.answer import Diagnosis
from trimtab.diagnosis.causes import find_candidates, find_causes
from trimtab.diagnosis.measure import measure
from trimtab.diagnosis.reading import open_log
from trimtab.diagnosis.reading.counts import ReadCounts
from trimtab.diagnosis.records import NOTHING_STATED, Measured, Placeholder, Stated
from trimtab.diagnosis.redaction import Redaction
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import TrimtabError
from trimtab.runs.tokenizers import named_tokenizer, token_texts, tokenizer_of

OnProgress = Callable[[str, int], None]
"""Progress callback: called with the current activity and the number of tokens read so far."""


def diagnose(
    paths: str | Path | Sequence[str | Path],
    *,
    framework: str | None = None,
    columns: Mapping[str, str] | None = None,
    tokenizer: str | None = None,
    on_progress: OnProgress | None = None,
    without: Collection[str] = (),
    redaction: Redaction | None = None,
    prompts: dict[Hashable, int] | None = None,
    stated: Stated = NOTHING_STATED,
) -> Diagnosis:
    """Compares trainer and sampler by the log-probs in files, folders or run directories.

    framework: trimtab, verl, trl, miles, slime, prime-rl, nemo-rl or open-instruct; None detects it by the columns.
    columns: the files' column names, by the names of this package (`logp_behavior`, ...).
    tokenizer: for the texts of token ids: a tokenizer.json, the folder of a model or run that holds one, or a model in
        the local Hugging Face cache; None uses the run's tokenizer.
    on_progress: called with the current phase and the number of tokens read so far.
    without: names of causes to skip.
    redaction: removes texts, file names and quoted cells, and replaces token ids by random numbers.
    prompts: numbers of prompts; share the dictionary with another diagnosis to recognize prompts of both.
    stated: what the user states about the run.

    Files are read in blocks, so memory does not grow with their size. Raises `TrimtabError` if no response is usable
    or an argument is invalid. Invalid responses are dropped and counted in `measured.origin.dropped`.
    """
    on_progress = on_progress or (lambda _activity, _tokens: None)
    files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    with nullcontext() if redaction is None else redaction.hide_errors():
        vocabulary = None if tokenizer is None else named_tokenizer(tokenizer)
        measured, files = examine(
            files, framework, columns or {}, on_progress, without, redaction=redaction, prompts=prompts, stated=stated
        )
        tokenizer_file = vocabulary or tokenizer_of(files)
        view = measured.views.get("token")
        texts, problem = {}, ""
        if tokenizer_file is not None and view is not None and not redaction:
            ids = [int(id_) for id_ in view.columns["id"] if id_ >= 0]
            texts, problem = token_texts(tokenizer_file, ids, visible=True)
        if vocabulary is not None and problem:
            raise TrimtabError(problem)
    tokens = measured.origin.tokens
    on_progress("looking for causes", tokens)
    causes = find_causes(measured, without)
    on_progress("trying every preset", tokens)
    outcomes, recommendation = advise(measured, causes)
    return Diagnosis(
        measured, causes, outcomes, recommendation, texts, find_candidates(measured, causes, stated.tested)
    )


def compare(
    first: Sequence[str | Path], second: Sequence[str | Path], *, redaction: Redaction | None = None, **options: Any
) -> tuple[Diagnosis, DiagnosisComparison]:
    """Returns the diagnosis of `first`, and its comparison with `second`. Other arguments as for `diagnose`."""
    prompts: dict[Hashable, int] = {}
    one, two = (diagnose(paths, redaction=redaction, prompts=prompts, **options) for paths in (first, second))
    names = [str(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "") for paths in (first, second)]
    return one, compare_samples(one, two, ("", "") if redaction else (names[0], names[1]))


def examine(
    paths: Sequence[Path],
    framework: str | None,
    columns: Mapping[str, str],
    on_progress: OnProgress,
    without: Collection[str] = (),
    *,
    redaction: Redaction | None = None,
    prompts: dict[Hashable, int] | None = None,
    stated: Stated = NOTHING_STATED,
) -> tuple[Measured, Sequence[Path]]:
    """Returns the measurements and the files. If placeholders are found, the files are read again without them."""

    def once(left_out: tuple[Placeholder, ...] = ()) -> tuple[Measured, Sequence[Path]]:
        counts = ReadCounts(prompts={} if prompts is None else prompts, quotes=redaction is None)
        log = open_log(paths, framework=framework, columns=columns, counts=counts)
        on_progress("reading again without placeholders" if left_out else "reading", 0)
        tables = log.tables() if redaction is None else map(redaction.redact_table, log.tables())
        if stated.lag is not None:
            tables = (_aged(table, stated.lag) for table in tables)
        measured = measure(_with_progress(tables, on_progress), log.summary, left_out=left_out)
        numerics = stated.numerics or measured.origin.numerics
        assumes = measured.origin.assumes_current and stated.lag is None
        measured = replace(measured, origin=replace(measured.origin, numerics=numerics, assumes_current=assumes))
        return measured if redaction is None else redaction.redact_measured(measured), log.files

    whole, files = once()
    found = () if "placeholder" in without else whole.placeholders
    if not found or sum(placeholder.tokens for placeholder in found) >= whole.origin.trained:
        return replace(whole, placeholders=found), files
    cleaned, files = once(found)
    removed = whole.origin.trained - cleaned.origin.trained
    return replace(cleaned, removed=removed, k3_before=whole.size.mismatch["k3"]), files


def _aged(table: TokenTable, lag: int) -> TokenTable:
    version, ages = np.zeros(table.tokens, dtype=np.int64), np.full(table.responses, lag, dtype=np.int64)
    return replace(table, version=version, proximal_version=ages)


def _with_progress(tables: Iterable[TokenTable], on_progress: OnProgress) -> Iterator[TokenTable]:
    tokens = 0
    for table in tables:
        tokens += table.tokens
        on_progress("reading", tokens)
        yield table
