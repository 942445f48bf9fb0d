"""Compares the size and the direction of noise between groups of tokens.

Rounding, quantized weights and routing move logits up and down by about one size, whatever the step, the age of the
weights, the prompt or the depth in the context, and on average not at all, whatever the probability of the token. What
moves tokens of one group further, or tokens of one probability all one way, is something else: `unexplained`, where no
cause accounts for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.causes.detector import LEAST_K3, LEAST_RMS, Residual
from trimtab.diagnosis.causes.evidence import correlation, growth_of, log_size, rms_of, usual_rms
from trimtab.diagnosis.causes.logprob_pairs import LogprobPairs
from trimtab.diagnosis.measure.grouped import explained
from trimtab.diagnosis.records import Cause

MAX_K3 = 0.6  # largest k3 that is called noise [4 bits in exact streams: .1]
MAX_DIRECTION = 0.35  # largest share of the variance of shifts that the probability decides [8 bits: .3; T: .5]
MAX_UNEVEN = 0.2  # largest share of the variance of log sizes that a group decides [8 bits, trained: .08, bases: .02]
MIN_GROUP_TOKENS = 40  # fewest undecided tokens of a group that is compared
MIN_GROUPS = 2  # fewest groups with so many tokens that are compared
MIN_PROMPT_TOKENS = 20  # fewest undecided tokens of a prompt that is compared
MIN_PROMPTS = 8  # fewest prompts with so many tokens that are compared
MIN_STEP_GROWTH = 1.8  # least growth of sizes from the step with the smallest to the one with the largest
STEP_GROWTH_Z = 6.0  # standard errors of that growth, large since both steps are selected
MIN_STEP_ORDER = 0.9  # least share of the variance of sizes that an ascending curve over the steps explains
MAX_STEP_GROWTH = 3.0  # growth of sizes above which a mismatch is not called noise [4 bits, in training: 2.3]
UNEXPLAINED_CONFIDENCE = 0.65  # confidence of unexplained [share right in the zoo]
MIN_GROUP_PART = 0.05  # smallest share of the tokens that a group pointed out may have
MIN_GROUP_LIFT = 2.0  # least ratio of a group's share of k3 to its share of the tokens

QUANTIZED = {"eight bits": (0.13, 0.44), "four bits": (0.39, 2.0)}
"""Smallest and largest root mean square of logits that was measured, by the bits of weights (docs/detection.md)."""
PARTS = 8
"""Number of parts, with equally many tokens, that depths and probabilities are split into."""


def objection(tokens: LogprobPairs, residual: Residual) -> str:
    """Returns why a difference cannot be noise, empty if it can: noise has mean ratio 1, no direction and one size."""
    if residual.contract == "outside":
        return "rounding, quantization and routing leave the mean ratio at 1, so this is none of them"
    if residual.contract == "silent":
        return "a few tokens decide the mean, so noise can be neither named nor excluded"
    if residual.k3 > MAX_K3:
        return f"beyond {MAX_K3:g} quantized weights are not told from other damage"
    if (part := direction(tokens)) > MAX_DIRECTION:
        return f"the probability of a token decides where its logit moves ({part:.0%} of the variance), unlike noise"
    steps = drift_between_steps(tokens)
    if steps is not None and np.ptp(steps.sizes) > math.log(MAX_STEP_GROWTH):
        return f"{steps.text}, and noise has one size"
    parts = {name: part for name, part in uneven_by(tokens).items() if name != "step"}  # k3 decides about steps, above
    name, part = max(parts.items(), key=lambda item: item[1], default=("", 0.0))
    if part > MAX_UNEVEN:
        return f"the {name} decides {part:.0%} of the variance of its size, and noise has one size"
    return ""


def direction(tokens: LogprobPairs) -> float:
    """Returns the share of the variance of shifts that the token's probability explains: near 0 for noise."""
    undecided = tokens.undecided
    if undecided.sum() < MIN_GROUP_TOKENS:
        return 0.0
    shift = tokens.shift[undecided]
    scale = 1.48 * float(np.median(np.abs(shift)))
    return explained(np.clip(shift, -5 * scale, 5 * scale), _parts(tokens.mean[undecided]))


def uneven_by(tokens: LogprobPairs) -> dict[str, float]:
    """Returns the share of the variance of log sizes that steps, ages, prompts and depths explain, by their name."""
    tokens = tokens.distinct
    undecided = tokens.undecided
    if undecided.sum() < 2 * MIN_GROUP_TOKENS:
        return {}
    size = log_size(tokens.shift[undecided])
    columns = {"step": tokens.step, "age of the weights": tokens.age, "prompt": tokens.prompt}
    found = {}
    for name, group in {**columns, "depth": _parts(tokens.depth)}.items():
        if group is None:
            continue
        least, groups = (MIN_PROMPT_TOKENS, MIN_PROMPTS) if name == "prompt" else (MIN_GROUP_TOKENS, MIN_GROUPS)
        count = np.unique(group[undecided], return_counts=True)[1]
        if (count >= least).sum() >= groups:
            found[name] = explained(size, group[undecided], least)
    return found


