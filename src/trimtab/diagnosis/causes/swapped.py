"""Detects `misaligned` where the trainer's log-probs belong to another response.

A response whose log-probs disagree is compared with the others of equal length. Another response's list matches when
its distance is less than `MAX_RELATIVE_DISTANCE` of the response's own and of that of the second-best list, since among
thousands of short, near-certain responses some list always fits slightly better. Reported when at least `MIN_RESPONSES`
match, and `MIN_SHARE` of those that disagree, so that a policy that has really changed is not mistaken for it.
"""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs, confidence
from trimtab.diagnosis.causes.what_is_left import Context, Finding

CAP, MIN_OWN_DISTANCE, MAX_RELATIVE_DISTANCE, MIN_RESPONSES, MIN_SHARE, MAX_CANDIDATES = 3.0, 0.3, 0.15, 4, 0.5, 500
MIN_SURPRISE = 3.0  # nats of surprise that a response needs to be distinguished from others


def find_swapped_responses(tokens: LogprobPairs, _context: Context) -> list[Finding]:
    """Finds responses with the log-probs of another one, and restores their own."""
    edges = np.flatnonzero(np.diff(tokens.row, prepend=-1, append=-1))
    starts, lengths = edges[:-1], np.diff(edges)
    own_distance = (
        np.add.reduceat(np.minimum(np.abs(tokens.log_ratio), CAP), starts) / lengths if len(starts) else starts
    )
    surprise = -np.add.reduceat(tokens.behavior, starts) if len(starts) else starts
    disagrees = (own_distance > MIN_OWN_DISTANCE) & (lengths >= 4) & (surprise > MIN_SURPRISE)
    trainer, repaired, compared = tokens.trainer.copy(), np.zeros(len(starts), dtype=bool), 0
    for length in np.unique(lengths[disagrees]):
        equal = np.flatnonzero(lengths == length)[:MAX_CANDIDATES]
        if len(equal) < 3:
            continue
        index = starts[equal][:, None] + np.arange(length)
        values = tokens.trainer[index]
        for i in np.flatnonzero(disagrees[equal]):
            compared += 1
            distance = np.minimum(np.abs(tokens.behavior[index[i]] - values), CAP).mean(-1)
            owner, second = (int(row) for row in np.argpartition(distance, 1)[:2])
            if owner != i and distance[owner] < MAX_RELATIVE_DISTANCE * min(own_distance[equal[i]], distance[second]):
                trainer[index[i]] = values[owner]
                repaired[equal[i]] = True
    swapped = int(repaired.sum())
    if swapped < max(MIN_RESPONSES, MIN_SHARE * compared):
        return []
    evidence = (
        f"{swapped} of {len(starts)} responses carry the trainer's log-probs of another response of equal length: that "
        f"one's fit at less than {MAX_RELATIVE_DISTANCE:g} of the distance"
    )
    fix = "Keep responses and their log-probs in one order: join them by an id, not by place, after sorting or packing."
    # Only the repaired responses are kept: the others may be swapped as well and too certain to show it.
    rest = tokens.repaired(trainer, np.repeat(repaired, lengths))
    return [Finding("misaligned", evidence, fix, rest, len(rest), confidence(swapped, MIN_RESPONSES))]
