"""Generates the page of the scalars that frameworks log; it is built with the site (docs/site.py)."""

from __future__ import annotations

from trimtab.monitor.curves import Scalar, known_scalars

HEAD = """# Scalars of each framework

What frameworks log about the mismatch of trainer and sampler, and how each number is computed. `trimtab diagnose
--scalars PATH` reads them from JSON, CSV, TensorBoard events or a trainer_state.json of transformers
([diagnose](diagnose.md#scalars-only)).

p and q are the log-probs of trainer and sampler for a sampled token, d = p - q. The expectation of -d and of
exp(d) - 1 - d over sampled tokens is the divergence KL(sampler, trainer). For noise of standard deviation s per token,
k3 is about s^2 / 2, the mean of |d| about 0.8 s. This page is generated from `src/trimtab/monitor/scalars.csv`.
"""
COLUMNS = "| logged as | quantity | formula | note | source |\n|---|---|---|---|---|"


def row(scalar: Scalar) -> str:
    cells = (f"`{scalar.name}`", scalar.quantity.replace("_", " "), scalar.formula, scalar.note, f"`{scalar.source}`")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def markdown() -> str:
    """Returns the page, without the last line break."""
    parts = [HEAD.strip()]
    for framework in dict.fromkeys(scalar.framework for scalar in known_scalars()):
        rows = [row(scalar) for scalar in known_scalars() if scalar.framework == framework]
        parts.append(f"## {framework}\n\n" + "\n".join([COLUMNS, *rows]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(markdown())
