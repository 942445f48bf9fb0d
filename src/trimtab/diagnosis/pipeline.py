"""The diagnosis pipeline: reads, measures, finds causes and recommends, in one pass over the files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from trimtab.diagnosis.advice import advise
from trimtab.diagnosis.causes import find_causes
from trimtab.diagnosis.measure import measure
from trimtab.diagnosis.reading import open_log
from trimtab.diagnosis.records import Diagnosis, Measured
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
) -> Diagnosis:
    """Compares trainer and sampler by the log-probs in files, folders or run directories.

    framework: trimtab, verl, trl, miles, prime-rl, nemo-rl or columns; None detects it from the files.
    columns: column names of the files by those of this package (`logp_behavior`, ...).
    tokenizer: for the texts of token ids: a tokenizer.json, the folder of a model or run that holds one, or a model in
        the local Hugging Face cache; None uses that of the run.
    on_progress: called with the current phase and the number of tokens.

    Files are read in blocks, so that memory does not grow with their size. Raises `TrimtabError` when no response is
    usable or an argument is invalid. Invalid responses are dropped and counted in `measured.origin.dropped`.
    """
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    vocabulary = None if tokenizer is None else named_tokenizer(tokenizer)
    log = open_log([Path(path) for path in paths], framework=framework, columns=columns or {})
    on_progress = on_progress or _ignore_progress
    on_progress("reading", 0)
    measured = measure(_with_progress(log.tables(), on_progress), log.summary)
    tokens = measured.origin.tokens
    on_progress("looking for causes", tokens)
    causes = find_causes(measured)
    on_progress("trying every preset", tokens)
    outcomes, recommendation = advise(measured, causes)
    texts, problem = _texts(measured, vocabulary or tokenizer_of(log.files))
    if vocabulary is not None and problem:
        raise TrimtabError(problem)
    return Diagnosis(measured, causes, outcomes, recommendation, texts)


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
