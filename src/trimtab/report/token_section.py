"""The token section of a report: the trajectory files it reads, figures with captions, and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from trimtab.diagnosis.measure.bins import FEWEST, plane
from trimtab.diagnosis.measure.sample import Sample
from trimtab.diagnosis.reading import open_log
from trimtab.diagnosis.reading.layouts import TRIMTAB_REPORT
from trimtab.diagnosis.reading.read_counts import EXTERNAL_TRACE, NOT_FINITE
from trimtab.diagnosis.token_texts import token_texts
from trimtab.diagnosis.tokens import DECILES, TokenTable
from trimtab.pages.charts import scatter_svg
from trimtab.pages.numbers import number, short
from trimtab.pages.page import Card, Chart, Note, Part, Table, charts
from trimtab.report import token_figures, token_statistics
from trimtab.report.clipping import ONE_UPDATE, clipping
from trimtab.report.token_statistics import Frequent
from trimtab.runs.reader import Run, evenly_spaced, sample_steps


@dataclass
class TokenSectionData:
    """The first and the last file with trained tokens, and sums over all files.

    noisy: the last file with perturbed log-probs. clipped: counts (3, 10) by tenth of the response, of tokens clipped
    below and above and of all. before, after: ids of the tokens on both sides of each position where a newer policy
    continued a response, and their entropies.
    """

    first: tuple[int, TokenTable] | None = None
    last: tuple[int, TokenTable] | None = None
    noisy: tuple[int, TokenTable] | None = None
    steps: list[int] = field(default_factory=list)
    rows: int = 0
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    clipped: np.ndarray = field(default_factory=lambda: np.zeros((3, DECILES)))
    clip_rules: set[str] = field(default_factory=set)
    no_clip: str = "no response is left"
    before: list[tuple[np.ndarray, np.ndarray | None]] = field(default_factory=list)
    after: list[tuple[np.ndarray, np.ndarray | None]] = field(default_factory=list)

    @property
    def ends(self) -> dict[int, TokenTable]:
        """The first and the last step with trained tokens; a single entry if they are the same."""
        return dict(end for end in (self.first, self.last) if end is not None)

    def add(self, config: Mapping[str, Any], step: int, file: Path) -> None:
        """Adds an even sample of the file of one step; `config` is the run's recipe."""
        log, sample, responses = open_log([file], framework=TRIMTAB_REPORT), Sample(), 0
        for table in log.tables():
            sample.add(table, responses)
            responses += table.responses
        self.steps.append(step)
        self.rows += responses
        self.dropped += log.counts.dropped
        if not responses:
            return
        tokens = sample.result()
        self.read += tokens.responses
        self.first, self.last = self.first or (step, tokens), (step, tokens)
        if tokens.perturbed is not None and tokens.anchor is not None:
            self.noisy = (step, tokens)
        clip = clipping(config, tokens)
        if isinstance(clip, str):
            self.no_clip = clip
        else:
            masks = (clip.low, clip.high, tokens.mask)
            self.clipped += [np.bincount(tokens.decile[mask], minlength=DECILES) for mask in masks]
            self.clip_rules.add(clip.rule)
        if tokens.version is not None and tokens.ids is not None:
            places = token_statistics.takeovers(tokens.version, tokens.starts)
            # Values at untrained tokens are not known.
            places = places[tokens.mask[places] & tokens.mask[places - 1]]
            for found, index in ((self.before, places - 1), (self.after, places)):
                found.append((tokens.ids[index], None if tokens.entropy is None else tokens.entropy[index]))


STEPS_READ, TABLE_ROWS, SCATTER_BINS = 8, 12, 50
# Steps that log this key have clean log-probs in their file; a perturbed run has them only on probe steps.
_CLEAN_KEY = "mismatch/k3"


def token_section(run: Run) -> list[Part]:
    """Returns the parts of the section; none if the run has no trajectory files.

    Raises `TrimtabError` when a file is damaged or not a trajectory file.
    """
    files = sample_steps(run.path)
    if not files:
        return []
    clean = {int(step) for step in run.series(_CLEAN_KEY)[0]} & files.keys()
    data = TokenSectionData()
    for step in evenly_spaced(sorted(clean or files), STEPS_READ):
        data.add(run.config, step, files[step])
    panels = [_envelope(data), _scatter(data), _shift(data), _entropy(data), _clipped(data, run)]
    return [
        Note(_note(data)),
        *charts(
            [part for part in panels if isinstance(part, Chart)],
            [part for part in panels if isinstance(part, str) and part],
        ),
        *_takeover_tables(run.path, data),
    ]


