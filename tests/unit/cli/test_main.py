"""Exit codes and lines of the command line, in this process. Real processes are in tests/e2e."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.commands import Printed

import trimtab
from trimtab.cli import main
from trimtab.cli.output import run_directory
from trimtab.cli.starting import COMMANDS
from trimtab.diagnosis.advice.rules import list_choices
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives import objectives
from trimtab.text import without_credentials
from trimtab.trainer.config import load_config, recipe_names
from trimtab.trainer.config.consistency import address_problem


def test_help_of_every_command_has_an_example(printed: Printed) -> None:
    for command in COMMANDS:
        assert f"Example: trimtab {command}" in " ".join(printed(command, "--help").split()), command


def test_general_help_names_every_command(printed: Printed) -> None:
    out = printed("--help")
    assert all(f" {command} " in out for command in COMMANDS)
    assert "[compare]" in out, "a section's name is not markup"
    assert printed("--version").startswith("trimtab 0.")


@pytest.mark.e2e
def test_help_and_recipes_do_not_import_torch() -> None:
    program = (
        "import sys; from trimtab.cli.main import run; "
        "assert run(['--help']) == run(['train', '--help']) == run(['recipes']) == run(['show', 'quickstart']) == 0; "
        "heavy = {'torch', 'transformers', 'matplotlib', 'pyarrow', 'numpy'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.e2e
def test_a_reader_of_json_may_stop_early() -> None:
    command = [sys.executable, "-m", "trimtab", "recipes", "--keys", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None  # noqa: PT018
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 141)


@pytest.mark.parametrize("command", [name for name, facts in COMMANDS.items() if facts.one_process])
def test_commands_of_one_process_are_refused_under_torchrun(
    command: str, monkeypatch: pytest.MonkeyPatch, printed: Printed, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert printed(command, code=2) == (
            f"trimtab: `trimtab {command}` is one process: run it without torchrun (or unset WORLD_SIZE)\n"
        )
    assert not any(tmp_path.iterdir())
    assert main.run(["recipes"]) == 0  # what only prints may be asked anywhere
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "torchrun" not in printed("sft", "no-such-recipe", code=2)
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert printed(command, code=2) == "trimtab: WORLD_SIZE = 'many' is not a number of ranks: unset it\n"


def test_a_comparison_is_refused_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, printed: Printed, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert "run it without torchrun" in printed("train", "quickstart-stale", "--out", str(tmp_path / "run"), code=2)
    assert not any(tmp_path.iterdir())


def test_recipes_as_json(printed: Printed) -> None:
    described = json.loads(printed("recipes", "--json"))
    assert list(described) == recipe_names()
    assert all(described.values()), "every recipe says what it is"


def test_show_prints_what_resolves_to_the_same_again(printed: Printed, tmp_path: Path) -> None:
    text = printed("show", "token-alp", "--set", "base=laboratory", "--set", "trainer.steps=3")
    (tmp_path / "copy.toml").write_text(text)
    config = load_config(tmp_path / "copy.toml")
    assert config == load_config("token-alp", ["base=laboratory", "trainer.steps=3"])
    assert (config.trainer.steps, config.model.path, config.trainer.max_bad_steps) == (3, "laboratory", 3)
    assert "\nmax_bad_steps = 3\n" in text, "defaults are written out"


def test_show_as_json_has_the_keys_that_are_absent_too(printed: Printed) -> None:
    values = json.loads(printed("show", "laboratory", "--json"))
    assert (values["optim"]["betas"], values["trainer"]["max_lag"]) == ([0.9, 0.99], None)


def test_explain_changes_objective_and_recipe_of_one_name(printed: Printed) -> None:
    changes = ["--set", "tau=0.5", "--set", "trainer.sync_every=2"]
    values = json.loads(printed("explain", "m2po", *changes, "--json"))
    assert all("0.5" in values[kind]["equation"] for kind in ("objective", "recipe"))
    values = json.loads(printed("explain", "m2po", "--set", "objective.tau=0.5", "--json"))
    assert ["0.5" in values[kind]["equation"] for kind in ("objective", "recipe")] == [False, True]
    values = json.loads(printed("explain", "m2po", "--set", 'mask=[{kind="veto"}]', "--json"))
    assert all("keep where every ρ_t" in values[kind]["equation"] for kind in ("objective", "recipe"))


OWN = "tests.unit.objectives.own_rule:dppo"
OPTIMAL = ["--set", "advantage.kind=optimal-token"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([f"{OWN}:tv_max=0.07"], 0, "> 0.07"),
        (["token-tis:weight_max=1.5,clip_high=0.3"], 0, "min(ρ_t, 1.5)"),
        (["m2po:tau=0.5", "--set", "tau=0.7"], 0, "stays below 0.7"),  # --set comes last
        *(([f"token-tis:clip_low={value}"], 0, "clip(r_t, 0.9, 1.2)") for value in (".1", "+1.e-1", "0.1")),
        (["composed", "--set", 'surrogate={kind="soft-gate"}'], 0, "σ(τ (r_t − 1)) A"),
        (["laboratory", *OPTIMAL], 0, "(advantage: optimal-token)"),
        (["laboratory", *OPTIMAL, "--set", "objective.name=gspo"], 2, "objective 'gspo' judges whole responses"),
        (["token-tis:weight_maxx=3"], 2, "no keyword 'weight_maxx' (did you mean 'weight_max'"),
        (["token-tis:3"], 2, "'3' is not KEY=VALUE"),
        (["token-tis:clip_low=0.1:clip_high=0.3"], 2, "clip_low"),
        (["token-tis:clip_low:clip_high=0.3"], 2, "clip_low"),
        (["composed"], 2, "it needs a surrogate"),
        (["composd"], 2, "unknown objective or recipe 'composd' (did you mean 'composed'"),
        (["quickstart", "--code"], 2, "--code prints an objective, and quickstart is a recipe"),
        (["--code"], 2, "--code prints one objective: name it"),
        (["grpo", "--code", "--for", "verl"], 2, "--for prints settings and --code a function: give one"),
        ([OWN, "--code"], 2, "TotalVariation has no code to print"),
        (["token-tis", "--for", "verrl"], 2, "unknown trainer 'verrl' (did you mean 'verl'"),
        (["quickstart", "--for", "verl"], 2, "--for prints an objective, and quickstart is a recipe"),
        (["--for", "verl"], 2, "--for prints one objective: name it"),
    ],
)
def test_explain_prints_what_training_would_do_or_why_not(
    words: list[str], code: int, text: str, printed: Printed
) -> None:
    assert text in printed("explain", *words, code=code)


def test_explain_prints_code_that_says_which_command_printed_it(printed: Printed) -> None:
    command = ["explain", "icepop:weight_max=3", "--set", "clip_low=0.1", "--code"]
    text = printed(*command)
    assert text.splitlines()[1] == f"# Printed by Trimtab (Apache-2.0): trimtab {' '.join(command)}"
    assert "ratio.clamp(0.9, 1.2)" in text
    assert "(rho <= 3)" in text
    assert json.loads(printed(*command, "--json")) == {"objective": "icepop", "code": text.rstrip()}
    composed = ["explain", "composed", "--set", 'surrogate={kind="soft-gate"}', "--code"]
    assert "def composed_loss(current, proximal, mask, advantage, tokens=None):" in printed(*composed)


def test_explain_prints_the_noise_of_alp(printed: Printed) -> None:
    for name in ("token-alp", "seq-alp"):
        text = printed("explain", name)
        parts = ("h_l + σ_l·ε_l, ε_l ~ N(0, I)", "expectation", "one draw", "left out:", "source: Adaptive")
        for part in (*parts, "[perturbation]", "lr = 0.0005"):
            assert part in text
        names: dict[str, object] = {}
        exec(printed("explain", name, "--code"), names)  # noqa: S102 - it is the text of this package
        assert {"perturb", f"{name.replace('-', '_')}_loss"} <= set(names)
    assert "def perturb" not in printed("explain", "token-alp-bypass", "--code")
    assert "note: no noise" in printed("explain", "token-alp-bypass")


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_can_be_explained(name: str, printed: Printed) -> None:
    """Those for many processes too, of which this is one."""
    assert "loss = −1/D" in printed("explain", name)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (TrimtabError("first\n  second"), 2, "trimtab: first second\n"),
        (KeyboardInterrupt(), 130, "\ntrimtab: interrupted\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_a_mistake_and_control_c_are_one_line_and_a_bug_keeps_its_traceback(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> list[str]:
        raise error

    monkeypatch.setattr("trimtab.trainer.config.recipe_names", fail)
    assert main.run(["recipes"]) == code
    assert capsys.readouterr().err == line
    error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        main.run(["recipes"])


@pytest.mark.parametrize(
    ("recipe", "out", "configured", "expected"),
    [
        ("quickstart", None, None, "runs/quickstart"),
        ("some/where/mine.toml", None, None, "runs/mine"),
        ("quickstart", None, "elsewhere", "elsewhere"),
        ("quickstart", "here", "elsewhere", "here"),
        ("runs/old/config.toml", None, None, "runs/old"),
    ],
)
def test_the_directory_of_a_run(recipe: str, out: str | None, configured: str | None, expected: str) -> None:
    assert run_directory(recipe, Path(out) if out else None, configured) == Path(expected)


def test_the_folder_of_a_run_is_a_recipe_and_where_it_continues(tmp_path: Path, printed: Printed) -> None:
    run = tmp_path / "a"
    run.mkdir()
    (run / "config.toml").write_text(load_config("laboratory", ["objective.name=icepop"]).dump())
    assert load_config(str(run)).objective.name == "icepop"
    assert run_directory(str(run), None, "runs/laboratory") == run
    assert "objective icepop" in printed("explain", str(run))


@pytest.mark.parametrize(
    "command", [["report"], ["diagnose"], ["export", "--which", "last"], ["train", "--resume"], ["eval"]]
)
def test_a_run_that_is_not_there_is_looked_for_beside_it(command: list[str], tmp_path: Path, printed: Printed) -> None:
    there = tmp_path / "quickstart-20260801-101500"
    there.mkdir()
    more = {"export": ["out"], "eval": ["--task", "sort"]}.get(command[0], [])
    assert f"(did you mean {there}?)" in printed(*command, tmp_path / "quickstart", *more, code=2)


def test_explain_alone_lists_every_objective_once(printed: Printed) -> None:
    listed, _, chosen = printed("explain").partition("\n\nWhich one when (")
    assert [line.split()[0] for line in listed.splitlines() if len(line.split()) > 3] == objectives()
    for row in list_choices():
        assert f"\n\n{row.when}\n  {row.preset or 'nothing: repair it first'}" in chosen
        assert row.accuracy in chosen
    assert len(printed("explain", "vtrace", code=2)) < 150


def test_a_suggestion_is_made_once() -> None:
    assert did_you_mean("soop", ["soup", "soup", "luffy"]) == " (did you mean 'soup'?)"
    assert did_you_mean("x", ["soup", "soup"]) == " (known: soup)"
    assert did_you_mean("x", ["soup"], "`list` lists them") == " (`list` lists them)"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trimtab expl", ["explain"]),
        ("trimtab train quickstart-t", ["quickstart-tools", "quickstart-tools-vllm"]),
        ("trimtab show true", ["true-on-policy"]),
        ("trimtab report --o", ["--out"]),
        ("trimtab train mine.to", []),
    ],
)
def test_the_shell_completes_commands_options_and_recipes(
    words: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_TRIMTAB_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit):
        main.run([])
    assert capsys.readouterr().out.split() == expected


def test_explain_prints_the_settings_of_another_trainer(printed: Printed) -> None:
    command = ["explain", "token-tis", "--for", "verl", "--set", "weight_max=1.5"]
    text = printed(*command)
    assert "algorithm.rollout_correction.rollout_is_threshold=1.5\n" in text
    assert json.loads(printed(*command, "--json"))["lines"] == text.splitlines()


def test_addresses_are_printed_without_credentials_and_the_rest_of_the_line_stays() -> None:
    line = "http://me:p@ss@one:1 refused, https://you@two is slow: write to a@b.org"
    assert without_credentials(line) == "http://***@one:1 refused, https://***@two is slow: write to a@b.org"
    problem = address_problem("url", "http://me:pass word\nagain@one", "leave it out")
    assert "http://***@one" in problem
    assert not {"me", "pass", "word", "again"} & set(re.findall(r"\w+", problem.partition("which")[0]))


def test_overrides_of_a_resolved_recipe_are_refused() -> None:
    for environment in (None, dict):
        with pytest.raises(TrimtabError, match="would not change a Config"):
            trimtab.train(load_config("laboratory"), environment=environment, overrides=["seed=1"])
