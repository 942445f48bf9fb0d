"""The episode section of a report: mismatch by turn, and multi-turn responses with tokens colored by log-ratio."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.diagnosis.token_texts import token_texts
from trimtab.pages.render import number, short
from trimtab.runs import trajectories
from trimtab.runs.reader import Run, evenly_spaced, open_table, sample_steps
from trimtab.runs.trajectories import Row

EPISODES_SHOWN, TOKENS_SHOWN = 6, 1000
# The shade of a token is full at this quantile of |log-ratio| over the episodes shown.
FULL_SHADE = 0.99


def episode_section(run: Run) -> dict[str, Any] | None:
    """Returns the template values of the section, from the last trajectory file; None without multi-turn responses.

    Raises `TrimtabError` when the file is damaged.
    """
    step, rows = _last_episodes(run.path)
    if not rows:
        return None
    shown = evenly_spaced(sorted(rows, key=lambda row: -row.trajectory.reward), EPISODES_SHOWN)
    texts, reason = token_texts(run.path, {int(id_) for row in shown for id_ in row.trajectory.completion.response_ids})
    ratios = np.abs(np.concatenate([log_ratio(row) for row in shown]))
    full = float(np.quantile(ratios[np.isfinite(ratios)], FULL_SHADE)) if np.isfinite(ratios).any() else 0.0
    return {
        "step": step,
        "count": f"{len(rows):,}",
        "reason": reason,
        "full": short(full),
        "turns": turn_table(rows),
        "episodes": [_episode(row, texts, full) for row in shown],
    }


def _last_episodes(path: Path) -> tuple[int, list[Row]]:
    """Returns the last step with a file, and its responses if any of them has an observation."""
    files = sample_steps(path)
    if not files:
        return 0, []
    step, file = list(files.items())[-1]
    with open_table(file) as parquet:
        if "turn" not in parquet.schema_arrow.names:
            return step, []
    return step, [row for row in trajectories.read(file) if not row.trajectory.off_policy]


def log_ratio(row: Row) -> np.ndarray:
    """Returns log π − log μ of each token in nats, (tokens,), NaN where one of them is not known."""
    behavior = row.trajectory.completion.logp_behavior.astype(np.float64)
    trainer = row.logp_current if row.logp_current is not None else row.logp_proximal
    return np.full(len(behavior), np.nan) if trainer is None else trainer.astype(np.float64) - behavior


def turn_table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Returns for each turn, and for the first token after a result, the responses, tokens and mismatch."""
    turn, after, ratio, owner = (
        np.concatenate(parts)
        for parts in zip(*(_token_columns(index, row) for index, row in enumerate(rows)), strict=True)
    )
    groups = {str(number_ + 1): turn == number_ for number_ in range(int(turn.max(initial=-1)) + 1)}
    return [
        {
            "name": name,
            "responses": f"{len(np.unique(owner[where])):,}",
            "tokens": f"{int(where.sum()):,}",
            **_mismatch(ratio[where]),
        }
        for name, where in (groups | {"first token after a result": after}).items()
    ]


def _token_columns(index: int, row: Row) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns turn, "follows a result", log-ratio and `index` of the sampled tokens of a response."""
    completion = row.trajectory.completion
    sampled = completion.sampled
    after = sampled & ~np.concatenate([[True], sampled[:-1]])
    return completion.turn[sampled], after[sampled], log_ratio(row)[sampled], np.full(int(sampled.sum()), index)


def _mismatch(ratio: np.ndarray) -> dict[str, str]:
    known = ratio[np.isfinite(ratio)]
    if len(known) == 0:
        return {"k3": "–", "largest": "–"}
    return {"k3": short(float((np.expm1(known) - known).mean())), "largest": short(float(np.abs(known).max()))}


def _episode(row: Row, texts: dict[int, str], full: float) -> dict[str, Any]:
    completion = row.trajectory.completion
    pieces = list(zip(completion.response_ids, completion.sampled, log_ratio(row), strict=True))
    parts = [
        {"result": not sampled, "tokens": [_token(int(id_), texts, value, full) for id_, _, value in part]}
        for sampled, part in groupby(pieces[:TOKENS_SHOWN], key=lambda piece: bool(piece[1]))
    ]
    turns = int(completion.turn.max(initial=0)) + 1
    results = int((np.diff(completion.sampled.astype(int)) == -1).sum())
    return {
        "reward": number(row.trajectory.reward),
        "tone": "good" if row.trajectory.reward > 0 else "plain",
        "facts": f"{_count(turns, 'turn')}, {_count(results, 'result')}, ended by {completion.finish_reason}",
        "masked": not row.trajectory.loss_mask.any(),
        "parts": parts,
        "hidden": max(len(pieces) - TOKENS_SHOWN, 0),
    }


def _count(number_: int, name: str) -> str:
    return f"{number_} {name}{'' if number_ == 1 else 's'}"


def _token(id_: int, texts: dict[int, str], ratio: float, full: float) -> dict[str, Any]:
    text = texts.get(id_, f"{id_} ").replace("␣", " ").replace("↵", "↵\n")
    if not np.isfinite(ratio):
        return {"text": text, "sign": "", "shade": "", "title": ""}
    shade = min(abs(ratio) / full, 1.0) if full > 0 else 0.0
    return {
        "text": text,
        "sign": "more" if ratio > 0 else "less",
        "shade": f"{100 * shade:.0f}%",
        "title": f"log π − log μ = {ratio:+.2g}",
    }
