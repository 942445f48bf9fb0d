"""The report's token section: which steps it reads, figures with captions, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from trimtab.diagnosis import token_statistics
from trimtab.diagnosis.token_statistics import Frequent
from trimtab.diagnosis.token_texts import token_texts
from trimtab.pages.render import number, short
from trimtab.report import token_figures
from trimtab.report.clipping import Clipping, clipping
from trimtab.report.token_file import Tokens, read_tokens
from trimtab.runs.reader import Run, sample_steps, spread


@dataclass
class Seen:
    """The first and the last file with trained tokens, and sums over all of them.

    noisy: the last file with perturbed log-probs. clip_*: counts (10,) by tenth of the response. before, after: the
    tokens around the places where a newer policy took over, with the entropy there.
    """

    first: tuple[int, Tokens] | None = None
    last: tuple[int, Tokens] | None = None
    noisy: tuple[int, Tokens] | None = None
    steps: list[int] = field(default_factory=list)
    rows: int = 0
    read: int = 0
    external: int = 0
    nonfinite: int = 0
    clip_low: np.ndarray = field(default_factory=lambda: np.zeros(token_statistics.DECILES))
    clip_high: np.ndarray = field(default_factory=lambda: np.zeros(token_statistics.DECILES))
    clip_tokens: np.ndarray = field(default_factory=lambda: np.zeros(token_statistics.DECILES))
    clip_rules: set[str] = field(default_factory=set)
    no_clip: str = "no response is left"
    before: list[np.ndarray] = field(default_factory=list)
    after: list[np.ndarray] = field(default_factory=list)
    before_entropy: list[np.ndarray] = field(default_factory=list)
    after_entropy: list[np.ndarray] = field(default_factory=list)

    @property
    def ends(self) -> dict[int, Tokens]:
        """The first and the last step with a token, one where they are the same."""
        return dict(end for end in (self.first, self.last) if end is not None)

    def look(self, config: Mapping[str, Any], step: int, found: Tokens) -> None:
        """Take in the file of one step; `config` is the run's."""
        self.steps.append(step)
        self.rows, self.read = self.rows + found.rows, self.read + found.read
        self.external, self.nonfinite = self.external + found.external, self.nonfinite + found.nonfinite
        if not found.trained.any():
            return
        self.first, self.last = self.first or (step, found), (step, found)
        if found.perturbed is not None and found.clean is not None:
            self.noisy = (step, found)
        self._remember_clipped(clipping(config, found), found)
        self._remember_cuts(found)

    def _remember_clipped(self, clip: Clipping | str, found: Tokens) -> None:
        if isinstance(clip, str):
            self.no_clip = clip
            return
        where = token_statistics.deciles(found.starts)
        low, high, trained = (
            np.bincount(where[mask], minlength=token_statistics.DECILES)
            for mask in (clip.low, clip.high, found.trained)
        )
        self.clip_low, self.clip_high = self.clip_low + low, self.clip_high + high
        self.clip_tokens = self.clip_tokens + trained
        self.clip_rules.add(clip.rule)

    def _remember_cuts(self, found: Tokens) -> None:
        if found.version is None:
            return
        places = token_statistics.cuts(found.version, found.starts)
        self.after.append(found.ids[places])
        self.before.append(found.ids[places - 1])
        if found.entropy is not None:
            self.after_entropy.append(found.entropy[places])
            self.before_entropy.append(found.entropy[places - 1])


STEPS_READ, TABLE_ROWS, SCATTER_BINS = 8, 12, 50
# Where this is logged, the step's file holds clean log-probs: a perturbed run has them on probe steps only.
_CLEAN = "mismatch/k3"


def token_section(run: Run) -> dict[str, Any] | None:
    """Values of the template's section; None when the run wrote no trajectory files.

    Raises `TrimtabError` when a file is damaged or no trajectory file.
    """
    files = _files(run)
    if not files:
        return None
    seen = Seen()
    for step, file in files.items():
        seen.look(run.config, step, read_tokens(file))
    panels = [_envelope(seen), _scatter(seen), _shift(seen), _entropy(seen), _clipped(seen)]
    return {
        "note": _note(seen),
        "charts": [panel for panel in panels if not isinstance(panel, str)],
        "absent": [panel for panel in panels if isinstance(panel, str) and panel],
        "cuts": _cuts(run.path, seen),
    }


def _files(run: Run) -> dict[int, Path]:
    files = sample_steps(run.path)
    clean = {int(step) for step in run.series(_CLEAN)[0]} & files.keys()
    return {step: files[step] for step in spread(sorted(clean or files), STEPS_READ)}


def _note(seen: Seen) -> str:
    steps = ", ".join(str(step) for step in seen.steps)
    text = f"From the trajectory files of step{'s' if len(seen.steps) > 1 else ''} {steps}: {seen.read:,} responses"
    text += f", the first of {seen.rows:,}." if seen.read < seen.rows else "."
    out = [
        (seen.external, "of external traces, which have no behavior policy"),
        (seen.nonfinite, "with a log-prob that is not finite"),
    ]
    left = ", and ".join(f"{count:,} {why}" for count, why in out if count)
    return f"{text} Left out: {left}." if left else text


Panel = dict[str, Any] | str
"""A figure for the template, or in one sentence why there is none (empty: it does not concern this run)."""


def _panel(title: str, now: str, svg: str, what: str) -> Panel:
    return {"title": title, "now": now, "svg": Markup(svg), "what": what}


def _clean(seen: Seen) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """log π and log μ of the trained tokens of the first and the last step."""
    return {
        step: (found.clean[found.trained].astype(np.float64), found.behavior[found.trained].astype(np.float64))
        for step, found in seen.ends.items()
        if found.clean is not None
    }


