"""How `trimtab eval` reads its arguments. Real evaluations are in tests/e2e/test_cli_train.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.commands import Printed

from trimtab.cli import evaluate
from trimtab.errors import TrimtabError
from trimtab.trainer.evaluation import TaskSpec
from trimtab.types import RewardSpec


def specs(*named: str, sets: tuple[str, ...] = ()) -> list[TaskSpec]:
    return evaluate.choose_tasks(named, sets, [])


def write_run(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("file", {}),
        ("file:path=a.jsonl,format=gsm8k,holdout=1", {"path": "a.jsonl", "format": "gsm8k", "holdout": 1}),
        ('file:path=b.jsonl,extra=["x","y"],seed=3', {"path": "b.jsonl", "extra": ["x", "y"], "seed": 3}),
        ("file:path=c.jsonl,template='Q: {question}, A: {answer}'", {
            "path": "c.jsonl", "template": "Q: {question}, A: {answer}",
        }),
        ("reasoning-gym:dataset=chain_sum,config={min_terms=2,max_terms=3}", {
            "dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 3},
        }),
        ("file:path=it's,answer=that's", {"path": "it's", "answer": "that's"}),
        ("file:question={Body} {Question},answer=Answer", {"question": "{Body} {Question}", "answer": "Answer"}),
        ("file:question='{Body}, {Question}',id=ID", {"question": "{Body}, {Question}", "id": "ID"}),
        (r"file:answer_pattern=(\d+),id=ID", {"answer_pattern": r"(\d+)", "id": "ID"}),
        (r"file:answer_pattern='^(.+?) *\(|, \[',id=ID", {"answer_pattern": r"^(.+?) *\(|, \[", "id": "ID"}),
        (r'file:answer_pattern="(\\d+) \"x\",",template="a\nb"', {"answer_pattern": r'(\d+) "x",', "template": "a\nb"}),
    ],
)  # fmt: skip
def test_a_task_carries_its_options(text: str, options: dict[str, object]) -> None:
    assert specs(text) == [TaskSpec(text.partition(":")[0], options)]


def test_several_tasks_and_set_for_a_single_one() -> None:
    assert specs("sort:digits=8", "arithmetic") == [TaskSpec("sort", {"digits": 8}), TaskSpec("arithmetic", {})]
    assert specs("sort:digits=8", sets=("holdout=9",)) == [TaskSpec("sort", {"digits": 8, "holdout": 9})]
    with pytest.raises(TrimtabError, match="--set changes one task"):
        specs("sort", "arithmetic", sets=("digits=3",))


def test_a_recipe_brings_its_rewards_and_limits(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[task]\nname = "sort"\n[engine]\ndtype = "float32"\n[[reward]]\nname = "exact"\nweight = 2.0\n')
    [spec] = specs(f"{recipe}:task.digits=7,sampling.max_tokens=9")
    assert spec == TaskSpec("sort", {"digits": 7}, (RewardSpec("exact", 2.0),), 9)
    assert spec.recipe_dtype == "float32"


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (("srot",), ["'srot'", "'sort'"]),
        (("sort:digits",), ["'digits' is not KEY=VALUE"]),
        (("file:template=Q, A",), ["' A' is not KEY=VALUE", "quotes"]),
        ((r"file:answer_pattern=\[(\d+),id=ID",), ["a bracket in", "has no partner", "single quotes"]),
        ((r"file:answer_pattern=(\d+)\],id=ID",), ["a bracket in", "has no partner"]),
        (("file:template='Q, A,id=ID",), ["the quote '", "has no partner"]),
        ((r'file:answer_pattern="(\d+)",id=ID',), [r'answer_pattern="(\d+)"', "not a TOML string", "single quotes"]),
        (("quickstart:task.digtis=3,taks.name=1",), ["taks", "task"]),
        (("data/test.jsonl",), ["--task file:path=data/test.jsonl,holdout=1"]),
        ((), ["--task is missing", "arithmetic"]),
    ],
)
def test_errors_name_the_wrong_word(named: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(TrimtabError) as caught:
        evaluate.choose_tasks(named, [], [evaluate.find_model("some-model", "last")])
    assert all(word in str(caught.value) for word in words), caught.value


def test_names_of_runs_checkpoints_and_models(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "seed = 0\n")
    assert (evaluate.find_model(f"{run}/", "last").run, evaluate.find_model(str(run), "best").label) == (
        run,
        f"{run} (best)",
    )
    step = evaluate.find_model(f"{run}/checkpoints/step-000010/", "best")
    assert (step.run, step.which, step.label) == (run, "step-000010", f"{run}/checkpoints/step-000010")
    for name in ("laboratory", "HuggingFaceTB/SmolLM2-135M", str(tmp_path)):
        assert evaluate.find_model(name, "best") == evaluate.ModelChoice(name, None, "best")


def test_runs_bring_their_task_and_precision(tmp_path: Path) -> None:
    sort = '[task]\nname = "sort"\n[engine]\ndtype = "{}"\n'
    names = [write_run(tmp_path / name, sort.format(dtype)) for name, dtype in (("a", "float32"), ("b", "float32"))]
    runs = [evaluate.find_model(str(name), "last") for name in names]
    found = evaluate.choose_tasks([], [], runs)
    assert [spec.name for spec in found] == ["sort"]
    assert evaluate.choose_dtype(None, runs, found) == "float32"
    assert evaluate.choose_dtype("bfloat16", runs, found) == "bfloat16"
    named = evaluate.choose_tasks(["arithmetic"], [], runs)
    assert evaluate.choose_dtype(None, runs, named) == "float32", "a run is measured as it samples, whatever the task"
    assert evaluate.choose_dtype(None, [evaluate.find_model("laboratory", "last")], named) == "bfloat16"

    other = evaluate.find_model(str(write_run(tmp_path / "c", '[task]\nname = "arithmetic"\n')), "last")
    with pytest.raises(TrimtabError, match=rf"different tasks, .*environments .*--task {tmp_path}/a/config.toml"):
        evaluate.choose_tasks([], [], [*runs, other])
    with pytest.raises(TrimtabError, match=r"bfloat16 and float32.*--dtype"):
        evaluate.choose_dtype(None, [*runs, other], found)
    with pytest.raises(TrimtabError, match="--task is missing"):
        evaluate.choose_tasks([], [], [*runs, evaluate.find_model("laboratory", "last")])


def test_a_run_that_is_measured_without_its_tools_is_named(tmp_path: Path) -> None:
    tools = '[task]\nname = "swap-sort"\n[environment]\nname = "swap"\n[sampling]\nmax_tokens = 40\n'
    runs = [
        evaluate.find_model(str(write_run(tmp_path / name, text)), "last") for name, text in (("a", tools), ("b", ""))
    ]
    [note] = evaluate.note_missing_tools(runs, evaluate.choose_tasks(["swap-sort"], [], runs))
    assert note.startswith(f"{tmp_path}/a was trained with the tools of environment 'swap'")
    assert note.endswith(f"--task {tmp_path}/a/config.toml measures with them")
    own = f"{tmp_path}/a/config.toml"
    assert evaluate.note_missing_tools(runs, evaluate.choose_tasks([own], [], runs)) == []
    [note] = evaluate.note_missing_tools(runs, evaluate.choose_tasks([own, "sort"], [], runs))
    assert "is measured without them on sort; --task" in note


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["laboratory", "laboratory", "--task", "sort"], "'laboratory' is named twice"),
        (["laboratory", "--task", "sort", "--task", "sort"], "'sort' is named twice"),
        (["laboratory", "--task", "sort", "--samples", "4", "--temperature", "0"], "samples = 4 at temperature 0"),
        (["laboratory", "--task", "sort", "--dtype", "float16"], "'float16'"),
        (["laboratory", "--task", "sort", "--top-p", "0"], "top_p = 0: it must be above 0 and at most 1"),
        (["laboratory", "--task", "sort", "--temperature", "inf"], "temperature = inf: it must be a number"),
        (["laboratory", "--task", "file:pth=x.jsonl"], "unknown option 'pth' (did you mean 'path'"),
        (["laboratory", "--task", "file:path=."], ". is a folder; give a file in it"),
        (["laboratory", "--task", "file:path=few.jsonl,style=plain,holdout=0"], "'few' has no problems to evaluate on"),
    ],
)
def test_tasks_that_cannot_be_measured_are_refused_before_anything_is_loaded(
    words: list[str], named: str, printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.jsonl").write_text('{"question": "a", "answer": "1"}\n')
    assert named in printed("eval", *words, code=2)
