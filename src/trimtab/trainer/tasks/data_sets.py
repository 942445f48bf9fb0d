"""Data sets as tasks: a JSONL, JSON, CSV or parquet file, or a Hugging Face dataset; see `RowOptions` for columns.

Files are not read with `datasets.load_dataset`, because it infers one type per column: the CSV cell "007" becomes 7,
the text "2020-01-01" becomes a date, and a missing column becomes None. Its row numbers also skip empty lines.
"""

from __future__ import annotations

import csv
import json
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field, field_validator

from trimtab.errors import TrimtabError, TrimtabWarning, did_you_mean, first_line
from trimtab.files import open_parquet, regular_file
from trimtab.trainer.tasks.answers import AnswerFormat, extract
from trimtab.trainer.tasks.task import BuiltTask, Chat, StyleOptions, Template, build_template, limits, split_shots
from trimtab.types import Problem, RewardSpec

Row = tuple[int, Mapping[str, Any]]  # row number in the file, counted from 1, and the columns
COLUMN = re.compile(r"\{([^{}]+)\}")  # a column name in a question template
BOXED = Chat("{question}\n\nReason step by step and write the final answer in \\boxed{}.", answer="\\boxed{{answer}}")

SchemaName = Literal["gsm8k", "mawps", "aime", "amc", "minerva"]


@dataclass(frozen=True)
class Schema:
    """The columns of a known data set, and its worked examples (`worked`)."""

    question: str = "question"
    answer: str = "answer"
    answer_format: AnswerFormat = "text"
    id: str | None = None
    worked: tuple[Problem, ...] = ()


# MAWPS rows hold the bare result. A small model solves 3% with such examples, and 20% if the examples show the sum.
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


class RowOptions(StyleOptions):
    schema_: SchemaName | None = Field(None, alias="format", description="a known layout: sets the next four")
    question: str | None = Field(
        None,
        description="column with the question, or text with {columns} as '{Body} {Question}' (default: question); "
        "`a.0.b` is a column inside others",
    )
    answer: str | None = Field(None, description="column with the answer (default: answer)")
    answer_format: AnswerFormat | None = Field(None, description="how the answer is written (default: text)")
    answer_pattern: str | None = Field(
        None, description="regular expression with one group: the part of the stored answer that is read"
    )
    id: str | None = Field(None, description="column with a unique id (default: the row number)")
    extra: tuple[str, ...] = Field((), description="columns that rewards get as problem.extra")
    holdout: float = Field(
        0.1, ge=0, le=1, description="share of the questions kept for testing; 1: all, and none for worked examples"
    )

    drop_duplicates: bool = Field(
        False,
        description="leave out training rows whose question, apart from case and spaces, an earlier or a test row has",
    )

    @field_validator("question")
    @classmethod
    def _names_columns(cls, question: str | None) -> str | None:
        if question is not None and not COLUMN.search(question) and set(question) & set("{}"):
            raise ValueError("write a column's name between braces, as in '{Body} {Question}', or a name alone")
        return question

    @field_validator("answer_pattern")
    @classmethod
    def _has_one_group(cls, pattern: str | None) -> str | None:
        if pattern is None:
            return None
        if not pattern.isprintable():
            raise ValueError("a control character: between double quotes \\b is a backspace, use single quotes")
        try:
            groups = re.compile(pattern).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"not a regular expression ({error})") from None
        if groups != 1:
            raise ValueError(f"write one group (...) around the answer, not {groups}; others are written (?:...)")
        return pattern

    @property
    def columns(self) -> Schema:
        """The columns of the named format, replaced by the columns that the user names."""
        schema = Schema() if self.schema_ is None else SCHEMAS[self.schema_]
        named = {key: getattr(self, key) for key in ("question", "answer", "answer_format", "id")}
        return replace(schema, **{key: column for key, column in named.items() if column})


class File(RowOptions):
    path: Path = Field(description="JSONL (.jsonl, .ndjson, .json), a JSON array (.json), .csv or .parquet file")
    test_path: Path | None = Field(None, description="another file for the test split; then holdout is not used")

    def build(self) -> BuiltTask:
        path, other = self.path, self.test_path
        problems = read_problems(read_rows(path), self, str(path), path.stem)
        if other is None:
            return build_task(path.stem, self, problems, None, str(path))
        # Files of one name in two folders: an id names one problem.
        name = other.stem if other.stem != path.stem else f"{other.stem}-test"
        held_out = read_problems(read_rows(other), self, str(other), name)
        return build_task(other.stem, self, problems, held_out, str(path))


