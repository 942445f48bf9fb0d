"""The episode section of a report: multi-turn responses with tokens colored by log-ratio."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np
from markupsafe import Markup, escape

from trimtab.pages.page import Note, Part
from trimtab.runs import trajectories
from trimtab.runs.layout import TRAJECTORIES, trajectory_files
from trimtab.runs.reader import Run, evenly_spaced, open_table
from trimtab.runs.tokenizers import token_texts
from trimtab.runs.trajectories import Row
from trimtab.text import number, short

EPISODES_SHOWN, TOKENS_SHOWN = 6, 1000
# The shade of a token is full at this quantile of |log-ratio| over the episodes shown.
FULL_SHADE = 0.99


def episode_section(run: Run) -> list[Part]:
    """Returns the parts of the section, from the last trajectory file; none without multi-turn responses.

    Raises `TrimtabError` when the file is damaged.
    """
    step, rows = _last_episodes(run.path)
    if not rows:
        return []
    shown = evenly_spaced(sorted(rows, key=lambda row: -row.trajectory.reward), EPISODES_SHOWN)
    texts, reason = token_texts(run.path, {int(id_) for row in shown for id_ in row.trajectory.completion.response_ids})
    ratios = np.abs(np.concatenate([log_ratio(row) for row in shown]))
    full = float(np.quantile(ratios[np.isfinite(ratios)], FULL_SHADE)) if np.isfinite(ratios).any() else 0.0
    return [
        Note(
            f"{len(shown)} of {len(rows):,} responses of step {step}{f' ({reason})' if reason else ''}, by reward. "
            "Tokens that the trainer finds more likely than the sampler did are shaded blue, less likely ones orange, "
            f"fully from a log-ratio of {short(full)} on. In a box: results, which are not trained on."
        ),
        *(_episode(row, texts, full) for row in shown),
    ]


def _last_episodes(path: Path) -> tuple[int, list[Row]]:
    """Returns the last step with a file, and its responses if any of them has an observation."""
    files = trajectory_files(path / TRAJECTORIES)
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


def _episode(row: Row, texts: dict[int, str], full: float) -> Markup:
    completion = row.trajectory.completion
    pieces = list(zip(completion.response_ids, completion.sampled, log_ratio(row), strict=True))
    parts = []
    for sampled, part in groupby(pieces[:TOKENS_SHOWN], key=lambda piece: bool(piece[1])):
        tokens = [_token(int(id_), texts, value if sampled else np.nan, full) for id_, _, value in part]
        parts.append(Markup("{}" if sampled else '<span class="result">{}</span>').format(Markup("").join(tokens)))
    turns = int(completion.turn.max(initial=0)) + 1
    results = int((np.diff(completion.sampled.astype(int)) == -1).sum())
    masked = "" if row.trajectory.loss_mask.any() else "; masked"
    facts = f"turns: {turns}; results: {results}; ended by {completion.finish_reason}{masked}"
    hidden = len(pieces) - TOKENS_SHOWN
    parts += [f" … ({hidden} more tokens)"] if hidden > 0 else []
    return sample_block(
        row.trajectory.reward, facts, Markup('<pre class="text">{}</pre>').format(Markup("").join(parts))
    )


def sample_block(reward: float, facts: str, text: Markup) -> Markup:
    """Returns one response beside its reward and what to know about it."""
    return Markup(
        '<div class="sample"><div><span class="tag {}">reward {}</span><div class="small soft">{}</div></div>{}</div>'
    ).format("good" if reward > 0 else "plain", number(reward), facts, text)


def _token(id_: int, texts: dict[int, str], ratio: float, full: float) -> Markup:
    """Returns the text of a token, shaded by its log-ratio where that is known."""
    text = texts.get(id_, f"{id_} ").replace("\n", "↵\n")
    if not np.isfinite(ratio):
        return escape(text)
    shade = min(abs(ratio) / full, 1.0) if full > 0 else 0.0
    return Markup('<span class="token {}" style="--shade: {:.0f}%" title="log π − log μ = {:+.2g}">{}</span>').format(
        "more" if ratio > 0 else "less", 100 * shade, ratio, text
    )