def _note(data: TokenSectionData) -> str:
    steps = ", ".join(str(step) for step in data.steps)
    text = f"From the trajectory files of steps {steps}: "
    text += f"{data.rows + data.dropped.total():,} responses"
    text += f", an even sample of {data.read:,}." if data.read < data.rows else "."
    reasons = {
        EXTERNAL_TRACE: "of external traces, which have no behavior policy",
        NOT_FINITE: "with a log-prob that is not finite",
    }
    dropped = ", and ".join(f"{count:,} {reasons.get(why, f'({why})')}" for why, count in data.dropped.items())
    return f"{text} Left out: {dropped}." if dropped else text


Panel = Chart | str
"""A figure, or the reason why it is missing (empty: not applicable to this run)."""


def _panel(title: str, now: str, svg: Markup, what: str) -> Chart:
    return Chart(title, svg, (Note(what),), now)


def _clean(data: TokenSectionData) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Returns log π and log μ of the trained tokens of the first and the last step."""
    return {
        step: (tokens.trainer[tokens.mask].astype(np.float64), tokens.behavior[tokens.mask].astype(np.float64))
        for step, tokens in data.ends.items()
        if tokens.anchor is not None
    }


def _missing_text(data: TokenSectionData, name: str, column: str) -> str:
    return f"{name} (no response is left)" if not data.ends else f"{name} (the files have no {column})"


def _envelope(data: TokenSectionData) -> Panel:
    name = "log-ratio envelope"
    pairs = _clean(data)
    if not pairs:
        return _missing_text(data, name, "log-prob of the trainer")
    envelopes = {
        step: token_statistics.envelope(behavior, clean - behavior) for step, (clean, behavior) in pairs.items()
    }
    drawn = {step: envelope for step, envelope in envelopes.items() if len(envelope.probability)}
    if not drawn:
        return f"{name} (no bin holds {FEWEST} tokens)"
    last = list(drawn.values())[-1]
    what = (
        "Tokens binned by the probability the sampler gave them: median (thick) and 2nd to 98th percentile (band) of "
        f"log π − log μ, π the {_policy(data)} policy. A band that opens to the left: rare tokens mismatch most."
    )
    if last.thin:
        what += f" {last.thin:,} tokens of the last step are in bins of fewer than {FEWEST}, not drawn."
    now = f"widest {short(float((last.high - last.low).max()))}"
    return _panel("Log-ratio envelope", now, token_figures.envelope_svg(drawn), what)


def _policy(data: TokenSectionData) -> str:
    return "clean " + "/".join(sorted({tokens.anchor for tokens in data.ends.values() if tokens.anchor}))


def _scatter(data: TokenSectionData) -> Panel:
    pairs = _clean(data)
    if not pairs:
        return _missing_text(data, "trainer against sampler probability", "log-prob of the trainer")
    step, (clean, behavior) = list(pairs.items())[-1]
    trainer, sampler = np.exp(clean), np.exp(behavior)
    what = (
        f"Probability of each token of step {step} for the trainer ({_policy(data)} policy) over that for the sampler, "
        f"{len(trainer):,} tokens; darker squares hold more. Off the dotted line the two disagree. "
        "Healthy: Pearson r above 0.95."
    )
    svg = scatter_svg(plane(sampler, trainer, SCATTER_BINS))
    r = token_statistics.pearson(sampler, trainer)
    return _panel("Trainer against sampler", f"r = {r:.5f}" if np.isfinite(r) else "r not defined", svg, what)


def _shift(data: TokenSectionData) -> Panel:
    if data.noisy is None:
        return ""
    step, tokens = data.noisy
    assert tokens.perturbed is not None
    shift = token_statistics.shift(np.exp(tokens.perturbed[tokens.mask]), np.exp(tokens.trainer[tokens.mask]))
    if len(shift.count) == 0:
        return f"change of probability (at step {step} no token's probability changed: no noise arrived)"
    what = (
        f"How far the noise moved the probability of each token of step {step}, |p with noise − p without|; "
        f"{100 * shift.unmoved:.1f}% of the tokens did not move and are not drawn."
    )
    now = f"75th percentile {short(shift.upper_quartile)}"
    return _panel("Change of probability", now, token_figures.shift_svg(shift), what)


def _entropy(data: TokenSectionData) -> Panel:
    entropies = {
        step: token_statistics.by_decile(tokens.decile[tokens.mask], tokens.entropy[tokens.mask])
        for step, tokens in data.ends.items()
        if tokens.entropy is not None
    }
    if not entropies:
        return _missing_text(data, "entropy by position", "entropy")
    what = "Mean entropy of the distributions the tokens were drawn from, in each tenth of the response's length."
    return _panel("Entropy by position", "", token_figures.entropy_svg(entropies), what)


def _clipped(data: TokenSectionData, run: Run) -> Panel:
    if not data.clip_rules:
        later = _clipped_in_later_updates(run) if data.no_clip.endswith(ONE_UPDATE) else None
        return later or f"clipped tokens by position ({data.no_clip})"
    *sides, tokens = data.clipped
    low, high = (np.divide(side, tokens, out=np.full(DECILES, np.nan), where=tokens > 0) for side in sides)
    share = float((data.clipped[0] + data.clipped[1]).sum() / tokens.sum())
    rule = data.clip_rules.pop() if len(data.clip_rules) == 1 else "the bound differs from step to step"
    what = (
        "Share of tokens without gradient in the first update on the batch, in each tenth of the response's length, "
        f"over all steps read. Here {rule}."
    )
    svg = token_figures.clipped_svg({"below, A < 0": low, "above, A > 0": high})
    return _panel("Clipped tokens by position", f"{100 * share:.3g}% of all", svg, what)


def _clipped_in_later_updates(run: Run) -> Panel | None:
    """Returns the panel of an objective over the proximal policy, whose updates logged the shares; None without."""
    logged = [run.series(f"clip/tenth/{tenth}")[1] for tenth in range(1, DECILES + 1)]
    shares = np.array([values.mean() if len(values) else np.nan for values in logged])
    if np.isnan(shares).all():
        return None
    what = (
        "Share of tokens without gradient in each tenth of the response's length, over all updates and steps. In the "
        "first update on a batch the ratio to π_old is 1 and nothing is clipped."
    )
    svg = token_figures.clipped_svg({"clipped": shares})
    return _panel("Clipped tokens by position", f"{100 * float(np.nanmean(shares)):.3g}% of all", svg, what)


def _takeover_tables(path: Path, data: TokenSectionData) -> list[Part]:
    """Returns the tokens around the positions where a newer policy took over; nothing without any."""
    count = sum(len(ids) for ids, _ in data.after)
    if count == 0:
        return []
    before = token_statistics.most_frequent(*_concatenate(data.before), TABLE_ROWS)
    after = token_statistics.most_frequent(*_concatenate(data.after), TABLE_ROWS)
    texts, reason = token_texts(path, {row.id for row in [*before, *after]})

    def table(title: str, rows: Sequence[Frequent]) -> Table:
        cells = [
            [
                texts.get(row.id, "–"),
                str(row.id),
                f"{row.count:,}",
                f"{100 * row.count / count:.1f}%",
                number(row.entropy),
            ]
            for row in rows
        ]
        return Table(("token", "id", "count", "share", "mean entropy"), cells, title, numeric=range(1, 5))

    what = (
        "Where the current policy took over from an older one inside a response: the last token of the prefix, and the "
        f"token generated anew after it. Entropy in nats.{f' Texts: {reason}.' if reason else ''}"
    )
    tables = [table("Before the cut", before), table("After the cut", after)]
    return [Card("Tokens at truncation points", [Note(what), *tables], f"{count:,} places")]


def _concatenate(parts: Sequence[tuple[np.ndarray, np.ndarray | None]]) -> tuple[np.ndarray, np.ndarray | None]:
    entropies = [entropy for _, entropy in parts if entropy is not None]
    return np.concatenate([ids for ids, _ in parts]), np.concatenate(entropies) if len(entropies) == len(
        parts
    ) else None