class HuggingFace(RowOptions):
    dataset: str = Field(description="hub name, e.g. openai/gsm8k, or a local folder")
    config: str | None = Field(None, description="its configuration, e.g. main")
    split: str = Field("train", description="the split that is trained on")
    test_split: str | None = Field(None, description="another split for testing; then holdout is not used")
    files: str | None = Field(
        None, description="one file of the data set, or a pattern, e.g. train/math__*.parquet; they are the split train"
    )

    def build(self) -> BuiltTask:
        held_out = None if self.test_split is None else self._problems(self.test_split)
        problems = self._problems(self.split)
        name = self.dataset.rstrip("/").rpartition("/")[2]
        return build_task(name, self, problems, held_out, f"dataset {self.dataset!r}")

    def _problems(self, split: str) -> list[Problem]:
        import datasets

        where = f"dataset {self.dataset!r}, split {split!r}"
        try:
            rows: Any = datasets.load_dataset(self.dataset, self.config, split=split, data_files=self.files)
        except Exception as error:  # network, missing names, damaged files: each library raises different classes
            raise TrimtabError(
                f"{where}: cannot load it: {first_line(error)}; check the names, or the network and HF_HUB_OFFLINE"
            ) from None
        return read_problems(enumerate(rows, start=1), self, where, split)


def read_rows(path: Path) -> Iterator[Row]:
    """Yields numbered rows (from 1; for JSONL the line number). Raises `TrimtabError` that names file and row."""
    if path.is_dir():
        raise TrimtabError(f"{path} is a folder; give a file in it, or task 'hf' with dataset = {str(path)!r}")
    if path.suffix not in _READERS:
        raise TrimtabError(f"{path}: unknown kind of file; give a .jsonl, .json, .csv or .parquet file")
    number = 0
    try:
        for number, row in enumerate(_READERS[path.suffix](path), start=1):
            if row is None:
                continue
            if not isinstance(row, dict):
                raise TrimtabError(
                    f"{path}, row {number}: a JSON {type(row).__name__}, not an object; write one {{...}} with named "
                    "columns a row"
                )
            yield number, row
    except TrimtabError:
        raise
    except OSError as error:  # pyarrow also raises it for damaged pages
        raise TrimtabError(f"cannot read {path}: {error.strerror or error}; check the file") from None
    except UnicodeDecodeError:
        raise TrimtabError(f"{path}: not UTF-8 text after row {number}; save it as UTF-8") from None
    except (pa.ArrowException, csv.Error, ValueError, RecursionError) as error:
        raise TrimtabError(
            f"{path} cannot be read from row {number + 1} on ({first_line(error)}): mend or remove it"
        ) from None


def _read_csv(path: Path) -> Iterator[Any]:
    """Yields the rows below the header, None for an empty line. Cells are text; an empty cell is None."""
    with regular_file(path).open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise TrimtabError(f"{path} has two columns of one name: rename one")
        for cells in reader:
            if cells and len(cells) != len(header):
                raise csv.Error(f"{len(cells)} cells below a header of {len(header)}; quote commas in text")
            yield {name: text or None for name, text in zip(header, cells, strict=True)} if cells else None


def _read_json(path: Path) -> Iterator[Any]:
    """Yields the lines of JSONL (None for an empty line), or the elements of a .json file with one array."""
    with regular_file(path).open(encoding="utf-8-sig") as lines:
        is_array = path.suffix == ".json" and lines.read(1024).lstrip().startswith("[")
        lines.seek(0)
        if is_array:
            yield from json.load(lines)
        else:
            yield from (json.loads(line) if line.strip() else None for line in lines)


def _read_parquet(path: Path) -> Iterator[Any]:
    with open_parquet(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


_READERS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _read_json),
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def read_problems(rows: Iterable[Row], options: RowOptions, where: str, prefix: str) -> list[Problem]:
    """Returns one problem for each row. Raises `TrimtabError` that names file and row; no row is skipped."""
    columns = options.columns
    problems: list[Problem] = []
    seen: dict[str, int] = {}
    for number, row in rows:
        location = f"{where}, row {number}"
        question = _read_question(row, columns.question, location)
        stored = _read_column(row, columns.answer, "answer", location)
        try:
            answer = extract(stored, columns.answer_format, options.answer_pattern)
        except ValueError as error:
            raise TrimtabError(f"{location}, column {columns.answer!r}: {error}") from None
        name = f"{prefix}-{number}" if columns.id is None else str(_read_column(row, columns.id, "id", location))
        if name in seen:
            raise TrimtabError(
                f"{location}: id {name!r} is also that of row {seen[name]}; use another id column, or none"
            )
        seen[name] = number
        extra = {
            column: _require_json(_read_column(row, column, "extra", location), column, location)
            for column in options.extra
        }
        problems.append(Problem(id=name, question=question, answer=answer, extra=extra))
    if not problems:
        raise TrimtabError(f"{where}: no rows; give a file with at least one problem")
    return problems