def _parts(values: np.ndarray) -> np.ndarray:
    """Returns the part, from 0, that each value is in: `PARTS` parts with equally many values."""
    return np.searchsorted(np.quantile(values, np.arange(1, PARTS) / PARTS), values, side="left")


@dataclass(frozen=True)
class Steps:
    """Steps with enough tokens, ascending. sizes: mean log size of the shifts of each. text: how much these differ."""

    steps: list[int]
    sizes: list[float]
    text: str

    @property
    def ascends(self) -> bool:
        """Whether sizes grow in the order of the steps."""
        return self.order >= MIN_STEP_ORDER

    @property
    def order(self) -> float:
        """The share of the variance of sizes that the best ascending curve over the steps explains.

        It is 1 also where sizes rise at first and then stay, of which a slope or a correlation shows little.
        """
        parts: list[list[float]] = []
        for size in self.sizes:
            parts.append([size])
            while len(parts) > 1 and np.mean(parts[-2]) >= np.mean(parts[-1]):  # what descends has one mean
                parts[-2:] = [parts[-2] + parts[-1]]
        ascending = np.concatenate([np.full(len(part), np.mean(part)) for part in parts])
        return 1 - float(np.square(self.sizes - ascending).mean() / np.var(self.sizes))


def drift_between_steps(tokens: LogprobPairs) -> Steps | None:
    """Returns the sizes of noise by step if they differ, or None.

    Rounding moves the larger logits of a policy that has become certain further, and k3 by at most as much, since fewer
    of its tokens are undecided. Other weights make k3 grow with the square of the shifts, so that it has to grow with
    more than their power 1.5.
    """
    step = tokens.step
    if step is None:
        return None
    undecided, shift = tokens.undecided, tokens.shift
    shifts = {int(s): shift[undecided & (step == s)] for s in np.unique(step)}
    shifts = {s: values for s, values in shifts.items() if len(values) >= MIN_GROUP_TOKENS}
    if len(shifts) < 2:
        return None
    sizes = {s: float(log_size(values).mean()) for s, values in shifts.items()}
    smallest, largest = min(sizes, key=lambda s: sizes[s]), max(sizes, key=lambda s: sizes[s])
    growth, z = growth_of(shifts[largest], shifts[smallest])
    is_clear = growth >= MIN_STEP_GROWTH and z >= STEP_GROWTH_Z
    if not is_clear or rms_of(shifts[largest]) < LEAST_RMS:
        return None
    low, high = (Residual.of(tokens.select(step == at)).k3 for at in (smallest, largest))
    if high < growth**1.5 * low:
        return None
    text = f"logits move {growth:.1f} times as far at step {largest} as at step {smallest} (z = {z:.1f})"
    return Steps(list(sizes), list(sizes.values()), text)


def find_unexplained(tokens: LogprobPairs, left: Residual, floor: float, *, is_rest: bool) -> Cause | None:
    """Returns the cause, None within the noise floor; `is_rest`: whether other causes were found and undone."""
    if left.contract == "inside" and left.k3 < max(LEAST_K3, 3 * floor):
        return None
    related = correlation(np.exp(tokens.behavior), np.exp(tokens.trainer))
    evidence = "after the causes above are undone, " if is_rest else ""
    evidence += f"k3 {left.k3:.2g}, {left.text}, correlation of the probabilities {related:.2f}"
    if reason := objection(tokens, left):
        evidence += f": {reason}"
    if left.contract != "outside":
        evidence += _size_text(tokens)
    return Cause("unexplained", UNEXPLAINED_CONFIDENCE, evidence + _where(tokens), share_of_k3=1.0, tokens=left.tokens)


def _size_text(tokens: LogprobPairs) -> str:
    """Compares the size of the shifts with that of quantized weights; empty where it is smaller."""
    undecided = tokens.undecided
    if undecided.sum() < MIN_GROUP_TOKENS:
        return ""
    rms = usual_rms(tokens.shift[undecided])
    if rms < min(low for low, _ in QUANTIZED.values()):
        return ""
    alike = [bits for bits, (low, high) in QUANTIZED.items() if low <= rms <= high]
    given = f"as with weights of {' or '.join(alike)}" if alike else "more than quantized weights give"
    return f"; logits differ by {rms:.2g} (root mean square), {given}"


def _where(tokens: LogprobPairs) -> str:
    """Points at the group of tokens (a turn, a step, a stretch of responses) with far more k3 than the others."""
    k3 = tokens.k3
    groups = {"turn": tokens.turn + 1, "tenth of the response": tokens.table.decile[tokens.index] + 1}
    if tokens.step is not None:
        groups["step"] = tokens.step
    best, text = MIN_GROUP_LIFT, ""
    for name, group in groups.items():
        for value in np.unique(group)[:1000]:
            inside = group == value
            part, mass = inside.mean(), k3[inside].sum() / max(k3.sum(), 1e-300)
            if MIN_GROUP_PART < part < 0.9 and mass > best * part:
                best, text = mass / part, f"; {name} {value} holds {mass:.0%} of k3 with {part:.0%} of the tokens"
    return text
