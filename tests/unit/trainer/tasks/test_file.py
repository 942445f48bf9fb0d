"""Files as tasks: small files written here, every kind of damage, and the real benchmark rows where they exist."""

import csv
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trimtab.errors import TrimtabError, TrimtabWarning
from trimtab.trainer import tasks

ROWS = [{"question": f"How much is {i} + {i}?", "answer": str(2 * i)} for i in range(20)]


def jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture
def file(tmp_path):
    return jsonl(tmp_path / "sums.jsonl", ROWS)


def test_a_plain_file(file):
    task = tasks.build("file", path=file, holdout=0.25, examples=2)
    assert (task.name, len(task.train), len(task.test), task.stop) == ("sums", 13, 5, ("\n",))
    ids = {problem.id for problem in [*task.train, *task.test]}
    assert len(ids) == 18
    prompt = task.prompt_text(task.test[0], None)
    assert prompt.count("Question: ") == 3
    assert prompt.endswith(f"Question: {task.test[0].question}\nAnswer:")
    for problem in [*task.train, *task.test]:
        assert f"sums-{int(problem.answer) // 2 + 1}" == problem.id
        assert problem.question not in prompt or problem is task.test[0]


def test_columns_ids_and_extras(tmp_path):
    rows = [{"q": "two?", "a": 2.0, "key": 7, "tests": ["x"]}, {"q": "three?", "a": 3.0, "key": 8, "tests": []}]
    task = tasks.build(
        "file",
        path=jsonl(tmp_path / "rows.jsonl", rows),
        question="q", answer="a", id="key", answer_format="number", extra=["tests"], holdout=1, examples=0,
    )  # fmt: skip
    assert [(p.id, p.question, p.answer, p.extra) for p in task.test] == [
        ("7", "two?", "2", {"tests": ["x"]}),
        ("8", "three?", "3", {"tests": []}),
    ]
    assert list(task.train) == []
    assert [spec.name for spec in task.rewards] == ["numeric"]


