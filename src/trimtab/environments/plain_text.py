"""Keeps text of a tool from becoming control tokens: `<|im_end|>` in a result must not end a turn."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

MARK = "\ue000"
"""A character of a private area."""


@dataclass(frozen=True)
class AddedTokens:
    """The texts that a tokenizer reads as one token each, beside its vocabulary of text.

    Attributes:
        beginning: matches the first character of each such text, those that overlap included.
    """

    beginning: re.Pattern[str]

    @classmethod
    def of(cls, tokenizer: Any) -> AddedTokens:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        # One character cannot be taken apart, and is no control token.
        texts = [re.escape(str(token)) for token in added if len(str(token)) > 1]
        return cls(re.compile(f"(?=(?:{'|'.join(texts)})).", re.DOTALL) if texts else re.compile("(?!)"))

    def separated(self, text: str) -> tuple[str, str]:
        """Returns the text with a mark inside of each added token, and the mark, which is not in `text`.

        Parts between the marks hold no added token: encoded one by one they are plain text.
        """
        longest = max(map(len, re.findall(f"{MARK}+", text)), default=0)
        mark = MARK * (longest + 1)
        return self.beginning.sub(lambda first: first[0] + mark, text), mark


def encodable(text: str) -> str:
    """Returns the text with halves of surrogate pairs, which no tokenizer takes, as `\\udcff`."""
    return text.encode(errors="backslashreplace").decode()
