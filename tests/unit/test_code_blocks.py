"""Every code block of the documents runs here, in the test that its table names, or is marked as text.

Commands are parsed, not run; those of README and of four pages run in tests/e2e/test_documented_commands.py.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer
import yaml
from tests.support.peer_modules import NEMO_RL_LOSS, install_module, install_nemo_rl

from trimtab.cli.main import app
from trimtab.errors import TrimtabError
from trimtab.objectives import objective
from trimtab.trainer import evaluation
from trimtab.trainer.config import load_config

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "examples" / "README.md"])
LANGUAGES = {"python", "toml", "json", "yaml", "bash", "text"}
COMMANDS = "tests/e2e/test_documented_commands.py"

# Blocks that another test runs, by page and number.
ELSEWHERE = {
    ("README.md", 0): COMMANDS,
    **{("docs/quickstart.md", index): COMMANDS for index in range(3)},
    **{("docs/ci.md", index): COMMANDS for index in range(2)},
    ("docs/frameworks.md", 0): "tests/e2e/test_trl_subclass.py",
    ("docs/frameworks.md", 1): "tests/unit/adapters/test_verl_records.py",
    ("docs/frameworks.md", 2): "tests/unit/diagnosis/reading/test_frameworks.py",  # the file that it writes
    ("docs/trl.md", 0): "tests/e2e/test_trl_trainer.py",
    **{("docs/reference-adapters.md", index): "tests/e2e/test_adapter_recipes.py" for index in (2, 3, 4)},
}


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def all_blocks(language: str) -> list[tuple[str, int, str]]:
    return [
        (str(path.relative_to(ROOT)), index, code)
        for path in PAGES
        for index, code in enumerate(blocks(path, language))
    ]


def test_every_block_has_a_language() -> None:
    for path in PAGES:
        fences = re.findall(r"^\s*```(\S*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert len(fences) % 2 == 0, path
        assert set(fences[::2]) <= LANGUAGES, f"{path}: mark output as text"


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], dict[str, Any]]]:
    """What each page takes as given, made by a function."""
    monkeypatch.chdir(tmp_path)

    def diagnose() -> dict[str, Any]:
        (tmp_path / "dumps").mkdir()
        make = torch.Generator().manual_seed(0)
        for step in (10, 20):
            sampler = -torch.rand(16, 8, generator=make)
            trainer = sampler + 0.01 * torch.randn(16, 8, generator=make)
            columns = {"rollout_logprobs": sampler.tolist(), "logp_proximal": trainer.tolist(), "step": [step] * 16}
            pq.write_table(pa.table(columns), tmp_path / "dumps" / f"step-{step}.parquet")
        mask, rewards = torch.ones(16, 8, dtype=torch.bool), torch.rand(16, generator=make)
        batches = [(trainer, sampler, mask, rewards, torch.arange(16) // 4, version) for version in range(3)]
        return {"batches": batches, "log": lambda scalars, _step: scalars["mismatch/k3"]}

    def tasks() -> dict[str, Any]:
        row = {"question": "How many?", "answer": "Six dozen.\n#### 72"}
        (tmp_path / "train.jsonl").write_text(
            json.dumps(row) + "\n" + json.dumps(row | {"question": "And now?"}) + "\n"
        )
        signature = inspect.signature(evaluation.compare)

        def compare(*arguments: Any, **keywords: Any) -> SimpleNamespace:
            signature.bind(*arguments, **keywords)
            return SimpleNamespace(as_dict=lambda: {"average": []})

        monkeypatch.setattr(evaluation, "compare", compare)
        return {}

    def build() -> torch.nn.Module:
        return torch.nn.Linear(2, 2)

    data = [SimpleNamespace(loss_fn_inputs={"logprobs": torch.zeros(3), "advantages": torch.ones(3)})]
    client = SimpleNamespace(forward_backward_custom=lambda sent, loss: loss(sent, [torch.zeros(3).requires_grad_()]))
    return {
        "docs/diagnose.md": diagnose,
        "docs/tasks.md": tasks,
        "docs/bitwise.md": lambda: {"torch": torch, "build": build, "reference": build},
        "docs/reference-adapters.md": lambda: {"loss_fn": NEMO_RL_LOSS, "training_client": client, "data": data},
    }


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the adapters patch or import in trainers that are not installed here."""

    install_nemo_rl(monkeypatch)
    registry = SimpleNamespace(register=lambda *_: None)
    install_module(monkeypatch, "skyrl.backends.skyrl_train.utils.ppo_utils", PolicyLossRegistry=registry)


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize(
    "page", sorted({page for page, index, _ in all_blocks("python") if (page, index) not in ELSEWHERE})
)
def test_python_of_a_page_runs(page: str, given: dict[str, Callable[[], dict[str, Any]]]) -> None:
    """The blocks of a page in order, in one scope."""
    scope = given[page]() if page in given else {}
    for name, index, code in all_blocks("python"):
        if name == page and (page, index) not in ELSEWHERE:
            exec(compile(code, f"{page}, block {index}", "exec"), scope)  # noqa: S102 - our own pages


