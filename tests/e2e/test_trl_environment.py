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


Board = list[list[int]]
STATE = re.compile(r"score=(\d+)\.0\n((?:(?: +\d+){4}\n){4})done=False")


def state(text: str) -> tuple[int, Board]:
    """The score and the board that a text ends with, or an observation holds."""
    score, rows = STATE.findall(text)[-1]
    return int(score), [[int(number) for number in row.split()] for row in rows.splitlines()]


def moved(board: Board, direction: str) -> tuple[int, Board]:
    """The points of a move and the board after it, before a tile is added: written from the rules of the game."""
    if direction in ("up", "down"):
        points, columns = moved(
            [list(row) for row in zip(*board, strict=True)], "left" if direction == "up" else "right"
        )
        return points, [list(row) for row in zip(*columns, strict=True)]
    if direction == "right":
        points, mirrored = moved([row[::-1] for row in board], "left")
        return points, [row[::-1] for row in mirrored]
    if direction != "left":
        return 0, board
    points, result = 0, []
    for row in board:
        tiles, merged = [tile for tile in row if tile], []
        while tiles:
            tile = tiles.pop(0)
            if tiles and tiles[0] == tile:
                tile += tiles.pop(0)
                points += tile
            merged.append(tile)
        result.append([*merged, *[0] * (4 - len(merged))])
    return points, result


def test_the_rules_of_the_game() -> None:
    board = [[2, 2, 2, 0], [0, 4, 0, 4], [2, 0, 0, 0], [2, 4, 8, 8]]
    assert moved(board, "left") == (28, [[4, 2, 0, 0], [8, 0, 0, 0], [2, 0, 0, 0], [2, 4, 16, 0]])
    assert moved(board, "right")[1][0] == [0, 0, 2, 4]
    assert moved(board, "down") == (12, [[0, 0, 0, 0], [0, 0, 0, 0], [2, 2, 2, 4], [4, 8, 8, 8]])


@pytest.mark.skipif(PEERS is None, reason="no checkouts: TRIMTAB_PEERS names a folder of them, with `trl`")
def test_an_example_of_trl_trains_here(bench: forked.Run, tmp_path: Path) -> None:
    """`Game2048Env` of TRL's examples, from its own file: each result follows from the board that the model saw."""
    example = Path(PEERS or "", "trl", "examples", "scripts", "grpo_2048.py")
    if not example.exists():
        pytest.skip(f"no {example}: TRIMTAB_PEERS is to name a folder with a checkout of trl")
    result = result_of(
        bench(Path(__file__).parents[1] / "programs" / "trl_2048.py", example, bundled.folder(), tmp_path)
    )
    boards, calls = set(), 0
    for prompt, parts in result["episodes"]:
        score, board = state(prompt)
        boards.add(str(board))
        for (_, call), (sampled, observation) in zip(parts[::2], parts[1::2], strict=False):
            assert not sampled
            calls += 1
            [direction] = re.findall(r"<move>(.*?)</move>", call, re.DOTALL)
            points, expected = moved(board, direction.strip().lower())
            before = board
            new_score, board = state(observation)
            added = [
                new
                for row, wanted in zip(board, expected, strict=True)
                for new, old in zip(row, wanted, strict=True)
                if new != old
            ]
            assert len(added) == (expected != before), "a move that changes the board adds one tile"
            assert set(added) <= {2, 4}
            assert new_score == score + points
            score = new_score
    metrics = result["metrics"]
    assert len(result["episodes"]) == 8
    assert len(boards) > 4, "every episode begins with a board of its own"
    assert metrics["episode/calls"] * 8 == calls > 0
    assert metrics["episode/tool_errors"] == metrics["episode/failed"] == 0
    assert metrics["optim/grad_norm"] > 0
