"""Writes report.html, one self-contained page about one run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from trimtab.pages.render import beside, number, render, short
from trimtab.report.chart_layout import METHOD_CHARTS, RUN_CHARTS
from trimtab.report.chart_specs import Chart, ResolvedChart, resolve
from trimtab.report.differences import equation_of
from trimtab.report.episode_section import episode_section
from trimtab.report.health import Finding, clipped_share, health
from trimtab.report.line_charts import draw_chart
from trimtab.report.perturbation_verdict import perturbation_verdict
from trimtab.report.token_section import token_section
from trimtab.runs.atomic import write_output
from trimtab.runs.metric_catalog import Metric, bounds, metric
from trimtab.runs.provenance import described, duration
from trimtab.runs.reader import Run, Sample, evenly_spaced, read_run, read_samples, sample_steps

# Shown first when several metrics are outside their range.
HEADLINES = (
    "optim/skipped",
    "trajectories/dropped",
    "perturbation/changed",
    "perturbation/dlogp",
    "mismatch/k3",
    "mismatch/ess_token",
    "mismatch/pearson",
    "weight/changed",
    "clip/dual",
    "reject/tokens",
    "length/truncated",
    "groups/no_signal",
    "optim/grad_clipped",
)
TONES = {"healthy": "good", "healthy, but": "mixed", "not healthy": "warn", "not judged": "plain"}
# How much of the trajectories a page shows; the files hold all of them.
STEPS_SHOWN, GROUPS_SHOWN, SAMPLES_SHOWN, CHARACTERS_SHOWN = 8, 3, 4, 2000


def write_report(path: Path, out: Path | None = None) -> Path:
    """Write `report.html` of the run directory `path` (into `out` if given) and return its path.

    Raises `TrimtabError` when the run's files are missing, empty or damaged.
    """
    run = read_run(path)
    page = render("report.html.j2", _template_values(run))
    return write_output((out or path) / "report.html", page.encode())


def _template_values(run: Run) -> dict[str, Any]:
    health_verdict = health(run)
    table = [_entry(run, key, health_verdict.findings.get(key)) for key in _ordered(run.keys)]
    return {
        "verdict": health_verdict,
        "tone": TONES[health_verdict.state],
        "title": _title(run.path.resolve()),
        "description": run.config.get("description", ""),
        "facts": _facts(run),
        "tiles": _tiles(run),
        "equation": equation_of(run.config, run.last),
        "watch": _outside_ranges(table),
        "sections": _sections(run),
        "noise": perturbation_verdict(run),
        "tokens": token_section(run),
        "episodes": episode_section(run),
        "samples": _samples(run.path),
        "trajectories_every": run.config.get("log", {}).get("trajectories_every", "?"),
        "table": table,
        "origins": [described(part) for part in run.origins],
        "config": (run.path / "config.toml").read_text(),
    }


def _title(path: Path) -> str:
    # A comparison names its runs seed0, seed1, ...; the parent folder names the method.
    return f"{path.parent.name}/{path.name}" if re.fullmatch(r"seed\d+", path.name) else path.name


def _outside_ranges(table: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the metrics outside their range, one entry per row of the metric catalog.

    `first`: the headlines. `rest`: others that are outside. `at_times`: those that are outside at times only.
    """
    entries: dict[str, dict[str, Any]] = {}
    for entry in table:
        if entry["state"] in ("outside", "at times"):
            row: Metric = entry["metric"]
            item = entries.setdefault(row.key, {"metric": row, "values": [], "outside": False})
            item["values"].append((entry["key"], entry["judged"], entry["steps"]))
            item["outside"] |= entry["state"] == "outside"
    first = [entries.pop(key) for key in HEADLINES if key in entries and entries[key]["outside"]]
    outside = [item for item in entries.values() if item["outside"]]
    return {"first": first, "rest": outside, "at_times": [item for item in entries.values() if not item["outside"]]}


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
        "steps": f"{run.last['step']} of {trainer.get('steps', '?')}",
        "started": dict(described(run.origins[0])).get("started") if run.origins else None,
    }
    return [(name, str(value)) for name, value in facts.items() if value not in (None, "")]


