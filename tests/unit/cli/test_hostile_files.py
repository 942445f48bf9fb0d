"""Pipes, loops of links and deep nesting in what a user names: each command ends with one line."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.commands import Printed

from trimtab.cli import main
from trimtab.errors import TrimtabError
from trimtab.trainer.config import load_config

DEEP = "[" * 100_000 + "]" * 100_000
STEP = '{"step": 1}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with links to themselves, pipes, and files nested 10^5 deep."""
    path, before = tmp_path_factory.mktemp("hostile"), Path.cwd()
    os.chdir(path)
    os.symlink("loop", "loop")
    for suffix in ("", ".toml", ".jsonl", ".parquet", ".csv"):
        os.mkfifo(f"pipe{suffix}")
        os.symlink(f"link{suffix}", f"link{suffix}")
    Path("deep.toml").write_text(f"a = {DEEP}")
    Path("tables.toml").write_text("a = " + "{a = " * 100_000 + "1" + "}" * 100_000)
    for number in range(600):
        Path(f"chain{number}.toml").write_text(f'base = "chain{number + 1}.toml"\n')
    Path("on-pipe.toml").write_text('base = "pipe.toml"\n')
    Path("on-loop.toml").write_text('base = "link.toml"\n')
    yield path
    os.chdir(before)


@pytest.fixture(autouse=True)
def no_wait() -> Iterator[None]:
    """Ends a test that waits for the other end of a pipe."""

    def stop(*_: object) -> None:
        raise AssertionError("the command waits")

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


def run_folder(path: Path, **files: str | None) -> None:
    """Makes a run folder at `path` of files by the stem of their names; None makes a pipe."""
    paths = {"config": "config.toml", "metrics": "metrics.jsonl", "provenance": "provenance.json"}
    path.mkdir()
    for stem, content in {"config": "seed = 0\n", "metrics": STEP, **files}.items():
        if content is None:
            os.mkfifo(path / paths[stem])
        else:
            (path / paths[stem]).write_text(content)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("diagnose pipe", "cannot read pipe: it is not a regular file"),
        ("diagnose pipe.jsonl", "cannot read pipe.jsonl: it is not a regular file"),
        ("diagnose pipe.parquet", "cannot read pipe.parquet: it is not a regular file"),
        ("diagnose loop", "cannot read loop: Too many levels of symbolic links"),
        ("show pipe.toml", "cannot read recipe pipe.toml: it is not a regular file"),
        ("show link.toml", "cannot read recipe link.toml: Too many levels of symbolic links"),
        ("show loop/x.toml", "cannot read recipe loop/x.toml: Too many levels of symbolic links"),
        ("show on-pipe.toml", "cannot read recipe pipe.toml: it is not a regular file"),
        ("show on-loop.toml", "cannot read recipe link.toml: Too many levels of symbolic links"),
        ("show quickstart --set base=link.toml", "cannot read recipe link.toml: Too many levels"),
        ("show deep.toml", "deep.toml: not valid TOML: values are nested too deeply"),
        ("show tables.toml", "tables.toml: not valid TOML: values are nested too deeply"),
        ("show chain0.toml", "chain0.toml: its values, or the recipes it is based on, are nested too deeply"),
        ("eval laboratory --task file:path=pipe.jsonl,holdout=1", "cannot read pipe.jsonl: it is not a regular file"),
        ("eval laboratory --task file:path=pipe.parquet,holdout=1", "cannot read pipe.parquet: it is not a regular"),
    ],
)
def test_a_named_file_that_cannot_be_read_is_one_line(
    folder: Path, command: str, message: str, printed: Printed
) -> None:
    error = printed(*command.split(), code=2)
    assert message in error.replace(f"{folder}/", "")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"metrics": None}, "run/metrics.jsonl: it is not a regular file"),
        ({"provenance": None}, "run/provenance.json is damaged (.*it is not a regular file"),
        ({"config": f"a = {DEEP}"}, "run/config.toml is damaged (values are nested too deeply)"),
        ({"provenance": DEEP}, "run/provenance.json is damaged (values are nested too deeply)"),
    ],
)
def test_a_run_with_such_a_file_is_one_line(
    tmp_path: Path, files: dict[str, str | None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder(tmp_path / "run", **files)
    assert main.run(["report", str(tmp_path / "run")]) == 2
    start, _, end = message.partition(".*")
    error = capsys.readouterr().err
    assert f"{tmp_path}/{start}" in error
    assert end in error


def test_a_mapping_nested_too_deeply_is_one_line() -> None:
    value: dict = {}
    for _ in range(100_000):
        value = {"a": value}
    with pytest.raises(TrimtabError, match="config: its values, or the recipes it is based on, are nested too deeply"):
        load_config({"task": value})
    while value:  # freed level by level: the interpreter would recurse
        value = value.pop("a", {})