@pytest.mark.parametrize(("page", "index"), ELSEWHERE)
def test_a_block_that_runs_elsewhere_is_python(page: str, index: int) -> None:
    ast.parse(blocks(ROOT / page, "python")[index])
    assert (ROOT / ELSEWHERE[page, index]).is_file()


@pytest.mark.parametrize(("page", "index", "code"), all_blocks("toml"))
def test_toml_of_a_page_has_keys_that_exist(page: str, index: int, code: str) -> None:
    table = tomllib.loads(code)
    if page == "docs/reference-adapters.md":
        for own in table.values():
            assert objective(own.pop("name"), **own)
        return
    refused = ""
    try:
        load_config({"base": "quickstart"} | table)
    except TrimtabError as error:  # Files, servers and modules of the reader are absent; keys must be known.
        refused = str(error)
    assert not re.search("unknown|did you mean", refused), f"{page}, block {index}: {refused}"


@pytest.mark.parametrize(("page", "index", "code"), [*all_blocks("yaml"), *all_blocks("json")])
def test_yaml_and_json_of_a_page_can_be_read(page: str, index: int, code: str) -> None:
    assert yaml.safe_load(code), f"{page}, block {index}"


def test_the_workflow_of_the_page_of_preflight_runs_it() -> None:
    [steps] = [yaml.safe_load(block) for block in blocks(ROOT / "docs" / "preflight.md", "yaml")]
    assert all(len({"uses", "run"} & step.keys()) == 1 for step in steps)
    commands = [step["run"] for step in steps if "run" in step]
    assert [command for command in commands if command.startswith("trimtab preflight ")]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert any(f"trimtab-{version}-py3-none-any.whl[train]" in command for command in commands)


def test_a_target_of_a_page_is_one() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    targets |= set(re.findall(r"^(quickstart-\S+) (\S+): ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[0])
    for path in PAGES:
        for target in re.findall(r"^    make ([\w-]+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            assert target in targets, f"{path.name}: make {target}"


def test_files_for_contributors_can_be_read() -> None:
    for path in (*ROOT.glob(".github/**/*.yml"), ROOT / "CITATION.cff", ROOT / ".pre-commit-config.yaml"):
        assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict), path


def command_lines() -> list[tuple[str, str]]:
    """The `trimtab` commands of indented and bash blocks and of workflows, continued lines joined, without comments."""
    found = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = re.findall(r"^    (?:\S*/)?(trimtab \w.*)$", text, flags=re.MULTILINE)
        lines += [
            line
            for block in blocks(path, "bash")
            for line in block.replace("\\\n", " ").splitlines()
            if line[:8] == "trimtab "
        ]
        for block in blocks(path, "yaml"):
            lines += re.findall(r"^ +- run: (trimtab .*)$", block, flags=re.MULTILINE)
        found += [(path.name, line.partition("  #")[0].strip()) for line in lines]
    return sorted(set(found))


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_a_command_of_a_page_is_one(page: str, line: str) -> None:
    """Its options exist. Values in capitals and what stands in brackets are for the reader."""
    line = re.sub(r"\[(--?\w[^\]]*)\]", "", line.partition(" > ")[0].partition(" && ")[0].partition(" | ")[0])
    words = [word for word in shlex.split(line, comments=True)[1:] if word not in ("...", "|")]
    subcommands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert words[0] in subcommands, f"{page}: trimtab {words[0]}"
    command = subcommands[words[0]]
    options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    given = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    assert given <= options, f"{page}: {line}"
