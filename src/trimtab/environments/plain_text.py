"""Keeps text of a tool from becoming control tokens: `<|im_end|>` in a result must not end a turn."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

MARKS = [chr(number) for number in range(0xE000, 0xE010)]
"""Characters of a private area, one of which is not in the text."""


@dataclass(frozen=True)
class AddedTokens:
    """The texts that a tokenizer reads as one token each, beside its vocabulary of text."""

    texts: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> AddedTokens:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        # One character cannot be taken apart, and is no control token.
        return cls(tuple(sorted({str(token) for token in added if len(str(token)) > 1}, key=len, reverse=True)))

    def separated(self, text: str) -> tuple[str, str]:
        """Returns the text with a mark inside of each added token, and the mark.

        Parts between the marks hold no added token: encoded one by one they are plain text.
        """
        mark = next(mark for mark in MARKS if mark not in text)
        if self.texts:
            pattern = re.compile("|".join(re.escape(token) for token in self.texts))
            while match := pattern.search(text):
                text = text[: match.start() + 1] + mark + text[match.start() + 1 :]
        return text, mark
