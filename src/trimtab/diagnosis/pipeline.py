"""The diagnosis pipeline: reads, measures, finds causes and recommends, in one pass over the files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trimtab.diagnosis.advice import advise
from trimtab.diagnosis.causes import find_causes
from trimtab.diagnosis.measure import measure
from trimtab.diagnosis.reading import open_log
from trimtab.diagnosis.records import Diagnosis, Measured, Placeholder
from trimtab.diagnosis.token_texts import named_tokenizer, texts_of, tokenizer_of
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import TrimtabError

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
) -> Diagnosis:
    """Compares trainer and sampler by the log-probs in files, folders or run directories.

    framework: trimtab, verl, trl, miles, prime-rl, nemo-rl or columns; None detects it from the files.
    columns: column names of the files by those of this package (`logp_behavior`, ...).
    tokenizer: for the texts of token ids: a tokenizer.json, the folder of a model or run that holds one, or a model in
        the local Hugging Face cache; None uses that of the run.
    on_progress: called with the current phase and the number of tokens.
    without: names of causes that are not looked for.

    Files are read in blocks, so that memory does not grow with their size. Raises `TrimtabError` when no response is
    usable or an argument is invalid. Invalid responses are dropped and counted in `measured.origin.dropped`.
    """
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    vocabulary = None if tokenizer is None else named_tokenizer(tokenizer)
    on_progress = on_progress or _ignore_progress
    measured, files = examine([Path(path) for path in paths], framework, columns or {}, on_progress, without)
    tokens = measured.origin.tokens
    on_progress("looking for causes", tokens)
    causes = find_causes(measured, without)
    on_progress("trying every preset", tokens)
    outcomes, recommendation = advise(measured, causes)
    texts, problem = _texts(measured, vocabulary or tokenizer_of(files))
    if vocabulary is not None and problem:
        raise TrimtabError(problem)
    return Diagnosis(measured, causes, outcomes, recommendation, texts)


def examine(
    paths: Sequence[Path],
    framework: str | None,
    columns: Mapping[str, str],
    on_progress: OnProgress,
    without: Collection[str] = (),
) -> tuple[Measured, Sequence[Path]]:
    """Reads and measures files, and returns them; a second time without the placeholders that the first one found."""
    left_out: tuple[Placeholder, ...] = ()
    before: Measured | None = None
    while True:
        log = open_log(paths, framework=framework, columns=columns)
        on_progress("reading again without placeholders" if left_out else "reading", 0)
        measured = measure(_with_progress(log.tables(), on_progress), log.summary, left_out=left_out)
        found = () if "placeholder" in without else measured.placeholders
        if before is not None:
            removed = before.origin.trained - measured.origin.trained
            return replace(measured, removed=removed, k3_before=before.size.mismatch["k3"]), log.files
        if not found or sum(one.tokens for one in found) >= measured.origin.trained:
            return replace(measured, placeholders=found), log.files
        left_out, before = found, measured


def _texts(measured: Measured, tokenizer: Path | None) -> tuple[dict[int, str], str]:
    """Returns the texts of the token ids in the views, by id, and the reason if they cannot be read."""
    view = measured.views.get("token")
    if tokenizer is None or view is None:
        return {}, ""
    return texts_of(tokenizer, [int(id_) for id_ in view.columns["id"] if id_ >= 0])


def _with_progress(tables: Iterable[TokenTable], on_progress: OnProgress) -> Iterator[TokenTable]:
    tokens = 0
    for table in tables:
        tokens += table.tokens
        on_progress("reading", tokens)
        yield table


def _ignore_progress(_activity: str, _tokens: int) -> None:
    pass
