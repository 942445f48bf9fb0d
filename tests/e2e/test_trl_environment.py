"""Classes written for TRL run here unchanged: one that also trains in TRL 1.16, and one of TRL's examples."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tests.support import forked
from tests.support.bench_environment import needs_bench, result_of

from trimtab.trainer.models import bundled

PEERS = os.environ.get("TRIMTAB_PEERS")

pytestmark = [pytest.mark.slow, needs_bench]


def test_one_class_trains_in_trl_and_here(bench: forked.Run, tiny: Path, tmp_path: Path) -> None:
    counts = result_of(bench(Path(__file__).parents[1] / "programs" / "trl_environment.py", tiny, tmp_path))
    assert counts["trl"]["reset"] == counts["trl"]["get_reward"] == 4
    # One step of 2 x 4 responses, and the evaluation of one problem before and after it.
    assert counts["trimtab"]["reset"] == counts["trimtab"]["get_reward"] == 8 + 2
    assert counts["trimtab"]["walk"] > 0
    assert counts["metrics"]["episode/failed"] == 0
    assert 0 < counts["metrics"]["reward/mean"] < 0.5
    assert counts["metrics"]["reward/std"] > 0


STATE = re.compile(r"score=(\d+)\.0\n((?:(?: +\d+){4}\n){4})done=False")


def last_state(text: str) -> tuple[int, str, int]:
    """The score, the board and the sum of its tiles that a text ends with, or an observation holds."""
    score, board = STATE.findall(text)[-1]
    return int(score), board, sum(map(int, board.split()))


@pytest.mark.skipif(PEERS is None, reason="no checkouts: TRIMTAB_PEERS names a folder of them, with `trl`")
def test_an_example_of_trl_trains_here(bench: forked.Run, tmp_path: Path) -> None:
    """`Game2048Env` of TRL's examples, from its own file: each result holds the tiles that the model saw."""
    example = Path(PEERS or "", "trl", "examples", "scripts", "grpo_2048.py")
    if not example.exists():
        pytest.skip(f"no {example}: TRIMTAB_PEERS is to name a folder with a checkout of trl")
    result = result_of(
        bench(Path(__file__).parents[1] / "programs" / "trl_2048.py", example, bundled.folder(), tmp_path)
    )
    boards, calls = set(), 0
    for prompt, parts in result["episodes"]:
        score, board, tiles = last_state(prompt)
        boards.add(board)
        for (_, call), (sampled, observation) in zip(parts[::2], parts[1::2], strict=False):
            assert not sampled
            assert len(re.findall(r"<move>.*?</move>", call, re.DOTALL)) == 1
            calls, before, old = calls + 1, tiles, score
            score, _, tiles = last_state(observation)
            assert tiles - before in (0, 2, 4), "a move merges tiles, and one is added where the board has changed"
            assert score >= old
    metrics = result["metrics"]
    assert len(result["episodes"]) == 8
    assert len(boards) > 4, "every episode begins with a board of its own"
    assert metrics["episode/calls"] * 8 == calls > 0
    assert metrics["episode/tool_errors"] == metrics["episode/failed"] == 0
    assert metrics["optim/grad_norm"] > 0
