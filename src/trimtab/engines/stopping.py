"""Detects where a response ends: stop ids, and stop strings in the decoded text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from trimtab.types import Sampling


class StopChecker:
    """Decides after each token whether a response is complete.

    A stop string may begin and end inside tokens. The token that completes it is kept, so that ids and log-probs stay
    exactly what was sampled; only the text is cut, before the stop string.
    """

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int], sampling: Sampling) -> None:
        self._tokenizer = tokenizer
        self._ids = frozenset() if sampling.ignore_stop else frozenset(eos_ids) | frozenset(sampling.stop_ids)
        self._strings = () if sampling.ignore_stop else tuple(text for text in sampling.stop if text)
        # Every token carries at least one byte, but for a special token or a leading space a decoder may swallow.
        self._window = max((len(text.encode()) for text in self._strings), default=0) + 4
        self._may_complete: dict[int, bool] = {}

    def ended(self, responses: Sequence[Sequence[int]]) -> list[bool]:
        """For each response so far: does its last token complete it?"""
        by_id = [ids[-1] in self._ids for ids in responses]
        if not self._strings:
            return by_id
        return [
            hit or (self._candidate(ids[-1]) and self._found(ids)) for hit, ids in zip(by_id, responses, strict=True)
        ]

    def end(self, ids: Sequence[int], begun: int = 0) -> int | None:
        """How many tokens a finished response has, if one of those from `begun` on completes it."""
        for last in range(begun, len(ids)):
            if self.ended([ids[max(0, last + 1 - self._window) : last + 1]])[0]:
                return last + 1
        return None

    def _candidate(self, token: int) -> bool:
        """Can a stop string end in this token? A look at its own text, once a token, saves decoding most responses."""
        known = self._may_complete.get(token)
        if known is None:
            text = self._decode([token])
            # Alone, a piece of a character decodes to a replacement, and a decoder may swallow a leading space.
            vague = not text or "\ufffd" in text
            known = vague or any(stop[-1] in text or stop[-1] == " " for stop in self._strings)
            self._may_complete[token] = known
        return known

    def _found(self, ids: Sequence[int]) -> bool:
        tail = self._decode(ids[-self._window :])
        return any(stop in tail for stop in self._strings)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def inside(self, ids: Sequence[int]) -> bool:
        """Does a stop occur anywhere in these ids?"""
        if not self._ids.isdisjoint(ids):
            return True
        if not self._strings:
            return False
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self._strings)

    def text(self, ids: Sequence[int]) -> str:
        """The response as text, without special tokens and without the stop string or anything after it."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        starts = [text.find(stop) for stop in self._strings if stop in text]
        return text[: min(starts)] if starts else text


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a text, as the tokenizer, the model's config and its generation config name them."""
    sources = (tokenizer, model.config, getattr(model, "generation_config", None))
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(found)
