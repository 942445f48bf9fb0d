"""Detects `misaligned` where the trainer's log-probs belong to another response.

A response whose log-probs disagree is compared with the others of equal length. Its own list is found where the
distance of another response's list is less than `MAX_DISTANCE` of the response's own and of that of the second-best
list, since among thousands of short, near-certain responses some list always fits slightly better. Where its own list
is lost, two responses carry one list of the trainer, to the last digit, and the one that disagrees has the wrong one.
Reported when `MIN_RESPONSES` are found, and `MIN_SHARE` of those that disagree, so that a policy that has
really changed is not mistaken for it.
"""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.causes.detector import CauseMatch, Context
from trimtab.diagnosis.causes.evidence import confidence, share
from trimtab.diagnosis.causes.logprob_pairs import LogprobPairs

MIN_OWN_DISTANCE = 0.3  # nats between a response's two lists from which on it disagrees
MAX_DISTANCE = 0.25  # largest distance of the right list, relative to the present one and the second best
MIN_RESPONSES = 4  # fewest responses that have another one's list
MIN_SHARE = 0.25  # least share of them among the responses that disagree
MAX_FIT = 3.0  # times the usual distance that a response with the right list may have
MAX_EQUAL = 0.05  # share of agreeing responses with equal lists above which equal lists say nothing
MIN_SURPRISE = 3.0  # nats of surprise that a response needs to be told from others

CAP, MAX_CANDIDATES = 3.0, 500


def find_swapped_responses(tokens: LogprobPairs, _context: Context) -> list[CauseMatch]:
    """Finds responses with the log-probs of another one, and restores their own or leaves them out."""
    edges = np.flatnonzero(np.diff(tokens.row, prepend=-1, append=-1))
    starts, lengths = edges[:-1], np.diff(edges)
    if len(starts) < 3:
        return []
    own = np.add.reduceat(np.minimum(np.abs(tokens.log_ratio), CAP), starts) / lengths
    surprise = -np.add.reduceat(tokens.behavior, starts)
    told = (lengths >= 4) & (surprise > MIN_SURPRISE)  # from the others
    disagrees = told & (own > MIN_OWN_DISTANCE)
    trainer = tokens.trainer.copy()
    restored, copied = np.zeros(len(starts), dtype=bool), np.zeros(len(starts), dtype=bool)
    for length in np.unique(lengths[disagrees]):
        equal = np.flatnonzero(lengths == length)[:MAX_CANDIDATES]
        if len(equal) < 3:
            continue
        index = starts[equal][:, None] + np.arange(length)
        values = tokens.trainer[index]
        copied[equal] = disagrees[equal] & _repeated(tokens, index, ~disagrees[equal])
        for i in np.flatnonzero(disagrees[equal]):
            distance = np.minimum(np.abs(tokens.behavior[index[i]] - values), CAP).mean(-1)
            owner, second = (int(row) for row in np.argpartition(distance, 1)[:2])
            if owner != i and distance[owner] < MAX_DISTANCE * min(own[equal[i]], distance[second]):
                trainer[index[i]] = values[owner]
                restored[equal[i]] = True
    swapped = restored | copied
    found = int(swapped.sum())
    if found < max(MIN_RESPONSES, MIN_SHARE * disagrees.sum()):
        return []
    # A response that is too certain to show a wrong list may have one as well, as may one that fits worse than usual.
    after = np.add.reduceat(np.minimum(np.abs(trainer - tokens.behavior), CAP), starts) / lengths
    usual = np.median(after[restored]) if restored.any() else np.quantile(own[told], 0.2)
    kept = restored | (told & (own < MAX_FIT * usual + 0.01))
    evidence = (
        f"{found} of {len(starts)} responses have the trainer's log-probs of another response of equal length: "
        f"{int(restored.sum())} of them fit those far better than their own, {int(copied.sum())} have a list that "
        "another response has as well, to the last digit"
    )
    rest = tokens.repaired(trainer, np.repeat(kept, lengths))
    sure = confidence(found, MIN_RESPONSES)
    return [CauseMatch("misaligned", evidence, rest, int(lengths[swapped].sum()), sure)]


def _repeated(tokens: LogprobPairs, index: np.ndarray, agrees: np.ndarray) -> np.ndarray:
    """Returns which responses (responses,) have the trainer's list of a different one; index: tokens (responses, T).

    Without ids, equal responses are those that the sampler gives equal log-probs; none is counted where responses that
    agree have equal lists as well.
    """
    _, same, count = np.unique(tokens.trainer[index], axis=0, return_inverse=True, return_counts=True)
    same = same.reshape(-1)
    if tokens.ids is None and share(np.bincount(same[agrees])[same[agrees]] > 1) > MAX_EQUAL:
        return np.zeros(len(index), dtype=bool)
    text = np.round(tokens.behavior[index], 1) if tokens.ids is None else tokens.ids[index]
    _, text = np.unique(text, axis=0, return_inverse=True)
    both = np.stack([same, text.reshape(-1)], axis=1)
    _, equal, number = np.unique(both, axis=0, return_inverse=True, return_counts=True)
    return count[same] > number[equal.reshape(-1)]
