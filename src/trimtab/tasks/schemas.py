"""Known layouts of public data sets: their columns, and worked examples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from trimtab.tasks.answers import AnswerFormat
from trimtab.types import Problem

SchemaName = Literal["gsm8k", "mawps", "aime", "amc", "minerva"]


@dataclass(frozen=True)
class Schema:
    """`worked` takes the place of rows as worked examples; with `rows_first` only where no row is left to show."""

    question: str = "question"
    answer: str = "answer"
    answer_format: AnswerFormat = "text"
    id: str | None = None
    worked: tuple[Problem, ...] = ()
    rows_first: bool = False

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

# Rows of GSM8K show the bare result too; these are for test files, which have none to spare.
_GSM8K = (
    Problem(
        "bakery",
        "A baker sells 12 loaves a day for $5 each. How many dollars does she take in 3 days?",
        "12 * 5 = 60 a day. 60 * 3 = 180",
    ),
    Problem(
        "marbles",
        "Ben has 40 marbles. He gives a quarter of them to Ann and 6 to Tom. How many marbles does Ben keep?",
        "40 / 4 = 10 for Ann. 40 - 10 - 6 = 24",
    ),
    Problem(
        "pages",
        "Mia reads 15 pages on Monday and twice as many on Tuesday. How many pages does she read on both days?",
        "15 * 2 = 30 on Tuesday. 15 + 30 = 45",
    ),
    Problem(
        "trip",
        "A class of 24 children and 4 teachers goes on a trip in cars of 4 seats. A car costs $36, and the school pays "
        "half of it all. How many dollars do the parents of each child pay?",
        "24 + 4 = 28 people. 28 / 4 = 7 cars. 7 * 36 = 252 for all cars. 252 / 2 = 126 are left to the parents. "
        "126 / 24 = 5.25",
    ),
)

SCHEMAS: dict[SchemaName, Schema] = {
    "gsm8k": Schema(answer_format="gsm8k", worked=_GSM8K, rows_first=True),
    "mawps": Schema("input", "target", "number", worked=_MAWPS),
    "aime": Schema("problem", "answer", "number", "id"),
    "amc": Schema("problem", "answer", "number", "id"),
    "minerva": Schema("problem", "solution", "boxed", "idx"),
}
