"""Token ids as people read them, from the tokenizer a run saved beside its model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_SHOWN = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})


def token_texts(run: Path, ids: Iterable[int]) -> tuple[dict[int, str], str]:
    """The text of each id with its blanks made visible, and in one sentence why there is none (empty if there is)."""
    from tokenizers import Tokenizer

    file = run / "model" / "tokenizer.json"
    if not file.is_file():
        return {}, "only ids are shown: the run holds no model/tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        return {}, f"only ids are shown: model/tokenizer.json cannot be read ({error})"
    return {
        id_: _text(tokenizer.decode([id_], skip_special_tokens=False), tokenizer.id_to_token(id_)) for id_ in ids
    }, ""


def _text(decoded: str, piece: str | None) -> str:
    """A part of a character decodes to the replacement sign, and some decoders drop a leading blank."""
    if piece is None:
        return "(not in the vocabulary)"
    lost_blank = piece.startswith("▁") and not decoded.startswith(" ")
    text = piece if not decoded or "\ufffd" in decoded else (" " + decoded if lost_blank else decoded)
    shown = text.translate(_SHOWN)
    return "".join(sign if sign.isprintable() else f"\\u{ord(sign):04x}" for sign in shown)
