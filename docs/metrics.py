"""Prints the page of metrics from the table of metrics, for the documentation site: `python docs/metrics.py`."""

from __future__ import annotations

from trimtab.runs.metric_catalog import Metric, sections

HEAD = """# Metrics

Every key that a run writes to `metrics.jsonl`, from `src/trimtab/runs/metrics.toml`. What to look at first:
[evaluation](evaluation.md#watching-a-run).

Symbols: π is the current policy (`logp_current`), π_old the proximal policy (`logp_proximal`: trainer numerics, weights
at the start of the update phase), μ the behavior policy (`logp_behavior`: what the sampler reported), ρ = π_old/μ per
token. A sum or mean over t runs over all trained tokens of the step, over i over its responses. `<name>` stands for any
name. Healthy ranges are for dense models sampled in bf16; where one depends on the run, the row says what to compare.
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
