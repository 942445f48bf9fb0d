"""Finds the model and the tokenizer of runs, and gives the texts of token ids. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from trimtab.errors import TrimtabError
from trimtab.files import parse_toml
from trimtab.runs.layout import CONFIG, run_of

_VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})
_FILE = "tokenizer.json"


def model_of(run: Path) -> str | None:
    """Returns the model of a run's recipe; None if it cannot be read."""
    try:
        model = parse_toml((run / CONFIG).read_text(encoding="utf-8")).get("model")
    except (OSError, ValueError):
        return None
    path = model.get("path") if isinstance(model, Mapping) else None
    return path if isinstance(path, str) else None


def token_texts(path: Path, ids: Iterable[int], *, visible: bool = False) -> tuple[dict[int, str], str]:
    """Returns the text of each id and an empty string, or no texts and the reason.

    path: a tokenizer.json, or a run that saved one in its folder `model`. visible: whether to replace whitespace by
    visible characters, and other characters that cannot be printed by their code points.
    """
    from tokenizers import Tokenizer

    file = path / "model" / _FILE if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type
        return {}, f"only ids are shown: {file.parent.name}/{file.name} cannot be read ({error})"
    pieces = {id_: (tokenizer.decode([id_], skip_special_tokens=False), tokenizer.id_to_token(id_)) for id_ in ids}
    return {id_: _text(*piece, visible=visible) for id_, piece in pieces.items()}, ""


def tokenizer_of(files: Iterable[Path]) -> Path | None:
    """Returns the tokenizer.json that the runs of all files share; None if a run lacks one, or if they differ."""
    found: list[Path] = []
    for run in dict.fromkeys(run_of(file) for file in files):
        if run is None:
            return None
        model = model_of(run)
        file = _in_folder(run) or (None if model is None else _in_folder(Path(model)) or _cached(model))
        if file is None:
            return None
        found.append(file)
    return found[0] if len({file.read_bytes() for file in found}) == 1 else None


def named_tokenizer(name: str) -> Path:
    """Returns the tokenizer.json that a name refers to. Raises `TrimtabError` if there is none.

    name: the file, the folder of a model or run, or a model in the local Hugging Face cache.
    """
    path = Path(name)
    file = path if path.is_file() else _in_folder(path) or _cached(name)
    if file is None:
        raise TrimtabError(
            f"no {_FILE} at {name!r}: name such a file, the folder of a model or run with one, or a model in the local "
            f"Hugging Face cache (nothing is downloaded)"
        )
    return file


def _in_folder(folder: Path) -> Path | None:
    return next((file for file in (folder / _FILE, folder / "model" / _FILE) if file.is_file()), None)


def _cached(name: str) -> Path | None:
    """Returns the tokenizer.json of a model in the local cache; None also for an invalid repository name."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, _FILE)
    except HFValidationError:
        return None
    return Path(file) if isinstance(file, str) else None


def _text(decoded: str, piece: str | None, *, visible: bool) -> str:
    """Returns the text of a token.

    Corrects two cases: a part of a character decodes to the replacement character; decoders may drop a leading space.
    """
    if piece is None:
        return "(not in the vocabulary)"
    lost_space = piece.startswith("▁") and not decoded.startswith(" ")
    text = piece if not decoded or "\ufffd" in decoded else (" " + decoded if lost_space else decoded)
    if not visible:
        return text
    return "".join(sign if sign.isprintable() else f"\\u{ord(sign):04x}" for sign in text.translate(_VISIBLE))