def test_jsonl_parquet_and_csv_give_the_same_task(file, tmp_path):
    rows = [*ROWS, {"question": 'Say "two, three"\nand stop.', "answer": "007"}]
    jsonl(file, rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "sums.parquet")
    with (tmp_path / "sums.csv").open("w", newline="", encoding="utf-8-sig") as out:
        writer = csv.DictWriter(out, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    one, *others = (tasks.build("file", path=tmp_path / f"sums.{kind}") for kind in ("jsonl", "parquet", "csv"))
    assert all((list(one.train), list(one.test)) == (list(other.train), list(other.test)) for other in others)


def test_a_data_set_folder_gives_the_same_task(file, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "folder" / "train.parquet")
    one = tasks.build("file", path=file)
    two = tasks.build("hf", dataset=str(tmp_path / "folder"))
    assert [p.question for p in one.train] == [p.question for p in two.train]
    with pytest.raises(TrimtabError, match=r"split 'nope': cannot load it: .*nope"):
        tasks.build("hf", dataset=str(tmp_path / "folder"), split="nope")


def test_repeated_questions_stay_on_one_side(tmp_path):
    path = jsonl(tmp_path / "twice.jsonl", ROWS * 3)
    task = tasks.build("file", path=path, style="plain", holdout=0.5)
    assert len(task.train) == len(task.test) == 30
    assert not {p.question for p in task.train} & {p.question for p in task.test}


def test_training_rows_that_repeat_a_question_can_be_dropped(tmp_path):
    questions = ["two plus two", "three  plus one", "Two Plus two", "five plus one", "six plus one"]
    rows = jsonl(tmp_path / "rows.jsonl", [{"question": text, "answer": "4"} for text in questions])
    test = jsonl(tmp_path / "test.jsonl", [{"question": "FIVE plus  one", "answer": "6"}])
    options = {"path": rows, "style": "chat"}
    task = tasks.build("file", holdout=0, drop_duplicates=True, **options)
    assert [problem.id for problem in task.train] == ["rows-1", "rows-2", "rows-4", "rows-5"]
    assert task.notes == (f"{rows}: 4 of 5 training rows are kept, the others repeat a question",)
    assert len(tasks.build("file", test_path=test, **options).train) == 5
    task = tasks.build("file", test_path=test, drop_duplicates=True, **options)
    assert [problem.id for problem in task.train] == ["rows-1", "rows-2", "rows-5"]
    assert len(tasks.build("file", holdout=1, drop_duplicates=True, **options).test) == 5


def test_a_test_file_wins_over_the_training_file(file, tmp_path):
    test = jsonl(tmp_path / "test.jsonl", ROWS[:3])
    with pytest.warns(TrimtabWarning, match="3 training rows are also in the test split"):
        task = tasks.build("file", path=file, test_path=test, style="plain")
    assert (len(task.train), [p.id for p in task.test]) == (17, ["test-1", "test-2", "test-3"])
    (tmp_path / "other").mkdir()
    same_name = jsonl(tmp_path / "other" / file.name, [{"question": "9 and 9", "answer": "18"}])
    task = tasks.build("file", path=file, test_path=same_name, style="plain")
    assert not {problem.id for problem in task.train} & {problem.id for problem in task.test}


def test_line_separators_inside_a_question_are_no_row_breaks(tmp_path):
    path = tmp_path / "u.jsonl"
    path.write_text('\ufeff{"question": "a\u2028b\x85c", "answer": "1"}\n\n{"question": "d", "answer": "2"}', "utf-8")
    task = tasks.build("file", path=path, style="plain", holdout=1)
    assert [(p.id, p.question) for p in task.test] == [("u-1", "a\u2028b\x85c"), ("u-3", "d")]


@pytest.mark.parametrize(
    ("style", "template", "reward", "gold"),
    [
        ("chat", None, "math", "\\boxed{4}"),
        ("chat", "{question} Only the number.", "numeric", "4"),
        ("chat", "{question} Use \\boxed{}.", "math", "\\boxed{4}"),
        ("plain", None, "numeric", "4"),
        ("few-shot", "Q: {question} A: {answer};", "numeric", " 4;"),
    ],
)
def test_the_reward_follows_what_the_prompt_asks_for(tmp_path, style, template, reward, gold):
    path = jsonl(tmp_path / "r.jsonl", [{"question": f"q{i}", "answer": 4} for i in range(9)])
    task = tasks.build("file", path=path, style=style, template=template, answer_format="number", holdout=0.2)
    assert [spec.name for spec in task.rewards] == [reward]
    assert task.gold(task.test[0]) == gold


GOOD = '{"question": "a?", "answer": "1"}\n'
FEW = {"style": "few-shot"}
PARTS = {"question": "{Body} {Question}", "answer_pattern": "^([0-9]+)"}
WHOLE = '{"Body": "b", "Question": "q", "answer": "9 (apples)"}\n'
DAMAGE = {
    "broken JSON": (GOOD + '{"question": "b?", "ans', {}, "from row 2 on (Unterminated string"),
    "no answer": (GOOD + '{"question": "b", "answer": null}\n', {}, "row 2, column 'answer': there is no answer"),
    "no question": (GOOD + '{"question": "", "answer": "1"}\n', {}, "row 2: column 'question' has no question text"),
    "column gone": (GOOD + '{"question": "b", "answr": "1"}\n', {}, "row 2: no column 'answer' (did you mean 'answr"),
    "wrong column": (GOOD, {"question": "qestion"}, "row 1: no column 'qestion' (did you mean 'question'?)"),
    "not a number": (GOOD + '{"question": "b", "answer": "x"}', {"answer_format": "number"}, "row 2, column 'answer'"),
    "same id": (GOOD + GOOD, {"id": "answer"}, "row 2: id '1' is also that of row 1"),
    "empty": ("\n\n", {}, "no rows"),
    "too few": (GOOD, {**FEW, "examples": 4, "holdout": 0}, "4 worked examples are wanted but the training split"),
    "ends early": ('{"question": "b", "answer": "1\\n2"}', {**FEW, "examples": 0}, "contains the stop string '\\n'"),
    "system turn": (GOOD, {"style": "plain", "system": "Hi"}, "only style = 'chat' has a system turn"),
    "array of numbers": (f"[{GOOD}, 7]", {}, "row 2: a JSON int, not an object"),
    "broken array": ('[{"question": "a"},\n{"question": ]', {}, "from row 1 on (Expecting value: line 2 column 14"),
    "array without answer": (f'[{GOOD}, {{"question": "b"}}]', {}, "row 2: no column 'answer'"),
    "part gone": (WHOLE + WHOLE.replace("Body", "Bdy"), PARTS, "row 2: no column 'Body' (did you mean 'Bdy'"),
    "part empty": (WHOLE + WHOLE.replace('"b"', '" "'), PARTS, "row 2: column 'Body' has no question text"),
    "part null": (WHOLE.replace('"q"', "null"), PARTS, "row 1: column 'Question' has no question text"),
    "no match": (WHOLE + WHOLE.replace("9 ", ""), PARTS, "row 2, column 'answer': answer_pattern '^([0-9]+)' finds no"),
    "empty group": (WHOLE, {**PARTS, "answer_pattern": "9(x?)"}, "row 1, column 'answer': answer_pattern"),
    "group left out": (WHOLE, {**PARTS, "answer_pattern": "9|(x)"}, "row 1, column 'answer': answer_pattern"),
    "text in group": (WHOLE, {**PARTS, "answer_pattern": r"\((\w+)", "answer_format": "number"}, "row 1, column"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_line_that_names_file_and_row(tmp_path, damage):
    text, options, words = DAMAGE[damage]
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(TrimtabError) as error:
        tasks.build("file", path=path, **{"style": "plain", "holdout": 1, **options})
    message = str(error.value)
    assert words in message
    assert "\n" not in message
    assert "bad.json" in message or damage == "system turn"


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "latin.jsonl").write_bytes(GOOD.encode() + '{"question": "caf\xe9"}'.encode("latin-1"))
    (tmp_path / "table.tsv").write_text("question,answer")
    (tmp_path / "latin.csv").write_bytes(b"question,answer\na,b\n" + "caf\xe9,c".encode("latin-1"))
    (tmp_path / "comma.csv").write_text("question,answer\na,b\n\n\nhow much, then,3")
    (tmp_path / "quote.csv").write_text('question,answer\n"a" b,c')
    (tmp_path / "twice.csv").write_text("answer,answer\na,b")
    for name, words in {
        "absent.jsonl": "cannot read",
        "absent.parquet": "cannot read",
        "bad.parquet": "cannot be read from row 1 on",
        "latin.jsonl": "not UTF-8",
        "table.tsv": "unknown kind of file; give a .jsonl, .json, .csv or .parquet file",
        "absent.csv": "cannot read",
        "latin.csv": "not UTF-8 text",
        "comma.csv": r"from row 4 on .3 cells below a header of 2; quote commas in text",
        "quote.csv": "from row 1 on .*: mend",
        "twice.csv": "two columns of one name",
    }.items():
        with pytest.raises(TrimtabError, match=words) as error:
            tasks.build("file", path=tmp_path / name)
        assert name in str(error.value)


def test_extra_columns_must_be_json(tmp_path):
    pq.write_table(pa.table({"question": ["a"], "answer": ["b"], "blob": [b"\x00"]}), tmp_path / "x.parquet")
    with pytest.raises(TrimtabError, match="column 'blob' holds a bytes"):
        tasks.build("file", path=tmp_path / "x.parquet", extra=["blob"])


def test_a_format_may_bring_worked_examples_that_show_the_sum(tmp_path):
    path = jsonl(tmp_path / "m.jsonl", [{"input": "How many?", "target": 14.0}])
    task = tasks.build("file", path=path, format="mawps", holdout=1)
    prompt = task.prompt_text(task.test[0], None)
    for sum_ in ("3 + 4 = 7", "9 - 5 = 4", "3 * 6 = 18", "12 / 4 = 3"):
        left, right = sum_.split(" = ")
        assert eval(left) == int(right)  # noqa: S307
        assert f"\nAnswer: {sum_}\n\n" in prompt
    assert task.max_tokens == len("3 * 6 = 18") + len("14") + 8
    with pytest.raises(TrimtabError, match="examples = 5, but this format brings 4"):
        tasks.build("file", path=path, format="mawps", holdout=1, examples=5)


NESTED = [
    {"prompt": [{"role": "user", "content": f"{n} + 1"}], "reward_model": {"ground_truth": str(n + 1)}}
    for n in range(20)
]


def test_a_column_inside_another_is_named_with_points(tmp_path):
    path = jsonl(tmp_path / "nested.jsonl", NESTED)
    options = {"path": path, "style": "chat", "answer": "reward_model.ground_truth"}
    task = tasks.build("file", question="prompt.0.content", holdout=0.0, **options)
    assert (task.train[3].question, task.train[3].answer) == ("3 + 1", "4")
    joined = tasks.build("file", question="Compute {prompt.0.content}.", holdout=0.0, **options)
    assert joined.train[3].question == "Compute 3 + 1."
    # A column whose own name has a point.
    path = jsonl(tmp_path / "flat.jsonl", [{"a.b": "1 + 1", "a": {"b": "no"}, "answer": "2"}])
    assert tasks.build("file", path=path, question="a.b", holdout=1.0).test[0].question == "1 + 1"


@pytest.mark.parametrize(
    "question", ["prompt.1.content", "prompt.-1.content", "prompt.0.text", "prompt.content", "x.0"]
)
def test_a_column_that_is_not_inside_another_is_refused(tmp_path, question):
    path = jsonl(tmp_path / "nested.jsonl", NESTED)
    with pytest.raises(TrimtabError, match=rf"nested.jsonl, row 1: no column {question!r} .*set question = "):
        tasks.build("file", path=path, question=question, answer="reward_model.ground_truth")


def test_one_file_of_a_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "folder" / "train").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "folder" / "train" / "math__20.parquet")
    pq.write_table(pa.Table.from_pylist([{"code": 1}]), tmp_path / "folder" / "train" / "code__1.parquet")
    task = tasks.build("hf", dataset=str(tmp_path / "folder"), files="train/math__*.parquet")
    assert len(task.train) + len(task.test) + 4 == len(ROWS)
    with pytest.raises(TrimtabError, match="cannot load it"):
        tasks.build("hf", dataset=str(tmp_path / "folder"), files="train/other.parquet")
    with pytest.raises(TrimtabError, match="split 'test': cannot load it"):
        tasks.build("hf", dataset=str(tmp_path / "folder"), files="train/*.parquet", test_split="test")
