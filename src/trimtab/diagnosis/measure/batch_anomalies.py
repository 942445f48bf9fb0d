"""Anomalies of a batch besides its log-probs: end tokens, equal responses, advantages against rewards."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trimtab.diagnosis.records import finding
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import Finding
from trimtab.text import short

CHANCE = -12.0  # log-probability of a response below which it does not occur twice by chance
MIN_RESPONSES = 8  # fewest responses that repeat another one, or whose end is not trained
MIN_SHARE = 0.1  # least share of such responses among all
MIN_GROUPS = 3  # fewest groups whose advantages contradict their rewards
MIN_GROUP_SHARE = 0.1  # least share of such groups among those that could
ZERO = 0.01  # an advantage below this part of the largest one counts as 0
MOST_ENDS, MOST_BEFORE = 0.9, 0.5  # least share of one id at the ends; largest share of one id before them


def find_anomalies(sample: TokenTable) -> Iterator[Finding]:
    """Yields anomalies: an end token that is not trained, equal responses, advantages against rewards."""
    yield from _find_untrained_ends(sample)
    prompt = sample.group if sample.prompt is None else sample.prompt
    if prompt is None:
        return
    step = np.zeros_like(prompt) if sample.step is None else sample.step
    yield from _find_repeats(sample, np.stack([prompt, step], axis=1))
    prompt = prompt if sample.group is None else sample.group
    yield from _find_wrong_advantages(sample, np.stack([prompt, step], axis=1))


def _find_untrained_ends(sample: TokenTable) -> Iterator[Finding]:
    """Yields a finding if many responses end with one untrained token, of the same id, that the sampler drew."""
    trained = np.flatnonzero(sample.mask)
    last = trained[np.diff(sample.row[trained], append=-1) != 0]
    end = last[last + 2 == sample.starts[sample.row[last] + 1]] + 1
    if sample.ids is None or len(end) < max(MIN_RESPONSES, MIN_SHARE * sample.responses):
        return
    # A token that a template adds is not drawn: its log-prob is a constant, or the end token precedes it.
    columns = sample.ids[end], sample.ids[end - 1], sample.behavior[end]
    same, *others = (np.unique(values, return_counts=True)[1].max() / len(end) for values in columns)
    if same >= MOST_ENDS and max(others) < MOST_BEFORE:
        yield finding("end-token", count=len(end), responses=sample.responses)


def _find_repeats(sample: TokenTable, prompt_step: np.ndarray) -> Iterator[Finding]:
    """Yields a finding if improbable responses to one prompt in one step are equal. prompt_step: (responses, 2)."""
    if sample.ids is None:
        return
    likely = np.bincount(sample.row, np.where(sample.mask, sample.behavior, 0.0), minlength=sample.responses)
    rare = np.flatnonzero(likely < CHANCE)
    text = [hash(sample.ids[sample.starts[i] : sample.starts[i + 1]].tobytes()) for i in rare.tolist()]
    different = np.unique(np.column_stack([prompt_step[rare], text]), axis=0) if len(rare) else rare
    count = len(rare) - len(different)
    if count >= max(MIN_RESPONSES, MIN_SHARE * sample.responses):
        yield finding("repeated", count=count, responses=sample.responses)


def _find_wrong_advantages(sample: TokenTable, group_step: np.ndarray) -> Iterator[Finding]:
    """Yields findings if advantages are not 0 in groups with equal rewards, or fall as rewards rise."""
    if sample.reward is None or sample.advantage is None:
        return
    known = np.isfinite(sample.reward) & np.isfinite(sample.advantage)
    if not known.any():
        return
    reward, advantage = sample.reward[known], sample.advantage[known]
    index, number = np.unique(group_step[known], axis=0, return_inverse=True, return_counts=True)[1:]
    index = index.reshape(-1)
    apart, away = (values - (np.bincount(index, values) / number)[index] for values in (reward, advantage))
    largest = np.zeros(len(number))
    np.maximum.at(largest, index, np.abs(advantage))
    varies = np.bincount(index, np.abs(apart)) > 1e-9
    moved = largest > ZERO * largest.max()
    equal = (number > 1) & ~varies
    against = varies & moved & (np.bincount(index, apart * away) < 0)
    if (wrong := equal & moved).sum() >= max(MIN_GROUPS, MIN_GROUP_SHARE * equal.sum()):
        most = short(float(largest[wrong].max()))
        yield finding("advantage-equal", count=int(wrong.sum()), groups=int(equal.sum()), largest=most)
    if (count := int(against.sum())) >= max(MIN_GROUPS, MIN_GROUP_SHARE * varies.sum()):
        yield finding("advantage-against", count=count, groups=int(varies.sum()))
