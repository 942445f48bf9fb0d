"""Every command that README, four pages and `--help` print runs as printed, in a fresh folder.

`PLANS` says for each what is added so that it takes seconds: fewer steps, a tiny model, the laboratory. A command that
is printed and not in the table fails the test, and so does a row that nothing prints. The pages' Python runs as well.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tests.support import forked

import trimtab
from trimtab.cli.main import app
from trimtab.trainer import tasks
from trimtab.trainer.sft import laboratory_folder

ROOT = Path(__file__).parents[2]
PAGES = "\n".join(
    (ROOT / page).read_text()
    for page in ("README.md", *(f"docs/{name}.md" for name in ("quickstart", "methods", "evaluation", "ci")))
)
PROGRAMS = ("trimtab ", "make ", "torchrun ", "python ")

# Half of all responses hold one of these letters: there is a signal to train on whatever the model writes.
REWARD = """--set 'reward=[{name="format", pattern="[a-f]", whole=false}]'"""
FEW = "--set trainer.prompts=2 --set trainer.samples=4 --set eval.problems=4"
TINY = f"--set model.path=$TINY {REWARD} {FEW} --set trainer.steps=1"
LABORATORY = f"--set base=laboratory {FEW} --set trainer.steps=1"
TEN = f"{TINY} --set trainer.steps=10"
GRID = "--seeds 1 --set trainer.steps=2 --set eval.problems=4 --workers 1"
TWO = f"--methods dapo token-tis {GRID}"
FEW_PROBLEMS = "--problems 2 --samples 2 --max-tokens 4"


@dataclass(frozen=True)
class Plan:
    """How a printed command is run here, and what it must leave and say."""

    extra: str = ""  # what shortens it, added at the end
    needs: tuple[str, ...] = ()  # what must be in the folder before: names of `MADE`
    leaves: tuple[str, ...] = ()
    says: str = ""
    instead: tuple[tuple[str, str], ...] = ()  # words of the page that stand for the reader's own
    code: int = 0


PLANS = {
    "trimtab recipes": Plan(says="quickstart-stale"),
    "trimtab recipes --keys": Plan(says=r"\n\[trainer\]\n"),
    "trimtab recipes --json": Plan(says='"quickstart-stale": '),
    "trimtab show quickstart --set trainer.steps=10": Plan(says="steps = 10"),
    "trimtab explain NAME": Plan(says="loss =", instead=(("NAME", "token-tis"),)),
    "trimtab explain token-tis": Plan(says=r"min\(ρ_t, 2\)"),
    "trimtab explain token-tis:weight_max=1.5": Plan(says=r"min\(ρ_t, 1.5\)"),
    "trimtab explain icepop --code": Plan(says=r"def icepop_loss\(current, proximal, behavior, "),
    "trimtab explain geo-mask-token-tis --for verl": Plan(says="loss_mode=trimtab-geo-mask-token-tis\n"),
    "trimtab train quickstart": Plan(TINY, leaves=("runs/quickstart/report.html",)),
    "trimtab train quickstart --set trainer.steps=10 --out runs/short": Plan(TINY, leaves=("runs/short/report.html",)),
    "trimtab train quickstart --set objective.name=icepop --set checkpoint.keep=3 --out runs/icepop": Plan(
        TEN, leaves=("runs/icepop/report.html", "runs/icepop/checkpoints/step-000010"), says="step 10/10"
    ),
    "trimtab train quickstart --set objective.name=icepop --set checkpoint.keep=3 --out runs/icepop --resume": Plan(
        f"{TEN} --set trainer.steps=11", needs=("icepop",), says="step 11/11"
    ),
    "trimtab train token-alp": Plan(LABORATORY, leaves=("runs/token-alp/report.html",)),
    "trimtab train soup --set prefix.rule=entropy --set prefix.top=8": Plan(
        LABORATORY, leaves=("runs/soup/report.html",)
    ),
    "trimtab train token-alp --set perturbation.layers=0-9 --set perturbation.std=1e-3 --out runs/alp-low-layers": Plan(
        f"{LABORATORY} --set perturbation.layers=0-1", leaves=("runs/alp-low-layers/report.html",)
    ),
    "trimtab train luffy --set demonstrations.path=traces.jsonl": Plan(
        LABORATORY, needs=("traces",), leaves=("runs/luffy/report.html",)
    ),
    "trimtab train oapl --set base=laboratory --set trainer.steps=400 --set trainer.sync_every=32": Plan(
        LABORATORY, leaves=("runs/oapl/report.html",)
    ),
    "trimtab sft laboratory --set sft.steps=160 --out runs/teacher": Plan(
        "--set sft.steps=2", leaves=("runs/teacher/model.safetensors",)
    ),
    "trimtab train laboratory --set advantage.kind=distillation --set model.reference=runs/teacher "
    "--out runs/student": Plan(
        f"{FEW} --set trainer.steps=1", needs=("teacher",), leaves=("runs/student/report.html",)
    ),
    "trimtab train true-on-policy": Plan(TINY, leaves=("runs/true-on-policy/report.html",)),
    "torchrun --nproc-per-node 8 -m trimtab train RECIPE": Plan(
        f"{FEW} --set trainer.steps=1 --set trainer.micro_batch_tokens=64",
        instead=(("--nproc-per-node 8", "--nproc-per-node 2"), ("RECIPE", "laboratory")),
        leaves=("runs/laboratory/report.html",),
    ),
    "trimtab sft my-task.toml --out runs/warm": Plan(
        "--set sft.steps=2", needs=("task",), leaves=("runs/warm/model.safetensors",)
    ),
    "trimtab eval runs/icepop --task arithmetic --samples 8": Plan(
        FEW_PROBLEMS, needs=("icepop",), says=r"avg@2.*arithmetic|arithmetic.*avg@2"
    ),
    "trimtab eval smollm2-135m-instruct runs/icepop runs/icepop/checkpoints/step-000010 --task arithmetic "
    "--task file:path=gsm8k-test.jsonl,format=gsm8k,holdout=1 --samples 32 --greedy": Plan(
        FEW_PROBLEMS, needs=("icepop", "gsm8k"), says="gsm8k-test"
    ),
    "trimtab eval smollm2-135m-instruct runs/icepop --task arithmetic "
    "--task file:path=gsm8k-test.jsonl,format=gsm8k,holdout=1 --samples 8 --greedy": Plan(
        FEW_PROBLEMS, needs=("icepop", "gsm8k"), says="gsm8k-test"
    ),
    "trimtab diagnose --scalars trainer_state.json": Plan(needs=("state",), says="ok +no alarm"),
    "trimtab diagnose dumps/step-*.parquet": Plan(needs=("dumps",), leaves=("diagnose.html",), says="(?m)^causes"),
    "trimtab diagnose runs/mine --out mine.html": Plan(needs=("runs/mine",), leaves=("mine.html",), says="(?m)^causes"),
    "trimtab rescore runs/mine --model smollm2-135m-instruct --limit 64": Plan(
        needs=("runs/mine",), leaves=("rescored.parquet",), says="trimtab diagnose rescored.parquet"
    ),
    "trimtab report runs/a runs/b runs/c": Plan(needs=("runs/a", "runs/b", "runs/c"), leaves=("runs/report.html",)),
    "trimtab report runs/a runs/b": Plan(needs=("runs/a", "runs/b"), leaves=("runs/report.html",)),
    "trimtab report runs/mine": Plan(needs=("runs/mine",), says="runs/mine/report.html"),
    "trimtab report runs/icepop": Plan(needs=("icepop",), says="runs/icepop/report.html"),
    "trimtab compare": Plan(f"{TWO} --regimes on-policy", leaves=("runs/compare/report.html",)),
    "trimtab compare --methods dapo token-tis --regimes on-policy stale-32 --seeds 3": Plan(
        GRID, leaves=("runs/compare/report.html",)
    ),
    "trimtab export runs/icepop model/": Plan(needs=("icepop",), leaves=("model/model.safetensors",)),
    "trimtab export runs/mine my-model": Plan(
        needs=("runs/mine",), leaves=("my-model/model.safetensors", "my-model/tokenizer.json")
    ),
    "trimtab doctor": Plan(says="torch"),
    "trimtab preflight laboratory": Plan(says="fit to train"),
    "trimtab check-loss my_loss.py:grpo_loss --as grpo": Plan(needs=("loss",), says="1 diff.*nan.*note: exp", code=1),
}
# test_wheel.py installs; the extra's packages: tests/support/installed.py
INSTALL = "pip install 'trimtab[diagnose] @ git+REPOSITORY'"
# Targets with the run each starts, which is run as well; None: what the target does is only printed (`make -n`).
TARGETS = {
    "make quickstart": TINY,
    "make quickstart-stale": f"{FEW} --set trainer.steps=1 --set compare.seeds=[0] --set compare.workers=1",
    "make quickstart-tools": TINY,
    "make quickstart-vllm": None,  # in an environment of its own; tests/e2e/test_vllm_train.py trains there
    "make test": None,  # this is it
}


def printed_in_pages() -> Iterator[str]:
    """Indented commands, joined where a backslash continues them, and commands between backticks."""
    text = re.sub(r"^```.*?^```$", "", PAGES, flags=re.DOTALL | re.MULTILINE)
    for line in re.sub(r"\\\n *", "", text).splitlines():
        if line.startswith("    "):
            yield re.sub(r"\s+#.*$", "", line).strip()
    for span in re.findall(r"`([^`\n]+)`", text):
        if span.startswith(PROGRAMS) and not re.fullmatch(r"trimtab \w+", span):
            yield span


def printed_by_help() -> Iterator[str]:
    for place in (app.info, *app.registered_commands):
        assert isinstance(place.epilog, str), place
        yield from re.findall(r"\[bold\](trimtab .*?)\[/bold\]", place.epilog)


def test_every_printed_command_is_in_the_table_and_every_row_is_printed_somewhere() -> None:
    printed = {*printed_in_pages(), *printed_by_help()}
    assert printed == {*PLANS, *TARGETS, INSTALL}


def test_no_two_runs_of_the_pages_begin_in_one_folder() -> None:
    """Followed from top to bottom, the second of them would be refused."""
    commands_by_folder: dict[str, str] = {}
    for command in dict.fromkeys(printed_in_pages()):
        if command.startswith("trimtab train ") and "--resume" not in command:
            recipe, out = command.split()[2], re.search(r"--out (\S+)", command)
            folder = out[1] if out else f"runs/{recipe}"
            assert folder not in commands_by_folder, f"{command!r} and {commands_by_folder[folder]!r}"
            commands_by_folder[folder] = command


def test_every_subcommand_that_the_pages_name_exists() -> None:
    named = set(re.findall(r"`trimtab ([\w-]+)", PAGES))
    assert named
    assert named <= {command.name for command in app.registered_commands}


@pytest.mark.slow
def test_every_option_of_a_recipe_between_backticks_is_one(python: forked.Run, tmp_path: Path) -> None:
    spans = [span for span in re.findall(r"`(--set [^`\n]+)`", PAGES) if not span.endswith("=...")]
    assert len(spans) > 3
    for span in spans:
        done = typed(f"trimtab show quickstart {span}", tmp_path, python)
        assert done.returncode == 0, (span, done.stderr)


BIN = Path(sys.executable).parent


def shell(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def typed(command: str, folder: Path, python: forked.Run, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as the shell would, which splits it into words: `trimtab` without importing everything anew."""
    if not command.startswith("trimtab "):
        return shell(command, folder, **variables)
    words = shell(f"printf '%s\\0' {command}", folder, **variables).stdout.split("\0")[:-1]
    return python(BIN / words[0], *words[1:], cwd=folder, timeout=300, **variables)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three short runs of the laboratory model that differ in objective and seed."""
    folder = tmp_path_factory.mktemp("laboratory")
    few = [word for word in FEW.split() if "=" in word]
    differences = {"a": "objective.name=token-tis", "b": "objective.name=icepop", "c": "seed=1"}
    for name, change in differences.items():
        sets = [*few, "trainer.steps=2", "engine.dtype=bfloat16", "log.trajectories_every=1", change]
        trimtab.train("laboratory", overrides=sets, out=folder / name)
    return folder


@pytest.fixture(scope="module")
def icepop(tmp_path_factory: pytest.TempPathFactory, tiny: Path, python: forked.Run) -> Path:
    """The run that the quickstart page trains and then evaluates, reports and exports."""
    folder = tmp_path_factory.mktemp("icepop")
    printed = "trimtab train quickstart --set objective.name=icepop --set checkpoint.keep=3 --out runs/icepop"
    run_printed(printed, PLANS[printed], folder, tiny, python)
    return folder / "runs" / "icepop"


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_traces(folder: Path) -> None:
    problems = tasks.build("sort").train[:200]
    write_rows(folder / "traces.jsonl", [{"prompt": item.question, "response": item.answer} for item in problems])


def make_gsm8k(folder: Path) -> None:
    sums = [(a, a + 7) for a in range(20)]
    rows = [{"question": f"What is {a} and {b}?", "answer": f"{a}+{b}={a + b}\n#### {a + b}"} for a, b in sums]
    write_rows(folder / "gsm8k-test.jsonl", rows)


def make_task(folder: Path) -> None:
    shutil.copy(ROOT / "examples" / "own_recipe.toml", folder / "my-task.toml")
    shutil.copy(ROOT / "examples" / "own_task.jsonl", folder)


def make_teacher(folder: Path) -> None:
    shutil.copytree(laboratory_folder(), folder / "runs" / "teacher")


def make_loss(folder: Path) -> None:
    (folder / "my_loss.py").write_text(
        "import torch\n\ndef grpo_loss(logps, old_logps, mask, advantages, num_sequences, eps=0.2):\n"
        "    ratio = (logps - old_logps).exp()\n"
        "    loss = -torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages) * mask\n"
        "    return (loss.sum(1) / mask.sum(1).clamp(min=1)).sum() / num_sequences\n"
    )


def make_state(folder: Path) -> None:
    """What TRL's trainer leaves of 50 steps without a change."""
    history = [
        {"step": step, "reward": 0.5, "grad_norm": 1.0, "sampling/sampling_logp_difference/mean": 0.01}
        for step in range(1, 51)
    ]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))


