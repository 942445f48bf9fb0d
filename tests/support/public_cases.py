"""Files as users of other trainers have them, each with one fault that was reported in public, drawn here anew.

Tokens are drawn from the softmax of random logits, which the trainer sees with a little noise. Each kind is a function
that writes a file, or a folder, and returns its path.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

VOCABULARY, NOISE = 50, 0.025


@dataclass
class Response:
    """The ids of one response, and the log-probs of sampler and trainer."""

    ids: np.ndarray
    behavior: np.ndarray
    trainer: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


Size = Callable[[np.ndarray], np.ndarray | float]


def responses(seed: int, count: int, shortest: int, longest: int, size: Size = lambda _: NOISE) -> list[Response]:
    """Draws responses; `size` is the noise of the trainer's logits at each position."""
    random = np.random.default_rng(seed)
    return [_response(random, int(random.integers(shortest, longest + 1)), size) for _ in range(count)]


def _response(random: np.random.Generator, length: int, size: Size) -> Response:
    logits = random.lognormal(1.0, 0.9, (length, 1)) * random.normal(size=(length, VOCABULARY))
    width = np.broadcast_to(size(np.arange(length)), (length,))[:, None]
    sampler, trainer = (_log_softmax(z) for z in (logits, logits + width * random.normal(size=logits.shape)))
    ids = (sampler + random.gumbel(size=sampler.shape)).argmax(-1)
    return Response(ids + 300, *(logp[np.arange(length), ids] for logp in (sampler, trainer)))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def _numbers(values: np.ndarray) -> list[float]:
    return [round(float(value), 5) for value in values]


def _plain(drawn: list[Response]) -> list[dict[str, Any]]:
    return [{"logp_behavior": _numbers(one.behavior), "logp_proximal": _numbers(one.trainer)} for one in drawn]


def _verl(drawn: list[Response], **columns: Callable[[int], Any]) -> list[dict[str, Any]]:
    return [
        {
            "responses": one.ids.tolist(),
            "response_mask": [1] * len(one),
            "rollout_log_probs": _numbers(one.behavior),
            "old_log_probs": _numbers(one.trainer),
            **{name: value(index) for name, value in columns.items()},
        }
        for index, one in enumerate(drawn)
    ]


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def clean(folder: Path) -> Path:
    return _jsonl(folder / "clean.jsonl", _plain(responses(900, 32, 18, 34)))


def end_token(folder: Path) -> Path:
    """An end token appended after sampling, with log-prob 0.0."""
    drawn, random = responses(901, 30, 18, 34), np.random.default_rng(1)
    for one in drawn:
        one.ids[-1], one.behavior[-1], one.trainer[-1] = 2, 0.0, -random.uniform(0.4, 6)
    rows = [{"response_ids": one.ids.tolist(), **row} for one, row in zip(drawn, _plain(drawn), strict=True)]
    return _jsonl(folder / "end.jsonl", rows)


def never_delivered(folder: Path) -> Path:
    """Weights that never reach the sampler: from step to step the trainer is further away, at age 0."""
    rows = []
    for index, step in enumerate((2, 12, 22, 32, 42)):
        part = responses(910 + step, 7, 20, 28, lambda _, index=index: 0.02 + 0.11 * index)
        rows += _verl(
            part,
            step=lambda _, step=step: step,
            uid=lambda i, step=step: f"{step}/{i}",
            policy_version=lambda _, step=step: step,
            proximal_version=lambda _, step=step: step,
        )
    return _jsonl(folder / "steps.jsonl", rows)


def first_lost(folder: Path) -> Path:
    """One to three log-probs are lost at the beginning, and the list is filled with 0.0."""
    drawn = responses(902, 18, 45, 75)
    for index, one in enumerate(drawn):
        lost = 1 + index % 3
        one.behavior = np.append(one.behavior[lost:], np.zeros(lost))
    return _jsonl(folder / "lost.jsonl", _plain(drawn))


def observations(folder: Path) -> Path:
    """The output of a tool, with 0.0 by the sampler and no mask."""
    drawn, random = responses(903, 26, 28, 40), np.random.default_rng(3)
    for one in drawn:
        one.behavior[10:17], one.trainer[10:17] = 0.0, -random.exponential(2.5, 7)
    return _jsonl(folder / "tool.jsonl", _plain(drawn))


def sentinel(folder: Path) -> Path:
    """Padding that is not masked: 1.0 by the sampler."""
    drawn = responses(904, 28, 20, 32)
    for one in drawn:
        one.behavior[-5:] = 1.0
    return _jsonl(folder / "sentinel.jsonl", _plain(drawn))


def minus_9999(folder: Path) -> Path:
    drawn = responses(905, 28, 20, 32)
    for index, place in ((2, 4), (11, 13), (19, 0), (23, 8)):
        drawn[index].behavior[place] = -9999.0
    return _jsonl(folder / "missing.jsonl", _plain(drawn))


