"""Texts of token ids, from a tokenizer on this machine; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trimtab.diagnosis.reading.run_settings import model_of, run_of
from trimtab.errors import TrimtabError

_SHOWN = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})
_FILE = "tokenizer.json"


def token_texts(run: Path, ids: Iterable[int]) -> tuple[dict[int, str], str]:
    """The text of each id with its blanks made visible, and in one sentence why there is none (empty if there is).

    From the tokenizer a run saved beside its model.
    """
    file = run / "model" / _FILE
    if not file.is_file():
        return {}, f"only ids are shown: the run holds no model/{_FILE}"
    return texts_of(file, ids)


def texts_of(file: Path, ids: Iterable[int]) -> tuple[dict[int, str], str]:
    """The same from a tokenizer.json."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        return {}, f"only ids are shown: {file.parent.name}/{file.name} cannot be read ({error})"
    return {
        id_: _text(tokenizer.decode([id_], skip_special_tokens=False), tokenizer.id_to_token(id_)) for id_ in ids
    }, ""


def tokenizer_of(files: Iterable[Path]) -> Path | None:
    """The tokenizer.json of the runs these files belong to; None where there is none, or runs have different ones."""
    runs = dict.fromkeys(run_of(file) for file in files)
    found = [None if run is None else _of_run(run) for run in runs]
    if not found or None in found:
        return None
    contents = {file.read_bytes() for file in found if file is not None}
    return found[0] if len(contents) == 1 else None


def named_tokenizer(name: str) -> Path:
    """A tokenizer.json, the folder of a model or run that holds one, or a model in the local Hugging Face cache."""
    path = Path(name)
    if path.is_file():
        return path
    if (file := _in_folder(path)) is not None:
        return file
    if (file := _cached(name)) is not None:
        return file
    raise TrimtabError(
        f"no {_FILE} at {name!r}: name such a file, the folder of a model or run that holds one, or a model in the "
        f"local Hugging Face cache (nothing is downloaded)"
    )


def _of_run(run: Path) -> Path | None:
    if (file := _in_folder(run)) is not None:
        return file
    model = model_of(run)
    return None if model is None else _in_folder(Path(model)) or _cached(model)


def _in_folder(folder: Path) -> Path | None:
    return next((file for file in (folder / _FILE, folder / "model" / _FILE) if file.is_file()), None)


def _cached(name: str) -> Path | None:
    """Of a model that was downloaded before; a name that is no repository's is in no cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, _FILE)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _text(decoded: str, piece: str | None) -> str:
    """A part of a character decodes to the replacement sign, and some decoders drop a leading blank."""
    if piece is None:
        return "(not in the vocabulary)"
    lost_blank = piece.startswith("▁") and not decoded.startswith(" ")
    text = piece if not decoded or "\ufffd" in decoded else (" " + decoded if lost_blank else decoded)
    shown = text.translate(_SHOWN)
    return "".join(sign if sign.isprintable() else f"\\u{ord(sign):04x}" for sign in shown)
