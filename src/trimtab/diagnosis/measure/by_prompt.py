"""The view by prompt: those whose responses carry most of the mismatch, and whether an error repeats for a prompt."""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.measure.views import ENVELOPE, view
from trimtab.diagnosis.records import View
from trimtab.diagnosis.tokens import TokenTable
from trimtab.diagnosis.variance import explained

MOST = 20
"""Number of prompts shown."""


def prompt_view(sample: TokenTable) -> View | None:
    """Returns the prompts of the sample with the largest sums of k3, in that order; None if prompts are unknown.

    columns: `number` of the prompt, in the order of first occurrence, `responses` and `share` of k3. Chance falls on
    other prompts every time; arithmetic and routing repeat. The note says how much of the variance of the size of
    responses' errors the prompt decides.
    """
    if sample.prompt is None or not sample.mask.any():
        return None
    row = sample.row[sample.mask]
    log = (sample.trainer.astype(np.float64) - sample.behavior)[sample.mask]
    excess = np.expm1(np.clip(log, -20, 20))
    number, prompt = np.unique(sample.prompt[row], return_inverse=True)
    per_token = (excess, log, excess - log, np.abs(log))
    sums = np.column_stack([np.bincount(prompt, values) for values in per_token])
    count = np.bincount(prompt)
    top = np.lexsort((number, -sums[:, 2]))[:MOST]
    low, median, high = np.array([np.quantile(log[prompt == one], ENVELOPE) for one in top]).T
    rows, first = np.unique(row, return_index=True)
    size = np.log(np.bincount(np.searchsorted(rows, row), np.abs(log)) / np.bincount(np.searchsorted(rows, row)) + 1e-9)
    columns = {
        "number": number[top],
        "responses": np.bincount(prompt[first], minlength=len(number))[top],
        "share": sums[top, 2] / max(float(sums[:, 2].sum()), 1e-300),
    }
    part = max(explained(size, prompt[first], least=2), 0.0)
    note = f"the prompt decides {part:.0%} of the variance of the size of its responses' errors"
    return view(
        "prompt", [str(one) for one in number[top]], count[top], sums[top], (low, median, high), None, columns, note
    )