def padded(folder: Path) -> Path:
    """Both lists filled with 0.0 to one length, no mask, and column names of their own."""
    drawn = responses(906, 30, 7, 33)

    def filled(values: np.ndarray) -> list[float]:
        return _numbers(np.append(values, np.zeros(33 - len(values))))

    rows = [{"rollout_lp": filled(one.behavior), "train_lp": filled(one.trainer)} for one in drawn]
    return _jsonl(folder / "padded.jsonl", rows)


def flips(folder: Path) -> Path:
    """Other experts for one token in twenty, bfloat16 noise for the others."""
    random = np.random.default_rng(7)

    def size(position: np.ndarray) -> np.ndarray:
        return np.where(random.random(len(position)) < 0.05, 1.3, 0.035)

    return _jsonl(folder / "experts.jsonl", _plain(responses(907, 36, 24, 34, size)))


def copy(folder: Path) -> Path:
    drawn = responses(908, 24, 14, 22)
    for one in drawn:
        one.trainer = one.behavior
    return _jsonl(folder / "copy.jsonl", _verl(drawn, step=lambda _: 5, score=lambda i: float(i % 2)))


def third_turn(folder: Path) -> Path:
    """Nearly all mismatch is in the third of three turns."""
    sizes = np.array([0.01, 0.04, 0.8])
    drawn = responses(909, 22, 33, 42, lambda position: sizes[np.minimum(position // 13, 2)])
    rows = _verl(drawn, step=lambda _: 6, uid=str)
    for row in rows:
        row["response_mask"] = [int(place not in (12, 25)) for place in range(len(row["responses"]))]
    return _jsonl(folder / "turns.jsonl", rows)


def null_where_certain(folder: Path) -> Path:
    drawn = responses(920, 30, 20, 32)
    rows = [
        {
            "step": 2,
            "prompt": f"question {index // 5}",
            "completion_ids": one.ids.tolist(),
            "completion_mask": [1] * len(one),
            "sampling_per_token_logps": [None if value > -2e-3 else value for value in _numbers(one.behavior)],
            "old_per_token_logps": _numbers(one.trainer),
        }
        for index, one in enumerate(drawn)
    ]
    return _jsonl(folder / "null.jsonl", rows)


def other_base(folder: Path) -> Path:
    """The sampler's logarithms are of base 10."""
    drawn = responses(921, 28, 20, 32)
    for one in drawn:
        one.behavior = one.behavior / np.log(10)
    return _jsonl(folder / "base.jsonl", _plain(drawn))


def numpy_text(folder: Path) -> Path:
    """Arrays in a table of text, as numpy prints them."""
    lines = ["logp_behavior,logp_proximal"]
    for one in responses(922, 24, 20, 32):
        cells = (np.array2string(values, precision=5, suppress_small=True) for values in (one.behavior, one.trainer))
        lines.append(",".join(f'"{cell}"' for cell in cells))
    (folder / "numpy.csv").write_text("\n".join(lines) + "\n")
    return folder / "numpy.csv"


def text_lists(folder: Path) -> Path:
    """Lists as JSON text in parquet."""
    rows = _plain(responses(923, 24, 20, 32))
    columns = {name: [json.dumps(row[name]) for row in rows] for name in rows[0]}
    pq.write_table(pa.table(columns), folder / "text.parquet")
    return folder / "text.parquet"


def prompt_in_one_list(folder: Path) -> Path:
    """The trainer's list begins with the tokens of the prompt."""
    rows = _plain(responses(924, 24, 20, 32))
    for row in rows:
        row["logp_proximal"] = [-2.25] * 9 + row["logp_proximal"]
    return _jsonl(folder / "prompt.jsonl", rows)


def folder_with_settings(folder: Path) -> Path:
    """A folder that also holds a JSON file of something else."""
    (folder / "dump").mkdir()
    _jsonl(folder / "dump" / "batch.jsonl", _plain(responses(925, 24, 20, 32)))
    (folder / "dump" / "settings.json").write_text(json.dumps({"name": "run", "warmup": 10}))
    return folder / "dump"


def all_zero(folder: Path) -> Path:
    drawn = responses(926, 28, 20, 32)
    for one in drawn:
        one.behavior = np.zeros(len(one))
    return _jsonl(folder / "zero.jsonl", _plain(drawn))


KINDS: dict[str, Callable[[Path], Path]] = {
    "clean": clean,
    "end-token": end_token,
    "never-delivered": never_delivered,
    "first-lost": first_lost,
    "observations": observations,
    "sentinel": sentinel,
    "minus-9999": minus_9999,
    "padded": padded,
    "flips": flips,
    "copy": copy,
    "third-turn": third_turn,
    "null-where-certain": null_where_certain,
    "other-base": other_base,
    "numpy-text": numpy_text,
    "text-lists": text_lists,
    "prompt-in-one-list": prompt_in_one_list,
    "folder-with-settings": folder_with_settings,
    "all-zero": all_zero,
}
