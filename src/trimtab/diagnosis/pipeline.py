"""The diagnosis pipeline: read, measure, find causes, recommend, in one pass over the files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from trimtab.diagnosis.advice import advise
from trimtab.diagnosis.causes import find_causes
from trimtab.diagnosis.measure import measure
from trimtab.diagnosis.reading import open_source
from trimtab.diagnosis.records import Chunk, Diagnosis, Measured
from trimtab.diagnosis.token_texts import named_tokenizer, texts_of, tokenizer_of
from trimtab.errors import TrimtabError

Watch = Callable[[str, int], None]
"""Called with what is being done and how many tokens have been read so far."""


def diagnose(
    paths: str | Path | Sequence[str | Path],
    *,
    framework: str | None = None,
    columns: Mapping[str, str] | None = None,
    tokenizer: str | None = None,
    watch: Watch | None = None,
) -> Diagnosis:
    """Compare trainer and sampler from the log-probs in files, folders or run directories.

    framework: trimtab, verl, trl, miles, prime-rl or columns; found from the files where None. columns: names of this
    package's columns (`logp_behavior`, ...) to those of the files. tokenizer: for the texts of token ids, a
    tokenizer.json, the folder of a model or run that holds one, or a model in the local Hugging Face cache; that of the
    run where None. Files are read in pieces: memory does not grow with their size.

    Raises `TrimtabError`, in one line, when no response can be used or the request makes no sense. Bad responses are
    dropped and counted in `measured.origin.dropped`, never an error.
    """
    several = [paths] if isinstance(paths, str | Path) else list(paths)
    vocabulary = None if tokenizer is None else named_tokenizer(tokenizer)
    source = open_source([Path(path) for path in several], framework=framework, columns=columns or {})
    tell = watch or _silent
    tell("reading", 0)
    counter = _Counter(source.chunks(), tell)
    measured = measure(counter, source.origin)
    tell("looking for causes", counter.tokens)
    causes = find_causes(measured)
    tell("trying every preset", counter.tokens)
    outcomes, recommendation = advise(measured, causes)
    texts, why = _texts(measured, vocabulary or tokenizer_of(source.files))
    if vocabulary is not None and why:
        raise TrimtabError(why)
    return Diagnosis(measured, causes, outcomes, recommendation, texts)


def _texts(measured: Measured, tokenizer: Path | None) -> tuple[dict[int, str], str]:
    """Of the token ids in the views, by id, and in one sentence why there are none."""
    view = measured.views.get("token")
    if tokenizer is None or view is None:
        return {}, ""
    return texts_of(tokenizer, [int(id_) for id_ in view.columns["id"] if id_ >= 0])


class _Counter:
    """The chunks as they are, with their tokens counted."""

    def __init__(self, chunks: Iterable[Chunk], tell: Watch) -> None:
        self.chunks, self.tell, self.tokens = chunks, tell, 0

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self.chunks:
            self.tokens += chunk.tokens
            self.tell("reading", self.tokens)
            yield chunk


def _silent(_what: str, _tokens: int) -> None:
    pass