def build_task(
    name: str, options: RowOptions, problems: Sequence[Problem], held_out: Sequence[Problem] | None, where: str
) -> BuiltTask:
    """Returns a task over `problems`; `held_out` is the test split if it has a separate source."""
    train, test = _split_rows(problems, held_out, options, where)
    given, notes = len(train), []
    if options.drop_duplicates and len(train := _drop_repeated(train, test)) < given:
        notes.append(f"{where}: {len(train):,} of {given:,} training rows are kept, the others repeat a question")
    worked = options.columns.worked
    options, note = _choose_style(options, worked, train, where)
    shots, train = split_shots(options, worked, train, where)
    template = build_template(options, shots, BOXED)
    stop, max_tokens = limits(options, template, shots, [problem.answer for problem in (*train, *test)], where)
    return BuiltTask(
        name=name,
        train=train,
        test=test,
        template=template,
        rewards=(_choose_reward(options, template),),
        stop=stop,
        max_tokens=max_tokens,
        notes=(*notes, *note),
    )


def _choose_style(
    options: RowOptions, worked: Sequence[Problem], train: Sequence[Problem], where: str
) -> tuple[RowOptions, tuple[str, ...]]:
    """Returns the options and notes about them.

    If no training row is left for an example, and the user chose no style, few-shot prompts become chat prompts.
    """
    if train or options.model_fields_set & {"style", "template", "examples"}:
        return options, ()
    reason = f"{where}: every row is a test row and none is left for worked examples"
    rows = "to show rows name a training file (path=TRAIN,test_path=TEST; of a data set, test_split)"
    if worked:
        return options, (f"{reason}: those of the format are shown; {rows}, for a chat set style=chat",)
    return options.model_copy(update={"style": "chat"}), (f"{reason}: asked in a chat; {rows}, or set examples=0",)


def _choose_reward(options: RowOptions, template: Template) -> RewardSpec:
    form = options.columns.answer_format
    if isinstance(template, Chat) and template.answer == BOXED.answer:
        return RewardSpec("math")
    if form == "boxed":
        return RewardSpec("math", options={"where": "whole"})
    return RewardSpec("exact" if form == "text" else "numeric")


def _read_question(row: Mapping[str, Any], source: str, location: str) -> str:
    """Returns the text of the column `source`, or, if `source` is a template, the text with all columns filled in."""
    texts: dict[str, str] = {}
    for name in COLUMN.findall(source) or [source]:
        text = _read_column(row, name, "question", location)
        if not isinstance(text, str) or not text.strip():
            raise TrimtabError(f"{location}: column {name!r} has no question text; fill it in or remove the row")
        texts[name] = text.strip()
    return texts[source] if source in texts else COLUMN.sub(lambda match: texts[match[1]], source).strip()


def _read_column(row: Mapping[str, Any], column: str, option: str, location: str) -> Any:
    """Returns the value of a column. `a.0.b` is `b` in the first entry of `a`, unless a column is named `a.0.b`."""
    if column in row:
        return row[column]
    value, path = row, ""
    for word in column.split("."):
        if isinstance(value, list | tuple):
            value = {str(position): entry for position, entry in enumerate(value)}
        inside = value if isinstance(value, Mapping) else {}
        if word not in inside:
            known = [path + name for name in inside] or row
            raise TrimtabError(
                f'{location}: no column {column!r}{did_you_mean(column, known)}; set {option} = "<column>" to name it'
            )
        value, path = inside[word], f"{path}{word}."
    return value


def _require_json(value: Any, column: str, location: str) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise TrimtabError(
            f"{location}: column {column!r} holds a {type(value).__name__}; extra columns reach rewards as JSON: "
            "store text, numbers, lists or objects"
        ) from None
    return value


def _split_rows(
    problems: Sequence[Problem], held_out: Sequence[Problem] | None, options: RowOptions, where: str
) -> tuple[list[Problem], list[Problem]]:
    """Returns the training and the test problems. Rows with equal questions are in the same split."""
    if held_out is None:
        questions = list(dict.fromkeys(problem.question for problem in problems))
        random.Random(f"split/{options.seed}").shuffle(questions)
        tested = frozenset(questions[: round(options.holdout * len(questions))])
        test = [problem for problem in problems if problem.question in tested]
    else:
        test, tested = list(held_out), frozenset(problem.question for problem in held_out)
    train = [problem for problem in problems if problem.question not in tested]
    if held_out is not None and (repeated := len(problems) - len(train)):
        warnings.warn(
            f"{where}: {repeated} training rows are also in the test split and are left out of training",
            TrimtabWarning,
            stacklevel=4,
        )
    return train, test


def _drop_repeated(train: Sequence[Problem], test: Sequence[Problem]) -> list[Problem]:
    """Returns the first training row of each question that is in no test row, ignoring case and spaces."""
    by_question = {" ".join(problem.question.casefold().split()): problem for problem in reversed([*test, *train])}
    kept = {id(problem) for problem in by_question.values()}
    return [problem for problem in train if id(problem) in kept]
