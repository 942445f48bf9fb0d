"""Data sets in the files that trainers write: one file for each step, its rows by the trainer's layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from zoo.computed import DataSet

DIGITS, PAD = 7, 151_643
RECIPE = """
[engine]
type = "embedded"
dtype = "bfloat16"
quantize = "{bits}"
[model]
dtype = "bfloat16"
autocast = "none"
"""
Row = SimpleNamespace
"""One response: prompt, ids, b, p, n (its length), step, group, question, reward, advantage, more (further columns)."""


def rows_of(data: DataSet, *, rescored: bool) -> list[Row]:
    stream, kept = data.stream, data.stream.rows
    members = int(np.sum(kept["group"] == 0))
    reward = kept["reward"].reshape(-1, members)
    advantage = ((reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-6)).round(6).ravel()
    names = ["ids", "behavior", "trainer", "rescored", *(["version"] if "version" in stream.tokens else [])]
    flat = {name: stream[name] for name in names}
    flat = {name: (x.round(DIGITS) if x.dtype.kind == "f" else x).tolist() for name, x in flat.items()}
    rows = []
    for number, (begin, end) in enumerate(pairwise(stream.starts)):
        own = {name: values[begin:end] for name, values in flat.items()}
        more = {"logp_rescored": own["rescored"]} if rescored else {}
        if "version" in own:
            more |= {"policy_version": own["version"], "proximal_version": int(kept["proximal_version"][number])}
        if data.sides.settings:
            more["sampling"] = {"temperature": 1.0, "top_p": 1.0, **data.sides.settings}
        rows.append(
            Row(
                prompt=data.prompts[number].tolist(),
                ids=own["ids"],
                b=own["behavior"],
                p=own["trainer"],
                n=int(end - begin),
                step=int(kept["step"][number]),
                group=int(kept["group"][number]),
                question=int(kept["prompt"][number]),
                reward=float(kept["reward"][number]),
                advantage=float(advantage[number]),
                more=more,
            )
        )
    return rows


def _trimtab(row: Row, _width: int) -> dict[str, Any]:
    return {
        "step": row.step,
        "group": row.group,
        "prompt_id": f"q{row.question}",
        "prompt_ids": row.prompt,
        "response_ids": row.ids,
        "logp_behavior": row.b,
        "logp_proximal": row.p,
        "reward": row.reward,
        "advantage": row.advantage,
        **row.more,
    }


def _verl(row: Row, width: int) -> dict[str, Any]:
    pad = width - len(row.prompt) - row.n
    mask = [1] * row.n + [0] * pad
    return {
        "input": f"question {row.question}",
        "output": "text",
        "score": row.reward,
        "step": row.step,
        "uid": str(row.group),
        "responses": row.ids + [PAD] * pad,
        "response_mask": mask,
        "attention_mask": mask,
        "rollout_log_probs": row.b + [-1.0] * pad,
        "old_log_probs": row.p + [0.0] * pad,
        "advantages": [row.advantage] * len(mask),
    }


def _trl(row: Row, width: int) -> dict[str, Any]:
    pad = width - len(row.prompt) - row.n
    return {
        "step": row.step,
        "prompt": f"question {row.question}",
        "completion": " ".join(map(str, row.ids)),
        "reward": row.reward,
        "advantage": row.advantage,
        "completion_ids": row.ids + [PAD] * pad,
        "completion_mask": [1] * row.n + [0] * pad,
        "sampling_per_token_logps": row.b + [0.0] * pad,
        "old_per_token_logps": row.p + [-1.5] * pad,
    }


def _prime_rl(row: Row, _width: int) -> dict[str, Any]:
    before, total = len(row.prompt), len(row.prompt) + row.n
    return {
        "schema_version": 1,
        "step": row.step,
        "rank": 0,
        "token_ids": row.prompt + row.ids,
        "position_ids": list(range(total)),
        "loss_mask": [False] * before + [True] * row.n,
        "advantages": [row.advantage] * total,
        "inference_logprobs": [0.0] * before + row.b,
        "trainer_logprobs": [-2.0] * before + row.p,
    }


def _nemo_rl(row: Row, width: int) -> dict[str, Any]:
    before, pad = len(row.prompt), width - len(row.prompt) - row.n
    return {
        "content": [["user", "assistant"]],
        "rewards": [row.reward],
        "input_lengths": [before + row.n],
        "token_ids": [row.prompt + row.ids + [0] * pad],
        "token_loss_mask": [[0] * before + [1] * row.n + [0] * pad],
        "sample_loss_mask": [1.0],
        "advantages": [[row.advantage] * width],
        "generation_logprobs": [[0.0] * before + row.b + [0.0] * pad],
        "prev_logprobs": [[-2.0] * before + row.p + [-20.0] * pad],
    }


def _miles(row: Row, _width: int) -> dict[str, Any]:
    return {
        "tokens": torch.tensor(row.prompt + row.ids),
        "response_lengths": row.n,
        "loss_masks": torch.ones(row.n, dtype=torch.int),
        "rollout_log_probs": torch.tensor(row.b),
        "log_probs": torch.tensor(row.p),
        "raw_reward": row.reward,
        "advantages": torch.full((row.n,), row.advantage),
        **({"weight_versions": [str(row.more["policy_version"][0])]} if "policy_version" in row.more else {}),
    }


LAYOUTS: Mapping[str, tuple[str, Callable[[Row, int], dict[str, Any]]]] = {
    "jsonl": ("tokens-{}.jsonl", _trimtab),
    "parquet": ("trajectories/step-{:06d}.parquet", _trimtab),
    "verl": ("tokens-{}.jsonl", _verl),
    "trl": ("completions_{:05d}.parquet", _trl),
    "prime-rl": ("token_exports/step_{}/rank_0.jsonl", _prime_rl),
    "nemo-rl": ("train_data_step{}.jsonl", _nemo_rl),
    "miles": ("train_data/{}_0.pt", _miles),
}
"""Name of the file of a step and its rows, by trainer."""


def layout_of(data: DataSet, seed: int = 0) -> str:
    """The layout of a data set: another one for each kind, strength and size."""
    names = data.kind.layouts or tuple(LAYOUTS)
    return names[(sum(data.kind.name.encode()) + 3 * data.level + data.tokens // 600 + seed) % len(names)]


def write(data: DataSet, folder: Path, layout: str, *, rescored: bool = False) -> Path:
    """Writes a data set in one of `LAYOUTS` and returns what to diagnose. rescored: with the right model's column."""
    name, columns = LAYOUTS[layout]
    rows = rows_of(data, rescored=rescored)
    for step in sorted({row.step for row in rows}):
        part = [row for row in rows if row.step == step]
        width = max(len(row.prompt) + row.n for row in part)
        path = folder / name.format(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(path, [columns(row, width) for row in part], step)
    if data.kind.recipe and layout == "parquet":
        (folder / "config.toml").write_text(RECIPE.format(bits=data.kind.recipe))
    return folder


def _save(path: Path, rows: Sequence[dict[str, Any]], step: int) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        torch.save({"rollout_id": step, "rank": 0, "rollout_data": columns, "cp_size": 1}, path)