def _tiles(run: Run) -> list[dict[str, str]]:
    tiles = []
    for task, accuracy in run.accuracy().items():
        values = [
            f"{value:.3f}" if value is not None else "not measured" for value in (accuracy.before, accuracy.after)
        ]
        problems = run.series(f"eval/{task}/problems")[1][-1:]
        note = "greedy, before → after training" + "".join(f", {count:.0f} problems" for count in problems)
        tiles.append({"name": f"Held-out accuracy on {task}", "value": " → ".join(values), "note": note})
    steps, rewards = run.series("reward/mean")
    if len(steps):
        part = max(len(rewards) // 10, 1)
        value = f"{rewards[:part].mean():.3f} → {rewards[-part:].mean():.3f}"
        note = "first step → last step" if part == 1 else f"first {part} steps → last {part} steps"
        tiles.append({"name": "Mean reward", "value": value, "note": note})
    _, k3 = run.series("mismatch/k3")
    if len(k3):
        note = f"median over {len(k3)} step{'s' if len(k3) > 1 else ''}; {short(k3.min())} to {short(k3.max())}"
        tiles.append({"name": "Mismatch k3, nats per token", "value": short(float(np.median(k3))), "note": note})
    if (share := clipped_share(run)) is not None:
        _, norms = run.series("optim/grad_norm")
        bound = number(run.config.get("optim", {}).get("grad_clip"))
        note = f"gradient norm {short(norms.min())} to {short(norms.max())}, optim.grad_clip {bound}"
        tiles.append({"name": "Updates clipped", "value": f"{share:.0%}", "note": note})
    _, seconds = run.series("time/step")
    if len(seconds):
        note = f"median {np.median(seconds):.1f} s per step"
        tiles.append({"name": "Time in steps", "value": duration(float(seconds.sum())), "note": note})
    return tiles


def _sections(run: Run) -> list[dict[str, Any]]:
    common = [_section(run, title, charts) for title, charts in RUN_CHARTS]
    by_method = [_section(run, title, charts) for title, charts in METHOD_CHARTS]
    return [*common, *(section for section in by_method if section["charts"])]


def _section(run: Run, title: str, charts: Sequence[Chart]) -> dict[str, Any]:
    resolved = [(chart, resolve(chart, run)) for chart in charts]
    return {
        "title": title,
        "charts": [_chart(run, drawn) for _, drawn in resolved if drawn is not None],
        "absent": [chart.title.lower() for chart, drawn in resolved if drawn is None],
    }


def _chart(run: Run, drawn: ResolvedChart) -> dict[str, Any]:
    _, values = run.series(drawn.chart.about if "<" not in drawn.chart.about else drawn.lines[0][1])
    single = len(drawn.lines) == 1 and len(values) > 0
    return {
        "title": drawn.chart.title,
        "now": f"last {number(values[-1])}" if single else "",
        # Not escaped: matplotlib escapes every label itself.
        "svg": Markup(draw_chart(drawn, run)),
        "what": drawn.chart.what or drawn.chart.caption.what,
        "healthy": drawn.healthy,
    }


def _ordered(keys: Iterable[str]) -> list[str]:
    """Returns documented keys in the order of the documentation, then the others."""
    from trimtab.runs.metric_catalog import sections

    order = {row.key: index for index, row in enumerate(row for part in sections() for row in part.metrics)}
    return sorted(keys, key=lambda key: (order[row.key] if (row := metric(key)) else len(order), key))


def _entry(run: Run, key: str, finding: Finding | None) -> dict[str, Any]:
    """Returns one row of the metrics table; `state` is over the whole run, `judged` the value it is based on."""
    last = run.last.get(key)
    _, values = run.series(key)
    first = next((step[key] for step in run.rows if key in step), None)
    state = "" if finding is None else finding.state
    return {
        "key": key,
        "metric": metric(key),
        "first": number(first),
        "last": number(last) if key in run.last else "–",
        "low": number(values.min()) if len(values) else "",
        "high": number(values.max()) if len(values) else "",
        "median": number(float(np.median(values))) if len(values) else "",
        "state": state,
        "steps": "" if finding is None else finding.steps,
        "judged": "" if finding is None else beside(_judged_value(finding), bounds(key), number),
        "tone": {"healthy": "good", "outside": "warn", "at times": "plain"}.get(state, ""),
    }


def _judged_value(finding: Finding) -> float:
    return finding.worst.median if finding.outside else finding.median


def _samples(path: Path) -> list[dict[str, Any]]:
    files = sample_steps(path)
    return [_sample_step(path, step, files[step]) for step in evenly_spaced(list(files), STEPS_SHOWN)]


def _sample_step(path: Path, step: int, file: Path) -> dict[str, Any]:
    samples = read_samples(file)
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    shown = list(groups.values())[:GROUPS_SHOWN]
    return {
        "step": step,
        "file": str(file.relative_to(path)),
        "count": len(samples),
        "mean": _mean(samples),
        "groups": [_group(group) for group in shown],
        "hidden": len(groups) - len(shown),
    }


def _group(samples: Sequence[Sample]) -> dict[str, Any]:
    first = samples[0]
    end = first.prompt.strip().splitlines()[-1:] or [""]
    # The last line of a few-shot prompt is often only "Answer:"; the question is the line before.
    line = end[0] if len(end[0]) > 12 else " ".join(first.prompt.strip().splitlines()[-2:])
    return {
        "prompt": _truncate(first.prompt),
        "prompt_end": line[-120:],
        "answer": first.answer,
        "mean": _mean(samples),
        "count": len(samples),
        "samples": [_sample_entry(sample) for sample in _spread(samples)],
        "hidden": max(len(samples) - SAMPLES_SHOWN, 0),
    }


def _spread(samples: Sequence[Sample]) -> list[Sample]:
    """Returns up to four samples from the highest reward to the lowest, both ends included."""
    return evenly_spaced(sorted(samples, key=lambda sample: -sample.reward), SAMPLES_SHOWN)


def _sample_entry(sample: Sample) -> dict[str, Any]:
    parts: Mapping[str, float] = sample.rewards if len(sample.rewards) > 1 else {}
    return {
        "reward": number(sample.reward),
        "tone": "good" if sample.reward > 0 else "plain",
        "parts": ", ".join(f"{name} {number(value)}" for name, value in parts.items()),
        "cut": sample.finish == "length",
        "text": _truncate(sample.text) or "(empty)",
    }


def _mean(samples: Sequence[Sample]) -> str:
    return f"{np.mean([sample.reward for sample in samples]):.3f}" if samples else "–"


def _truncate(text: str) -> str:
    if len(text) <= CHARACTERS_SHOWN:
        return text
    return f"{text[:CHARACTERS_SHOWN]} … ({len(text) - CHARACTERS_SHOWN:,} more characters)"
