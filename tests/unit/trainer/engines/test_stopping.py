"""Where a response ends, and which part of it is text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.support.engines import EOS, PIECES, tiny, tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trimtab.trainer.engines.stopping import StopChecker, eos_ids
from trimtab.types import SamplingParams


def ids(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


def end(rule: StopChecker, response: list[int]) -> int | None:
    """How many tokens the response has when the rule first ends it."""
    return next((n for n in range(1, len(response) + 1) if rule.ended([response[:n]])[0]), None)


@pytest.mark.parametrize(
    ("stop", "pieces", "length", "text"),
    [
        (("\n",), ("a", "\n", "b"), 2, "a"),
        (("\n",), ("a", "x\ny", "b"), 2, "ax"),  # ends inside a token: the id stays, the text is cut
        (("\n",), ("a", "\n\n", "b"), 2, "a"),
        (("ba",), ("a", "b", "ab", "c"), 3, "a"),  # begins in one token, ends inside the next
        (("\n\n",), ("a", "\n", "\n", "b"), 3, "a"),
        (("abc end",), ("ab", "c", " end"), 3, ""),
        (("é",), ("a", "é"), 2, "a"),
        (("zz",), ("a", "b"), None, "ab"),
        (("ab" * 30 + "c", "never"), ("c", *"ab" * 30, "c", "a"), 62, "c"),  # far longer than a token
        (("y", "\n"), ("a", "x\ny"), 2, "ax"),  # the earliest of several
    ],
)
def test_stop_strings(stop: tuple[str, ...], pieces: tuple[str, ...], length: int | None, text: str) -> None:
    rule = StopChecker(tokenizer(), [EOS], SamplingParams(stop=stop))
    response = ids(*pieces)
    assert end(rule, response) == rule.end(response) == length
    assert rule.text(response[:length]) == text


def test_characters_of_several_tokens_are_found_when_complete() -> None:
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    bytewise = PreTrainedTokenizerFast(tokenizer_object=backend)
    response = bytewise.encode("αβ🙂 done")
    rule = StopChecker(bytewise, [], SamplingParams(stop=("🙂",)))
    assert len("αβ🙂".encode()) == 8
    assert end(rule, response) == 8
    assert rule.text(response[:8]) == "αβ"


def test_ids_end_a_response_and_special_tokens_are_left_out_of_the_text() -> None:
    rule = StopChecker(tokenizer(), [EOS], SamplingParams(stop_ids=(PIECES.index("c"),)))
    assert rule.ended([ids("a", "<eos>"), ids("b", "c"), ids("c", "b")]) == [True, True, False]
    assert rule.text(ids("a", "<eos>")) == "a"


def test_forced_length_ignores_every_stop() -> None:
    rule = StopChecker(tokenizer(), [EOS], SamplingParams(stop=("a",), stop_ids=(2,), ignore_stop=True))
    assert rule.ended([[EOS], [2], ids("a")]) == [False] * 3
    assert rule.text(ids("a", "b")) == "ab"


def test_every_end_of_text_id_is_known() -> None:
    model = tiny()
    model.generation_config.eos_token_id = [5, 6]
    assert eos_ids(tokenizer(), model.config, model.generation_config) == {EOS, 5, 6}
    assert eos_ids(SimpleNamespace(), SimpleNamespace()) == frozenset()


def test_only_responses_whose_last_token_can_complete_a_stop_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = tokenizer()
    rule, decode, read = StopChecker(reader, [EOS], SamplingParams(stop=("ba",))), reader.decode, []

    def counted(tokens: list[int], **how: bool) -> str:
        read.append(list(tokens))
        return decode(tokens, **how)

    monkeypatch.setattr(reader, "decode", counted)
    long = ids("a", "c", "b")
    assert rule.ended([long] * 5) == [False] * 5
    assert read == [ids("b")], "the token once, no response"
    assert rule.ended([ids("a", "b", "ab")]) == [True]
    assert read[1:] == [ids("ab"), ids("a", "b", "ab")]
