"""Data sets in the files of every trainer: one file for each step, columns by the layouts that the diagnosis reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from trimtab.diagnosis.reading.layouts import LAYOUTS, Layout
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
FILES = {
    "trimtab": "trajectories/step-{:06d}.parquet",
    "jsonl": "tokens-{}.jsonl",
    "verl": "tokens-{}.jsonl",
    "trl": "completions_{:05d}.parquet",
    "prime-rl": "token_exports/step_{}/rank_0.jsonl",
    "nemo-rl": "train_data_step{}.jsonl",
    "miles": "train_data/{}_0.pt",
}
"""The file of a step by trainer; `jsonl` has Trimtab's columns."""


def layout_of(data: DataSet, seed: int = 0) -> str:
    """The trainer whose files a data set is written as: another one for each kind, strength and size."""
    names = data.kind.layouts or tuple(FILES)
    return names[(sum(data.kind.name.encode()) + 3 * data.level + data.tokens // 600 + seed) % len(names)]


def write(data: DataSet, folder: Path, name: str, *, rescored: bool = False) -> Path:
    """Writes a data set as one of `FILES` and returns what to diagnose. rescored: with the right model's column."""
    layout = LAYOUTS[{"jsonl": "trimtab"}.get(name, name)]
    stream = data.stream
    lengths = stream.rows["prompt_length"] * layout.whole + stream.lengths
    for step in np.unique(stream.rows["step"]):
        members = np.flatnonzero(stream.rows["step"] == step)
        width = int(lengths[members].max()) if layout.padded else 0
        rows = [_row(data, layout, number, width, rescored=rescored) for number in members.tolist()]
        path = folder / FILES[name].format(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
        elif path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            columns = {key: [_tensor(row[key]) for row in rows] for key in rows[0]}
            torch.save({"rollout_id": int(step), "rank": 0, "rollout_data": columns, "cp_size": 1}, path)
    if data.kind.recipe:
        (folder / "config.toml").write_text(RECIPE.format(bits=data.kind.recipe))
    return folder


def _row(data: DataSet, layout: Layout, number: int, width: int, *, rescored: bool) -> dict[str, Any]:
    """One response. Padding and untrained prompts hold the constants that trainers write there."""
    stream, prompt = data.stream, data.prompts[number].tolist()
    begin, end = stream.starts[number : number + 2]
    count = int(end - begin)
    before = len(prompt) if layout.whole else 0
    after = max(0, width - before - count)

    def spread(values: list[Any], first: Any, last: Any) -> list[Any]:
        return [first] * before + values + [last] * after

    def floats(name: str) -> list[float]:
        return stream[name][begin:end].round(DIGITS).tolist()

    own = {name: values[number].item() for name, values in stream.rows.items()}
    whole_ids = prompt if layout.whole or layout.framework == "miles" else []
    trainer = spread(floats("trainer"), -2.0, 0.0)
    per_token = layout.framework not in ("trimtab", "trl")
    roles: dict[str, Any] = {
        "logp_behavior": spread(floats("behavior"), 0.0, -1.0),
        "logp_proximal" if "logp_proximal" in layout.columns else "logp_current": trainer,
        "response_ids": whole_ids + stream["ids"][begin:end].tolist() + [PAD] * after,
        "loss_mask": spread([True] * count, False, False),
        "padding_mask": spread([True] * count, True, False),
        "response_length": count,
        "prompt_length": len(prompt),
        "step": own["step"],
        "group": f"group {own['group']}",
        "prompt": f"question {own['prompt']}",
        "reward": own["reward"],
        "advantage": spread([own["advantage"]] * count, 0.0, 0.0) if per_token else own["advantage"],
        "sample_id": number,
        "sample_mask": 1.0,
    }
    if data.sides.settings:
        roles["sampling"] = {"temperature": 1.0, "top_p": 1.0, **data.sides.settings}
    row = {names[0]: roles[role] for role, names in layout.columns.items() if role in roles}
    if "version" in stream.tokens:
        row["policy_version"] = spread(stream["version"][begin:end].tolist(), 0, 0)
        row["proximal_version"] = own["proximal_version"]
    if rescored:
        row["logp_rescored"] = spread(floats("rescored"), 0.0, 0.0)
    return {key: [value] for key, value in row.items()} if layout.framework == "nemo-rl" else row


def _tensor(value: Any) -> Any:
    return torch.tensor(value) if isinstance(value, list) else value
