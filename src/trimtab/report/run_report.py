"""Writes report.html, one self-contained page about one run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from markupsafe import Markup, escape

from trimtab.diagnosis.answer import read_text
from trimtab.diagnosis.output.panels import view_panels
from trimtab.diagnosis.pipeline import examine
from trimtab.pages.page import (
    Card,
    Cell,
    Charts,
    Fold,
    Note,
    Page,
    Part,
    Section,
    Table,
    Tiles,
    Verdict,
    findings_table,
)
from trimtab.report.health import RULE, HealthVerdict, JudgedMetric, health
from trimtab.report.run_charts import chart_sections
from trimtab.report.run_objective import equation_of
from trimtab.runs import trajectories
from trimtab.runs.atomic import write_output
from trimtab.runs.layout import CONFIG, REPORT, TRAJECTORIES, trajectory_files
from trimtab.runs.metric_catalog import bounds, metric, sections
from trimtab.runs.reader import EVENT, Run, evenly_spaced
from trimtab.runs.tokenizers import token_texts
from trimtab.runs.trajectories import Row
from trimtab.text import beside, duration, flatten, format_value, number, short
from trimtab.types import Trajectory

STATE_TONES = {"healthy": "good", "outside": "warn", "at times": "plain"}
TONES = {"healthy": "good", "healthy, but": "mixed", "not healthy": "warn", "not judged": "plain"}
# How much of the trajectory files a page shows.
STEPS_SHOWN, GROUPS_SHOWN, SAMPLES_SHOWN, CHARACTERS_SHOWN = 8, 3, 4, 2000
EPISODES_SHOWN, TOKENS_SHOWN = 6, 1000
# A token has the full shade from this quantile of |log-ratio| over the shown episodes on.
FULL_SHADE = 0.99


def write_report(run: Run, out: Path | None = None) -> Path:
    """Writes `report.html` of a run into its directory, or into `out`, and returns its path."""
    return write_output((out or run.path) / REPORT, _page(run).html().encode())


def _page(run: Run) -> Page:
    path, verdict = run.path.resolve(), health(run)
    trajectories_every = run.config.get("log", {}).get("trajectories_every", "?")
    no_file = Note(f"This run has no trajectory file (log.trajectories_every = {trajectories_every}).")
    checks = [findings_table(verdict.findings)] if verdict.findings else []
    events = [[str(row["step"]), str(row[EVENT])] for row in run.rows if EVENT in row]
    episodes, samples = _response_parts(run)
    starts = []
    for part in run.starts:  # as names and values; unknown values are left out
        rows = [(name, format_value(value)) for name, value in flatten(part).items() if value is not None]
        starts.append(Card("Resumed" if starts else "Start", [Table((), rows)]))
    description = run.config.get("description", "")
    return Page(
        kind="Trimtab run",
        # A comparison names its runs seed0, seed1, ...; the parent folder names the method.
        title=f"{path.parent.name}/{path.name}" if re.fullmatch(r"seed\d+", path.name) else path.name,
        description=[description] if description else [],
        facts=_facts(run),
        sections=[
            Section(
                "",
                [
                    Verdict(TONES[verdict.state], [("", f"{verdict.headline}.")]),
                    *checks,
                    Note(RULE),
                    Tiles(_tiles(run)),
                    Card("What is minimized", code=equation_of(run.config, run.last)),
                ],
            ),
            Section("What the guard did", [Table(("before step", "what"), events, numeric=(0,))] if events else []),
            Section("Outside its healthy range", _outside_ranges(verdict)),
            *chart_sections(run),
            Section("Where trainer and sampler differ", _mismatch_views(run) or [no_file]),
            Section("Episodes", episodes),
            Section("Sampled completions", samples or [no_file]),
            Section("All metrics", [_metrics_table(run, verdict.metrics)]),
            Section("Where it comes from", starts or [Note("This run has no provenance.json.")]),
            Section("Configuration", [Fold(CONFIG, [Card(code=(run.path / CONFIG).read_text(encoding="utf-8"))])]),
        ],
    )


def _outside_ranges(verdict: HealthVerdict) -> list[Part]:
    """Returns a table of the metrics outside their range, with what to do."""
    rows = [
        [item.key, beside(item.shown, bounds(item.key), number), item.steps, *_catalog_texts(item.key)]
        for item in verdict.metrics.values()
        if item.state == "outside"
    ]
    heads = ("metric", "where it is furthest out", "outside in", "healthy", "what to do")
    return [Table(heads, rows, mono=(0,))] if rows else []


def _catalog_texts(key: str) -> tuple[str, str]:
    row = metric(key)
    return ("not documented", "") if row is None else (row.healthy, row.action)


def _facts(run: Run) -> list[tuple[str, str]]:
    config = run.config
    engine, model = config.get("engine", {}), config.get("model", {})
    trainer, optim = config.get("trainer", {}), config.get("optim", {})
    facts = {
        "model": model.get("path"),
        "task": config.get("task", {}).get("name"),
        "objective": config.get("objective", {}).get("name"),
        "sampler": " ".join(str(engine[key]) for key in ("type", "dtype") if key in engine),
        "trainer": f"{model.get('dtype', '?')}, autocast {model.get('autocast', '?')}",
        "batch": f"{trainer.get('prompts', '?')} prompts × {trainer.get('samples', '?')} samples",
        "lr": optim.get("lr"),
        "seed": config.get("seed"),
        "steps": f"{run.steps} of {trainer.get('steps', '?')}",
        "started": run.starts[0].get("started") if run.starts else None,
    }
    return [(name, str(value)) for name, value in facts.items() if value not in (None, "")]


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    tiles = []
    _, seconds = run.series("time/step")  # includes discarded steps
    run = run.kept
    for task, accuracy in run.accuracy().items():
        ends = ["not measured" if value is None else f"{value:.3f}" for value in (accuracy.before, accuracy.after)]
        problems = run.series(f"eval/{task}/problems")[1][-1:]
        note = "greedy, before → after training" + "".join(f", {count:.0f} problems" for count in problems)
        tiles.append((f"Held-out accuracy on {task}", " → ".join(ends), note))
    _, rewards = run.series("reward/mean")
    if len(rewards):
        part = max(len(rewards) // 10, 1)
        value = f"{rewards[:part].mean():.3f} → {rewards[-part:].mean():.3f}"
        tiles.append(("Mean reward", value, f"first → last tenth of the steps ({part} each)"))
    _, k3 = run.series("mismatch/k3")
    if len(k3):
        note = f"median of {len(k3)} measurements; {short(k3.min())} to {short(k3.max())}"
        tiles.append(("Mismatch k3, nats per token", short(float(np.median(k3))), note))
    _, clipped = run.series("optim/grad_clipped")
    if len(clipped):
        _, norms = run.series("optim/grad_norm")
        bound = number(run.config.get("optim", {}).get("grad_clip"))
        note = f"gradient norm {short(norms.min())} to {short(norms.max())}, optim.grad_clip {bound}"
        tiles.append(("Updates clipped", f"{clipped.mean():.0%}", note))
    if len(seconds):
        note = f"median {np.median(seconds):.1f} s per step"
        tiles.append(("Time in steps", duration(float(seconds.sum())), note))
    return tiles


def _mismatch_views(run: Run) -> list[Part]:
    """Returns the views of `trimtab diagnose` over evenly spaced trajectory files; empty if there are no files."""
    files = trajectory_files(run.path / TRAJECTORIES)
    # Only steps that log a mismatch: their files have clean log-probs (in a perturbed run, the probe steps).
    chosen = evenly_spaced([step for step in map(int, run.series("mismatch/k3")[0]) if step in files], STEPS_SHOWN)
    if not chosen:
        return [Note("No step with a trajectory file measured the mismatch.")] if files else []
    measured, _ = examine([files[step] for step in chosen], "trimtab", {}, lambda _activity, _tokens: None)
    steps = ", ".join(map(str, chosen))
    return [
        Note(f"{read_text(measured.origin)}. trimtab diagnose names causes.", f"Steps {steps}"),
        Charts(*view_panels(measured)),
    ]


def _metrics_table(run: Run, judged: Mapping[str, JudgedMetric]) -> Table:
    """Returns a table with one row per logged key: its values, its state over the run, and its healthy range.

    Documented keys come first, in the order of the documentation.
    """
    order = {row.key: index for index, row in enumerate(row for part in sections() for row in part.metrics)}
    rows = []
    for key in sorted(run.keys, key=lambda key: (order[row.key] if (row := metric(key)) else len(order), key)):
        _, values = run.series(key)
        first = next((step[key] for step in run.rows if key in step), None)
        last = number(run.last[key]) if key in run.last else "–"
        sizes = (np.median(values), values.min(), values.max()) if len(values) else ()
        found = judged.get(key)
        state = "" if found is None else Cell(found.state, note=found.steps, tone=STATE_TONES[found.state])
        numbers = [number(float(size)) for size in sizes] or ["", "", ""]
        rows.append([key, number(first), last, *numbers, state, _catalog_texts(key)[0]])
    heads = ("key", "first", "last", "median", "min", "max", "over the run", "healthy")
    return Table(heads, rows, numeric=range(1, 6), mono=(0,))


def _response_parts(run: Run) -> tuple[list[Part], list[Part]]:
    """Returns the sections of episodes and of sampled completions, from evenly spaced trajectory files."""
    files = trajectory_files(run.path / TRAJECTORIES)
    shown = evenly_spaced(list(files), STEPS_SHOWN)
    samples: list[Part] = []
    responses: list[Row] = []
    for step in shown:
        responses = trajectories.read(files[step])
        samples.append(_sample_step(step, files[step], responses, open=step == shown[-1]))
    episodes = episode_section(run, shown[-1], responses) if shown else []
    return episodes, [*([Note("Of multi-turn responses, the text of the last turn.")] if episodes else []), *samples]


def _sample_step(step: int, file: Path, responses: Sequence[Row], *, open: bool) -> Fold:
    groups: dict[int, list[Trajectory]] = {}
    for row in responses:
        groups.setdefault(row.trajectory.group, []).append(row.trajectory)
    parts = [part for group in list(groups.values())[:GROUPS_SHOWN] for part in _group(group)]
    hidden = f"; {len(groups) - GROUPS_SHOWN} more prompts are in {file.name}" if len(groups) > GROUPS_SHOWN else ""
    mean = _mean([row.trajectory for row in responses])
    return Fold(f"Step {step}: mean reward {mean} over {len(responses)} samples{hidden}", parts, open)


def _group(samples: Sequence[Trajectory]) -> list[Part]:
    """Returns the prompt of a group and up to four of its samples, from the highest reward to the lowest."""
    prompt = samples[0].prompt
    # The last line of a few-shot prompt is often "Answer:"; the question is in the line before.
    *before, end = prompt.text.strip().splitlines() or [""]
    line = end if len(end) > 12 else " ".join([*before[-1:], end])
    shown = evenly_spaced(sorted(samples, key=lambda sample: -sample.reward), SAMPLES_SHOWN)
    answer = f", gold answer {prompt.problem.answer}" if prompt.problem.answer else ""
    return [
        Note(f"{len(shown)} of {len(samples)} samples, mean reward {_mean(samples)}{answer}"),
        Fold(f"prompt: {line[-120:]}", [text_block(prompt.text)]),
        *(_sample_text(sample) for sample in shown),
    ]


def _sample_text(sample: Trajectory) -> Markup:
    parts = ", ".join(f"{name} {number(value)}" for name, value in sample.rewards.items())
    facts = [parts] if len(sample.rewards) > 1 else []
    facts += ["cut by the length limit"] if sample.completion.finish_reason == "length" else []
    return sample_block(sample.reward, "; ".join(facts), text_block(sample.completion.text or "(empty)"))


def _mean(samples: Sequence[Trajectory]) -> str:
    return f"{np.mean([sample.reward for sample in samples]):.3f}" if samples else "–"


def text_block(text: str) -> Markup:
    """Returns untrusted text with its line breaks, cut if it is long."""
    rest = len(text) - CHARACTERS_SHOWN
    shown = f"{text[:CHARACTERS_SHOWN]} … ({rest:,} more characters)" if rest > 0 else text
    return Markup('<pre class="text">{}</pre>').format(shown)


def episode_section(run: Run, step: int, responses: Sequence[Row]) -> list[Part]:
    """Returns the section of episodes, from the responses of the last step; empty if these have a single turn."""
    if all(row.trajectory.completion.loss_mask is None for row in responses):
        return []
    rows = [row for row in responses if not row.trajectory.off_policy]
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


def log_ratio(row: Row) -> np.ndarray:
    """Returns log π − log μ of each token in nats, (tokens,); NaN if one of the two is not known."""
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
    """Returns one response beside its reward and `facts`."""
    return Markup(
        '<div class="sample"><div><span class="tag {}">reward {}</span><div class="small soft">{}</div></div>{}</div>'
    ).format("good" if reward > 0 else "plain", number(reward), facts, text)


def _token(id_: int, texts: dict[int, str], ratio: float, full: float) -> Markup:
    """Returns the text of a token, shaded by its log-ratio if that is known."""
    text = texts.get(id_, f"{id_} ").replace("\n", "↵\n")
    if not np.isfinite(ratio):
        return escape(text)
    shade = min(abs(ratio) / full, 1.0) if full > 0 else 0.0
    return Markup('<span class="token {}" style="--shade: {:.0f}%" title="log π − log μ = {:+.2g}">{}</span>').format(
        "more" if ratio > 0 else "less", 100 * shade, ratio, text
    )
