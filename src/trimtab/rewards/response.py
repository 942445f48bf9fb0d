"""A finished response as rewards see it: text, finish reason, number of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.types import Completion, Finish


@dataclass(frozen=True, slots=True)
class Response:
    """A finished text, how it ended, and its length in tokens."""

    text: str
    finish: Finish
    tokens: int

    @classmethod
    def of(cls, completion: Completion) -> Response:
        return cls(completion.text, completion.finish, len(completion.response_ids))

    def body(self, stops: Iterable[str]) -> str:
        """The text before the first stop string, without surrounding blanks.

        A stop string can sit inside a longer token ("\\n\\n"), so text after it is no part of the answer.
        """
        text = self.text
        for stop in stops:
            text = text.partition(stop)[0]
        return text.strip()
