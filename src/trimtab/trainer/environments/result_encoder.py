"""Encodes results of tools as the tokens that follow a turn, and decodes the turns of a model.

Text of a result never becomes a control token: `<|im_end|>` in it must not end a turn.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from trimtab.trainer.environments.formats import Format
from trimtab.types import IntArray

MARK = "\ue000"
"""A character of Unicode's private use area."""
CUT = " ... "
"""Stands for what is left out of the middle of a long result."""
CHARACTERS = 32
"""Characters of a token that are read of a result too long to be encoded as a whole."""


class ResultEncoder:
    """A tokenizer with a format.

    Args:
        tokenizer: a copy with a lock is used, because tokenizers are not thread-safe and each engine has a thread.
        form: how a result is written.
        limit: tokens of a result; a longer one is cut in the middle.
    """

    def __init__(self, tokenizer: Any, form: Format, limit: int) -> None:
        self.tokenizer, self._lock = copy.deepcopy(tokenizer), threading.Lock()
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        # One character cannot be taken apart, and is not a control token.
        texts = [re.escape(str(token)) for token in added if len(str(token)) > 1]
        # The first character of each text that is one token beside the vocabulary, those that overlap included.
        self._beginning = re.compile(f"(?=(?:{'|'.join(texts)})).", re.DOTALL) if texts else re.compile("(?!)")
        self._form, self._limit = form, limit

    def observation(self, result: str) -> IntArray:
        """Returns the tokens that follow a turn.

        Text of the result that looks like a token of the chat template stays text.
        """
        return self._encode_around(result, self._form.render)

    def shortened(self, result: str) -> str:
        """Returns the text with its middle cut out if it has more tokens than the limit."""
        room = self._limit * CHARACTERS
        if len(result) <= 2 * room:
            head = tail = self._encode_around(result)
            if len(head) <= self._limit:
                return result
        else:
            head, tail = self._encode_around(result[:room]), self._encode_around(result[-room:])
        return self.decode(head[: (self._limit + 1) // 2]) + CUT + self.decode(tail[len(tail) - self._limit // 2 :])

    def decode(self, ids: Iterable[int]) -> str:
        with self._lock:
            return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _encode_around(self, text: str, render: Callable[[str], str] = str) -> IntArray:
        """Encodes what `render` makes of a text, in pieces that keep the text from holding control tokens.

        A mark that the text does not have is put inside of each added token: the parts between are plain text.
        """
        longest = max(map(len, re.findall(f"{MARK}+", text)), default=0)
        mark = MARK * (longest + 1)
        marked = self._beginning.sub(lambda first: first[0] + mark, text)
        pieces: list[IntArray] = []
        for piece in render(marked).split(mark):
            with self._lock:
                ids = self.tokenizer(piece, add_special_tokens=False)["input_ids"]
            pieces.append(np.asarray(ids, dtype=np.int64))
        return np.concatenate(pieces)


def escape_surrogates(text: str) -> str:
    """Returns the text with halves of surrogate pairs, which no tokenizer takes, as `\\udcff`."""
    return text.encode(errors="backslashreplace").decode()
