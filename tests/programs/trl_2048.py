"""Trains one step with the environment of TRL's example `grpo_2048.py`, loaded from a checkout as it is.

Run by the interpreter of `make bench-install`: `python trl_2048.py EXAMPLE MODEL OUT`. Prints the episodes, each as the
text of its prompt and a list of its parts, [whether the model sampled it, text], and metrics, as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import AutoTokenizer

import trimtab
from trimtab.runs.trajectories import read
from trimtab.types import Problem, Trajectory

BOARDS = (
    "score=0.0\n  0   0   0   0\n  0   0   2   0\n  0   0   0   0\n  2   0   0   0\ndone=False",
    "score=0.0\n  0   0   0   0\n  2   0   0   0\n  0   0   0   2\n  2   0   0   0\ndone=False",
    "score=4.0\n  4   0   0   2\n  0   0   0   0\n  0   2   0   0\n  0   0   0   0\ndone=False",
)


def load(example: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_2048", example)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["grpo_2048"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def moves(completion: str, problem: Problem) -> float:
    """A reward that differs between responses: the class has none of its own."""
    del problem
    return float(len(completion))


def train(example: ModuleType, model: str, out: Path) -> trimtab.TrainResult:
    question = example.PROMPT
    for split, asked in (("train", question), ("test", "Play.")):  # a question is in one split only
        (out / f"{split}.jsonl").write_text(json.dumps({"question": asked, "answer": "-"}) + "\n")
    first, second, third = BOARDS
    calls = f"<move>left</move><output>{second}</output> <move>up</move><output>{third}</output> <move>right</move>"
    shown = f"Question: {question}{first}\nAnswer: {calls}\n\n"
    config = {
        "base": "quickstart-tools",
        "model": {"path": model},
        "task": {
            "name": "file",
            "path": str(out / "train.jsonl"),
            "test_path": str(out / "test.jsonl"),
            "answer_format": "text",
            "examples": 0,
        },
        "environment": {
            "name": "grpo_2048:Game2048Env",
            "max_turns": 3,
            "max_turn_tokens": 16,
            "answer": ".",
            "instructions": shown,
        },
        "sampling": {"max_tokens": 320},
        "trainer": {"steps": 1, "prompts": 1, "samples": 8},
        "eval": {"problems": 1},
        "log": {"trajectories_every": 1},
    }
    return trimtab.train(config, environment=example.Game2048Env, reward=moves, out=out / "run", progress=False)


def parts(one: Trajectory, tokenizer: Any) -> list[tuple[bool, str]]:
    tokens = zip(one.completion.sampled.tolist(), one.completion.response_ids.tolist(), strict=True)
    runs = groupby(tokens, key=lambda token: token[0])
    return [(sampled, tokenizer.decode([number for _, number in run])) for sampled, run in runs]


def main(example: Path, model: str, out: Path) -> None:
    random.seed(0)
    metrics = train(load(example), model, out).metrics
    tokenizer = AutoTokenizer.from_pretrained(model)
    [file] = (out / "run" / "trajectories").iterdir()
    rows = [row.trajectory for row in read(file)]
    keys = ("episode/calls", "episode/tool_errors", "episode/failed", "optim/grad_norm")
    print(
        json.dumps(
            {
                "episodes": [[tokenizer.decode(one.prompt.ids), parts(one, tokenizer)] for one in rows],
                "metrics": {key: metrics[key] for key in keys},
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
