"""Known layouts of public data sets: which columns mean what, and worked examples where the rows make poor ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from trimtab.tasks.answers import AnswerFormat
from trimtab.types import Problem

SchemaName = Literal["gsm8k", "mawps", "aime", "amc", "minerva"]


@dataclass(frozen=True)
class Schema:
    question: str = "question"
    answer: str = "answer"
    answer_format: AnswerFormat = "text"
    id: str | None = None
    worked: tuple[Problem, ...] = ()

    def with_columns(
        self, question: str | None, answer: str | None, answer_format: AnswerFormat | None, id_: str | None
    ) -> Schema:
        """The same with the user's own words where there are any."""
        return replace(
            self,
            question=question or self.question,
            answer=answer or self.answer,
            answer_format=answer_format or self.answer_format,
            id=id_ or self.id,
        )


# MAWPS rows hold the bare result; a small model gets 3% of them that way and 20% when it may write the sum.
_MAWPS = (
    Problem("add", "Tom has 3 apples. He buys 4 more. How many apples does Tom have?", "3 + 4 = 7"),
    Problem("subtract", "There are 9 birds on a fence. 5 birds fly away. How many birds are left?", "9 - 5 = 4"),
    Problem("multiply", "Each box holds 6 pens. How many pens are in 3 boxes?", "3 * 6 = 18"),
    Problem("divide", "Ann shares 12 sweets among 4 friends. How many sweets does each friend get?", "12 / 4 = 3"),
)

SCHEMAS: dict[SchemaName, Schema] = {
    "gsm8k": Schema(answer_format="gsm8k"),
    "mawps": Schema("input", "target", "number", worked=_MAWPS),
    "aime": Schema("problem", "answer", "number", "id"),
    "amc": Schema("problem", "answer", "number", "id"),
    "minerva": Schema("problem", "solution", "boxed", "idx"),
}
