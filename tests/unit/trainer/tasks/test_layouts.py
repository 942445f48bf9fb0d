"""Files as they are published: questions in several columns, answers with a unit, a JSON array, test rows alone.

The table of docs/reference-tasks.md is read here and every row of it tried on rows in the layout of each data set.
"""

import json
import re
from pathlib import Path

import pytest
from tests.unit.trainer.tasks.test_file import jsonl

from trimtab.cli import evaluate
from trimtab.errors import TrimtabError
from trimtab.trainer import tasks
from trimtab.trainer.config import load_config

TABLE = (Path(__file__).parents[4] / "docs" / "reference-tasks.md").read_text().partition("## Published files")[2]

# Rows of each layout, and what they must become. SVAMP and ASDiv are written after the published ones.
ROWS = {
    "GSM8K": [
        {"question": "How many eggs?", "answer": "She sells 16 - 7 = <<16-7=9>>9 eggs.\n#### 9"},
        {"question": "How many robes?", "answer": "2\n#### 2,125"},
    ],
    "SVAMP": [
        {"ID": "chal-1", "Body": "A pack costs 76 dollars", "Question": "How much is one?", "Answer": 51.0},
        {"ID": "chal-2", "Body": "Dan had $ 3.", "Question": "What was left?", "Answer": 0.5},
    ],
    "ASDiv": [
        {"body": "Seven red apples.", "question": "How many apples?", "answer": "9 (apples)"},
        {"body": "Two runners, one finish.", "question": "Who won?", "answer": "Mrs. Hilt"},
    ],
    "MAWPS": [{"input": "Joan found 70 shells.", "target": 43.0}],
    "MATH": [
        {"problem": "What is $1/2$ of 3?", "solution": "It is $\\boxed{\\frac{3}{2}}$.", "level": "Level 1"},
        {"problem": "What is 2+2?", "solution": "First \\boxed{5}, no: \\boxed{4}.", "level": "Level 1"},
    ],
    "AIME": [{"id": 60, "problem": "How many minutes?", "answer": "025"}, {"id": 61, "problem": "b?", "answer": "204"}],
    "AMC": [{"id": 0, "problem": "How many miles?", "answer": 27.0}, {"id": 1, "problem": "x + y?", "answer": 36.0}],
    "Minerva": [{"idx": 0, "problem": "How hot?", "solution": "\\boxed{4.5e33} K"}],
}
FOUND = {
    "GSM8K": [("rows-1", "How many eggs?", "9"), ("rows-2", "How many robes?", "2125")],
    "SVAMP": [
        ("chal-1", "A pack costs 76 dollars How much is one?", "51"),
        ("chal-2", "Dan had $ 3. What was left?", "0.5"),
    ],
    "ASDiv": [
        ("rows-1", "Seven red apples. How many apples?", "9"),
        ("rows-2", "Two runners, one finish. Who won?", "Mrs. Hilt"),
    ],
    "MAWPS": [("rows-1", "Joan found 70 shells.", "43")],
    "MATH": [("rows-1", "What is $1/2$ of 3?", "\\frac{3}{2}"), ("rows-2", "What is 2+2?", "4")],
    "AIME": [("60", "How many minutes?", "25"), ("61", "b?", "204")],
    "AMC": [("0", "How many miles?", "27"), ("1", "x + y?", "36")],
    "Minerva": [("0", "How hot?", "4.5e33")],
}


def table() -> dict[str, str]:
    """Data set -> its options as the table writes them on the command line."""
    rows = re.findall(r"^\| (\w+) \|.*\| `([^`]+)` \|", TABLE, re.MULTILINE)
    return {name: options.replace("\\|", "|") for name, options in rows}


def test_the_table_is_complete() -> None:
    assert list(table()) == list(ROWS) == list(FOUND)


def on_the_command_line(options: str, path: Path) -> tasks.Task:
    """As `trimtab eval --task file:path=...,OPTIONS` builds it."""
    [spec] = evaluate.choose_tasks([f"file:path={path},holdout=1,{options}"], [], [])
    return tasks.build(spec.name, **spec.options)


def in_a_recipe(options: str, path: Path) -> tasks.Task:
    """The same options as keys of `[task]` in a TOML recipe."""
    recipe = path.with_suffix(".toml")
    keys = [f"{key} = {value if value[0] in SINGLE else repr(value)}" for key, value in split(options)]
    lines = ["[task]", 'name = "file"', f"path = {str(path)!r}", "holdout = 1", *keys]
    recipe.write_text("\n".join(lines))
    config = load_config(recipe)
    return tasks.build(config.task.name, **config.task.keywords)


SINGLE = "'\""


def split(options: str) -> list[tuple[str, str]]:
    return re.findall(r"(\w+)=('[^']*'|[^,]*)", options)