MADE: dict[str, Callable[[Path], None]] = {
    "state": make_state,
    "traces": make_traces,
    "gsm8k": make_gsm8k,
    "loss": make_loss,
    "task": make_task,
    "teacher": make_teacher,
}


def prepare(folder: Path, needs: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    for need in needs:
        if need in MADE:
            MADE[need](folder)
        elif need == "dumps":
            shutil.copytree(request.getfixturevalue("runs") / "a" / "trajectories", folder / "dumps")
        elif need == "icepop":
            shutil.copytree(request.getfixturevalue("icepop"), folder / "runs" / "icepop")
        else:
            name = need.removeprefix("runs/")
            source = request.getfixturevalue("runs") / (name if name in ("b", "c") else "a")
            shutil.copytree(source, folder / need)


def run_printed(command: str, plan: Plan, folder: Path, tiny: Path, python: forked.Run) -> None:
    for old, new in plan.instead:
        command = command.replace(old, new)
    done = typed(f"{command} {plan.extra}", folder, python, TINY=str(tiny))
    assert done.returncode == plan.code, f"{command} {plan.extra}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr
    for path in plan.leaves:
        assert (folder / path).exists(), f"{command}: no {path}\n{done.stdout[-2000:]}"
    assert re.search(plan.says, done.stdout, re.DOTALL), f"{command}\n{done.stdout[-2000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("command", PLANS)
def test_a_printed_command_runs(
    command: str, tiny: Path, tmp_path: Path, python: forked.Run, request: pytest.FixtureRequest
) -> None:
    plan = PLANS[command]
    prepare(tmp_path, plan.needs, request)
    run_printed(command, plan, tmp_path, tiny, python)


@pytest.mark.slow
@pytest.mark.parametrize("command", TARGETS)
def test_a_printed_target_exists_and_what_it_runs_does(
    command: str, tiny: Path, tmp_path: Path, python: forked.Run
) -> None:
    done = shell(command.replace("make", "make -n"), ROOT)
    assert done.returncode == 0, done.stderr
    extra = TARGETS[command]
    if extra is not None:
        [line] = [line for line in done.stdout.splitlines() if "/trimtab train" in line]
        run_printed(re.sub(r"^\S*/trimtab", "trimtab", line), Plan(extra), tmp_path, tiny, python)
        assert len(list(tmp_path.glob("runs/*/report.html"))) == 1


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGES, flags=re.DOTALL | re.MULTILINE)


