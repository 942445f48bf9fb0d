"""Generates docs/metrics.md from the table of metrics: `python docs/metrics.py > docs/metrics.md`."""

from __future__ import annotations

from trimtab.runs.metric_catalog import Metric, sections

HEAD = """# Metrics

Every key a run writes to `metrics.jsonl`, one JSON object per step. TensorBoard and W&B get the same keys, and
`report.html` draws most of them. This page is generated from `src/trimtab/runs/metrics.toml`
(`python docs/metrics.py > docs/metrics.md`); a test keeps the two equal and checks that every key a
real run logs is listed.

Symbols: π is the current policy (`logp_current`), π_old the proximal policy (`logp_proximal`: trainer numerics, weights
at the start of the update phase), μ the behavior policy (`logp_behavior`: what the sampler reported), ρ = π_old/μ per
token. A sum or mean over t runs over all trained tokens of the step, over i over its responses. `<name>` stands for any
name. Healthy ranges are for dense models sampled in bf16; where one depends on the run, the row says what to compare.

Beside it, `provenance.json` says where the numbers come from: a list with one object for each start of the run
(a resumed run has several), with `command`, `started` and `ended` (UTC), `seconds`, `outcome` (`finished`, `stopped` or
`failed`) and the `error` of a failure, `first_step` and `last_step`, `ranks`, `versions` (python, trimtab, torch,
transformers, and vLLM where it samples), `commit` (`id`, and whether files are `modified`; null where trimtab is not a
git checkout) and `hardware` (`cpu`, `cores`, `threads`, `memory` in bytes, `gpus`). `ended`, `seconds`, `outcome` and
`last_step` are null while a start is running, and where it was killed. No environment variables, host names or paths
are in it, except what the command line and an error message say. `report.html` shows it, `trimtab report --json`
prints it.

Three questions first:

1. Is the data what the trainer thinks it is? `mismatch/k3` (not 0; published: below 1e-3 for dense models, below 1e-1
   for mixtures of experts), `mismatch/pearson` (above 0.95).
2. How much of it counts? `mismatch/ess_token`, `weight/changed`, `reject/tokens`, `clip/*`.
3. Does it help? `eval/<task>/greedy` beside `reward/mean`.
"""


def markdown() -> str:
    """The whole page."""
    blocks = [HEAD]
    for section in sections():
        rows = "\n".join(_row(row) for row in section.metrics)
        blocks.append(
            f"## {section.title}\n\n{section.about}\n\n"
            "| key | what it is | formula | unit | healthy | when it is not |\n|---|---|---|---|---|---|\n"
            f"{rows}\n"
        )
    return "\n".join(blocks)


def _row(row: Metric) -> str:
    cells = (f"`{row.key}`", row.what, row.formula, row.unit, row.healthy, row.action)
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    # Outside of code, Markdown reads `<name>` as a tag and a bar as the end of the cell.
    escaped = text.replace("|", "\\|")
    return escaped if text.startswith("`") else escaped.replace("<", "&lt;")


if __name__ == "__main__":
    print(markdown(), end="")