@pytest.mark.parametrize("build", [on_the_command_line, in_a_recipe])
@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_the_table(build, name: str, tmp_path: Path) -> None:
    task = build(table()[name], jsonl(tmp_path / "rows.jsonl", ROWS[name]))
    assert [(p.id, p.question, p.answer) for p in task.test] == FOUND[name]


def test_an_array_is_read_as_its_rows_are(tmp_path: Path) -> None:
    """SVAMP is published as one array over many lines."""
    (tmp_path / "rows.json").write_text("\ufeff\n" + json.dumps(ROWS["SVAMP"], indent=4), "utf-8")
    task = on_the_command_line(table()["SVAMP"], tmp_path / "rows.json")
    assert [(p.id, p.question, p.answer) for p in task.test] == FOUND["SVAMP"]
    lines = jsonl(tmp_path / "lines.json", ROWS["SVAMP"])
    assert [p.question for p in on_the_command_line(table()["SVAMP"], lines).test] == [f[1] for f in FOUND["SVAMP"]]


ROW = {"Body": "b", "Question": "q", "answer": "9 (apples)", "{x}": "no"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"answer_pattern": "(9"}, "answer_pattern: not a regular expression"),
        ({"answer_pattern": "9"}, "answer_pattern: write one group (...) around the answer, not 0"),
        ({"answer_pattern": "(9)(8)"}, "not 2; others are written (?:...)"),
        ({"answer_pattern": "\b(9)"}, "control character"),
        ({"answer_pattern": "(a{4294967296})"}, "answer_pattern: not a regular expression"),
        ({"question": "Body}"}, "question: write a column's name between braces"),
        ({"question": "{}"}, "question: write a column's name between braces"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(TrimtabError) as caught:
        tasks.build("file", path=jsonl(tmp_path / "rows.jsonl", [ROW]), **options)
    assert words in str(caught.value)


def test_only_the_first_match_counts_and_other_groups_are_allowed(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"question": "q", "answer": "x 3 y 4"}])
    task = tasks.build("file", path=path, answer_pattern="(?:x|y) ([0-9])", answer_format="number", holdout=1)
    assert (task.test[0].answer, [spec.name for spec in task.rewards]) == ("3", ["math"])


def test_a_column_is_inserted_once_and_never_read_as_a_template(tmp_path: Path) -> None:
    row = {"a b": "see {c}", "c": "{a b}", "answer": "1"}
    task = tasks.build("file", path=jsonl(tmp_path / "rows.jsonl", [row]), question="{a b} | {c}{c}", holdout=1)
    assert task.test[0].question == "see {c} | {a b}{a b}"


def test_test_rows_alone_use_a_chat_prompt_and_a_message_says_so(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS["AIME"])
    task = tasks.build("file", path=path, format="aime", holdout=1)
    assert (task.prompt_style, [spec.name for spec in task.rewards], task.stop) == ("chat", ["math"], ())
    [note] = task.notes
    assert str(path) in note
    assert "test_path=TEST" in note


@pytest.mark.parametrize(
    ("options", "style"),
    [
        ({"examples": 0}, "few-shot, 0 examples"),
        ({"style": "plain"}, "plain"),
        ({"style": "chat"}, "chat"),
        ({"template": "Q {question} A {answer};", "examples": 0}, "few-shot, 0 examples"),
        ({"format": "mawps", "style": "few-shot"}, "few-shot, 4 examples"),
        ({"format": "mawps", "examples": 2}, "few-shot, 2 examples"),
        ({"holdout": 0.2}, "few-shot, 4 examples"),
    ],
)
def test_explicit_options_are_used_without_a_note(options: dict[str, object], style: str, tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": f"#### {i}", "input": f"i{i}", "target": i} for i in range(9)]
    task = tasks.build("file", path=jsonl(tmp_path / "rows.jsonl", rows), **{"holdout": 1, **options})
    assert (task.prompt_style, list(task.notes)) == (style, [])


def test_worked_examples_come_from_a_training_file(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "train.jsonl", [{"question": f"t{i}", "answer": f"#### {i}"} for i in range(5)])
    test = jsonl(tmp_path / "test.jsonl", ROWS["GSM8K"])
    task = tasks.build("file", path=train, test_path=test, format="gsm8k")
    assert (task.prompt_style, len(task.test), list(task.notes)) == ("few-shot, 4 examples", 2, [])
    examples = re.findall(r"Question: (\w+)\nAnswer: (\d)\n", task.prompt_text(task.test[0], None))
    assert len(examples) == 4
    assert {f"t{answer}" for _, answer in examples} == {question for question, _ in examples}
    assert task.name == "test", "what is measured is the test file"