# What the blocks take as given, and for runs what makes them short.
GIVEN = """
import torch, trimtab
torch.manual_seed(0)
c = torch.randn(4, 5).requires_grad_()
b, p, logp_train, logp_rollout = (-torch.rand(4, 5) for _ in range(4))
m = mask = torch.ones(4, 5, dtype=torch.bool)
rewards, groups = torch.tensor([0.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
"""
PARTS = """
objective = trimtab.objective("token-tis")
A = trimtab.advantages("grpo", rewards, groups)
parts = [
    (trimtab.PolicyLogps(current=c[i], behavior=b[i], mask=m[i], proximal=p[i]), A[i])
    for i in (slice(0, 2), slice(2, 4))
]
"""
SHORT = """
import os, trimtab
whole = trimtab.train
def train(config, overrides=(), **more):
    few = ["trainer.steps=1", "trainer.prompts=2", "trainer.samples=4", "trainer.minibatches=1", "eval.problems=4",
           "sampling.max_tokens=64", "trainer.dynamic_sampling=false", f"model.path={os.environ['TINY']}"]
    return whole(config, overrides=[*overrides, *few], **more)
trimtab.train = train
"""


def test_the_pages_have_the_python_that_is_run_here() -> None:
    starts = [block.strip().splitlines()[0] for block in python_blocks()]
    assert starts == [
        "import trimtab",
        "import trimtab",
        "trimtab.train(",
        "# parts: [(PolicyLogps, advantages), ...], one for each micro-batch",
        *("import torch", "import json", "import sys"),
    ]