def _without(seen: Seen, name: str, column: str) -> str:
    return f"{name} (no response is left)" if not seen.ends else f"{name} (the files have no {column})"


def _envelope(seen: Seen) -> Panel:
    name = "log-ratio envelope"
    pairs = _clean(seen)
    if not pairs:
        return _without(seen, name, "log-prob of the trainer")
    found = {step: token_statistics.envelope(behavior, clean - behavior) for step, (clean, behavior) in pairs.items()}
    drawn = {step: part for step, part in found.items() if len(part.probability)}
    if not drawn:
        return f"{name} (no bin holds {token_statistics.FEWEST} tokens)"
    last = list(drawn.values())[-1]
    what = (
        "Tokens binned by the probability the sampler gave them: median (thick) and 2nd to 98th percentile (band) of "
        f"log π − log μ, π the {_policy(seen)} policy. A band that opens to the left: rare tokens mismatch most."
    )
    if last.thin:
        what += (
            f" {last.thin:,} tokens of the last step are in bins of fewer than {token_statistics.FEWEST}, not drawn."
        )
    now = f"widest {short(float((last.high - last.low).max()))}"
    return _panel("Log-ratio envelope", now, token_figures.envelope_svg(drawn), what)


def _policy(seen: Seen) -> str:
    names = {found.clean_name for found in seen.ends.values()}
    return "clean " + "/".join(sorted(name.removeprefix("logp_") for name in names))


def _scatter(seen: Seen) -> Panel:
    pairs = _clean(seen)
    if not pairs:
        return _without(seen, "trainer against sampler probability", "log-prob of the trainer")
    step, (clean, behavior) = list(pairs.items())[-1]
    ours, theirs = np.exp(clean), np.exp(behavior)
    what = (
        f"Probability of each token of step {step} for the trainer ({_policy(seen)} policy) over that for the sampler, "
        f"{len(ours):,} tokens; darker squares hold more. Off the dotted line the two disagree. "
        "Healthy: Pearson r above 0.99."
    )
    svg = token_figures.scatter_svg(token_statistics.plane(theirs, ours, SCATTER_BINS))
    r = token_statistics.pearson(theirs, ours)
    return _panel("Trainer against sampler", f"r = {r:.5f}" if np.isfinite(r) else "r not defined", svg, what)


def _shift(seen: Seen) -> Panel:
    if seen.noisy is None:
        return ""
    step, found = seen.noisy
    assert found.perturbed is not None
    assert found.clean is not None
    moved = token_statistics.shift(np.exp(found.perturbed[found.trained]), np.exp(found.clean[found.trained]))
    if len(moved.count) == 0:
        return f"change of probability (at step {step} no token's probability changed: no noise arrived)"
    what = (
        f"How far the noise moved the probability of each token of step {step}, |p with noise − p without|; "
        f"{100 * moved.unmoved:.1f}% of the tokens did not move and are not drawn."
    )
    now = f"75th percentile {short(moved.upper_quartile)}"
    return _panel("Change of probability", now, token_figures.shift_svg(moved), what)


def _entropy(seen: Seen) -> Panel:
    found = {
        step: token_statistics.by_decile(
            token_statistics.deciles(part.starts)[part.trained], part.entropy[part.trained]
        )
        for step, part in seen.ends.items()
        if part.entropy is not None
    }
    if not found:
        return _without(seen, "entropy by position", "entropy")
    what = "Mean entropy of the distributions the tokens were drawn from, in each tenth of the response's length."
    return _panel("Entropy by position", "", token_figures.entropy_svg(found), what)


def _clipped(seen: Seen) -> Panel:
    if not seen.clip_rules:
        return f"clipped tokens by position ({seen.no_clip})"
    low, high = (
        np.divide(part, seen.clip_tokens, out=np.full(token_statistics.DECILES, np.nan), where=seen.clip_tokens > 0)
        for part in (seen.clip_low, seen.clip_high)
    )
    share = float((seen.clip_low + seen.clip_high).sum() / seen.clip_tokens.sum())
    rule = seen.clip_rules.pop() if len(seen.clip_rules) == 1 else "the bound differs from step to step"
    what = (
        "Share of tokens without gradient at the first look at the batch, in each tenth of the response's length, over "
        f"all steps read. Here {rule}."
    )
    svg = token_figures.clipped_svg(low, high)
    return _panel("Clipped tokens by position", f"{100 * share:.3g}% of all", svg, what)


def _cuts(path: Path, seen: Seen) -> dict[str, Any] | None:
    """The table of tokens around the places where a newer policy took over, None when there is no such place."""
    count = sum(len(part) for part in seen.after)
    if count == 0:
        return None
    before = token_statistics.frequent(*_joined(seen.before, seen.before_entropy), TABLE_ROWS)
    after = token_statistics.frequent(*_joined(seen.after, seen.after_entropy), TABLE_ROWS)
    texts, reason = token_texts(path, {row.id for row in [*before, *after]})

    def shown(rows: Sequence[Frequent]) -> list[dict[str, Any]]:
        return [
            {
                "id": row.id,
                "text": texts.get(row.id, ""),
                "count": f"{row.count:,}",
                "share": f"{100 * row.count / count:.1f}%",
                "entropy": number(row.entropy),
            }
            for row in rows
        ]

    return {"count": f"{count:,}", "reason": reason, "before": shown(before), "after": shown(after)}


def _joined(ids: Sequence[np.ndarray], entropy: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
    return np.concatenate(ids), np.concatenate(entropy) if len(entropy) == len(ids) else None
