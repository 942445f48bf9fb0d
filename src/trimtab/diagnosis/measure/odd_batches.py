"""What is odd about the responses of a batch: several that are one, advantages that do not follow from the rewards."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trimtab.diagnosis.records import finding
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import Finding
from trimtab.text import short

CHANCE = -12.0  # log-probability of a response below which it does not occur twice by chance
MIN_REPEATED = 8  # fewest responses that repeat another one
MIN_REPEATED_SHARE = 0.1  # least share of them among all
MIN_GROUPS = 3  # fewest groups whose advantages contradict their rewards
MIN_GROUP_SHARE = 0.1  # least share of them among the groups that can
ZERO = 0.01  # part of the largest advantage below which one counts as 0
MOST_ENDS, MOST_BEFORE = (
    0.9,
    0.5,
)  # least share of an id at the ends of responses, largest of one before it


def batch_findings(sample: TokenTable) -> Iterator[Finding]:
    """Yields what is odd: an end token that is not trained, equal responses, advantages against rewards."""
    yield from _end_tokens(sample)
    prompt = sample.group if sample.prompt is None else sample.prompt
    if prompt is None:
        return
    step = np.zeros_like(prompt) if sample.step is None else sample.step
    yield from _repeated(sample, np.stack([prompt, step], axis=1))
    prompt = prompt if sample.group is None else sample.group
    yield from _advantages(sample, np.stack([prompt, step], axis=1))


def _end_tokens(sample: TokenTable) -> Iterator[Finding]:
    """Whether one token, of one id, that the sampler drew follows the last trained one in many responses."""
    trained = np.flatnonzero(sample.mask)
    last = trained[np.diff(sample.row[trained], append=-1) != 0]
    end = last[last + 2 == sample.starts[sample.row[last] + 1]] + 1
    if sample.ids is None or len(end) < max(MIN_REPEATED, MIN_REPEATED_SHARE * sample.responses):
        return
    # What a template adds is not drawn: it has a constant for a log-prob, or the end token before it.
    columns = sample.ids[end], sample.ids[end - 1], sample.behavior[end]
    same, *others = (np.unique(values, return_counts=True)[1].max() / len(end) for values in columns)
    if same >= MOST_ENDS and max(others) < MOST_BEFORE:
        yield finding("end-token", count=len(end), responses=sample.responses)


def _repeated(sample: TokenTable, of: np.ndarray) -> Iterator[Finding]:
    """Whether improbable responses to one prompt in one step are the same, token for token; of: (responses, 2)."""
    if sample.ids is None:
        return
    likely = np.bincount(sample.row, np.where(sample.mask, sample.behavior, 0.0), minlength=sample.responses)
    rare = np.flatnonzero(likely < CHANCE)
    text = [hash(sample.ids[sample.starts[i] : sample.starts[i + 1]].tobytes()) for i in rare.tolist()]
    different = np.unique(np.column_stack([of[rare], text]), axis=0) if len(rare) else rare
    count = len(rare) - len(different)
    if count >= max(MIN_REPEATED, MIN_REPEATED_SHARE * sample.responses):
        yield finding("repeated", count=count, responses=sample.responses)


def _advantages(sample: TokenTable, of: np.ndarray) -> Iterator[Finding]:
    """Whether advantages of groups with equal rewards are not 0, or fall where rewards rise; of: (responses, 2)."""
    if sample.reward is None or sample.advantage is None:
        return
    known = np.isfinite(sample.reward) & np.isfinite(sample.advantage)
    if not known.any():
        return
    reward, advantage = sample.reward[known], sample.advantage[known]
    index, number = np.unique(of[known], axis=0, return_inverse=True, return_counts=True)[1:]
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
