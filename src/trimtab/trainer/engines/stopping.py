"""Detects where a response ends: stop ids, and stop strings in the decoded text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from trimtab.types import SamplingParams


class StopChecker:
    """Decides after each token whether a response is complete.

    A stop string may begin and end inside tokens. The token that completes it stays in the response, so that ids and
    log-probs remain exactly what was sampled; only the text is cut, before the stop string. `ids` are the stop ids.
    """

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int], sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self.ids = frozenset() if sampling.ignore_stop else frozenset(eos_ids) | frozenset(sampling.stop_ids)
        self._strings = () if sampling.ignore_stop else tuple(text for text in sampling.stop if text)
        # Number of last tokens that are searched for a stop string: one per byte of the string, because a token has at
        # least one byte. The margin is for special tokens and for a leading space, which a decoder may drop.
        self._window = max((len(text.encode()) for text in self._strings), default=0) + 4
        self._may_complete: dict[int, bool] = {}

    def ended(self, responses: Sequence[Sequence[int]]) -> list[bool]:
        """Returns, for each response so far, whether its last token completes it."""
        by_id = [ids[-1] in self.ids for ids in responses]
        if not self._strings:
            return by_id
        return [
            hit or (self._may_complete_stop(ids[-1]) and self._has_stop_string(ids))
            for hit, ids in zip(by_id, responses, strict=True)
        ]

    def end(self, ids: Sequence[int], start: int = 0) -> int | None:
        """Returns the length of the response that ends with the first completing token from `start` on, or None."""
        for last in range(start, len(ids)):
            if self.ended([ids[max(0, last + 1 - self._window) : last + 1]])[0]:
                return last + 1
        return None

    def _may_complete_stop(self, token: int) -> bool:
        """Returns whether a stop string can end in this token.

        Answers are cached by token id. Most responses then need no decoding.
        """
        possible = self._may_complete.get(token)
        if possible is None:
            text = self._decode([token])
            # A token that holds part of a character decodes to U+FFFD, and a decoder may drop a leading space.
            unclear = not text or "\ufffd" in text
            possible = unclear or any(stop[-1] in text or stop[-1] == " " for stop in self._strings)
            self._may_complete[token] = possible
        return possible

    def _has_stop_string(self, ids: Sequence[int]) -> bool:
        tail = self._decode(ids[-self._window :])
        return any(stop in tail for stop in self._strings)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def text(self, ids: Sequence[int]) -> str:
        """Returns the response as text, without special tokens, cut before the first stop string."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        starts = [text.find(stop) for stop in self._strings if stop in text]
        return text[: min(starts)] if starts else text


def eos_ids(tokenizer: Any, config: Any, generation_config: Any = None) -> frozenset[int]:
    """Returns every end-of-sequence id named by the tokenizer, the model's config or its generation config."""
    ids: set[int] = set()
    for source in (tokenizer, config, generation_config):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(ids)


def generation_config(folder: Path | str) -> GenerationConfig | None:
    """Returns the generation config of a model folder, or None if the folder has none."""
    return GenerationConfig.from_pretrained(folder) if Path(folder, "generation_config.json").is_file() else None