@pytest.mark.parametrize(
    ("index", "before", "after"),
    [
        (0, GIVEN, "assert out.loss.isfinite() and c.grad.abs().sum() > 0 and 'k3' in stats"),
        (1, SHORT, "assert result.run.joinpath('report.html').exists()"),
        (2, SHORT, ""),
        (3, GIVEN + PARTS, "assert c.grad.abs().sum() > 0"),
        (4, "", ""),
        (6, "def train(monitor): pass", ""),
    ],
)
@pytest.mark.slow
def test_python_of_the_pages_runs(
    index: int, before: str, after: str, tiny: Path, tmp_path: Path, python: forked.Run
) -> None:
    problems = [{"problem": f"What is {a} + 1?", "answer": str(a + 1)} for a in range(40)]
    write_rows(tmp_path / "train.jsonl", problems)
    (tmp_path / "mymodule.py").write_text("def politeness(completion, problem):\n    return len(completion) % 2\n")
    (tmp_path / "block.py").write_text(f"{before}\n{python_blocks()[index]}\n{after}\n")
    done = python(tmp_path / "block.py", cwd=tmp_path, TINY=str(tiny))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("jq") is None, reason="the steps need jq")
def test_the_steps_of_the_page_of_ci_run(tmp_path: Path) -> None:
    (tmp_path / "test_parity.py").write_text(python_blocks()[5])
    first, more = re.findall(r"^```yaml\n(.*?)^```$", PAGES, flags=re.DOTALL | re.MULTILINE)
    for step in [*yaml.safe_load(first)["jobs"]["parity"]["steps"], *yaml.safe_load(more)]:
        if not step.get("run", "pip").startswith("pip"):
            done = shell(f"set -e\n{step['run']}", tmp_path, GITHUB_STEP_SUMMARY="summary.md")
            assert done.returncode == 0, f"{step}\n{done.stdout}\n{done.stderr}"
    assert re.search(r"k3.*\| mismatch \| ok \|", (tmp_path / "summary.md").read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_site_is_not_built_with_a_dead_link(tmp_path: Path) -> None:
    """The command of `make docs`, on two pages of which one links a heading, and what is not there."""
    pytest.importorskip("mkdocs", reason="make docs installs it")
    [command] = re.findall(r"^\t(.*mkdocs build.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: pages\nnav: [a.md, b.md]\nplugins: []")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "b.md").write_text("# B\n")
    for link, code in {"b.md#b": 0, "gone.md": 1, "b.md#gone": 1}.items():
        (tmp_path / "pages" / "a.md").write_text(f"# A\n[b]({link})\n")
        done = shell(command.replace("$(BIN)", str(BIN)), tmp_path)
        assert (done.returncode, link in done.stderr) == (code, bool(code)), done.stderr
