"""Token texts: blanks are seen, parts of characters keep their piece, and nothing can break the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from trimtab.diagnosis.token_texts import token_texts

BYTES = {"Ġthe": 0, "Ċ": 1, "Ã": 2, "é": 3, "<|im_end|>": 4, "\u0420\u201a": 5}


def _save(folder: Path, vocabulary: dict[str, int], decoder: decoders.Decoder) -> None:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    tokenizer.decoder = decoder
    (folder / "model").mkdir()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))


def test_byte_level_tokens(tmp_path: Path) -> None:
    _save(tmp_path, BYTES, decoders.ByteLevel())
    texts, reason = token_texts(tmp_path, [0, 1, 2, 4, 99])
    assert reason == ""
    # Token 2 is half of a character.
    assert texts == {0: "␣the", 1: "↵", 2: "Ã", 4: "<|im_end|>", 99: "(not in the vocabulary)"}


def test_pieces_with_a_leading_blank(tmp_path: Path) -> None:
    _save(tmp_path, {"▁the": 0, "re": 1}, decoders.Metaspace())
    assert token_texts(tmp_path, [0, 1])[0] == {0: "␣the", 1: "re"}


@pytest.mark.parametrize(("token", "shown"), [("\u202eabc", "\\u202eabc"), ("a\x00", "a\\u0000"), ("\t", "⇥")])
def test_signs_that_cannot_be_printed_are_named(tmp_path: Path, token: str, shown: str) -> None:
    _save(tmp_path, {"x": 0, token: 1}, decoders.Fuse())
    assert token_texts(tmp_path, [1])[0] == {1: shown}
