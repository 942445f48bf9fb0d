"""Detects `misaligned` where the trainer's log-probs belong to another response.

A response whose log-probs disagree is compared with the others of equal length. A list is a stranger's
when it fits at less than `FIT` of the own distance and at less than `FIT` of what the next best one does: among
thousands of short, near-certain responses something always fits a little. Named when at least `LEAST` are found, and
`MOST_OF` of those that disagree, or a policy that has really changed would be taken for it.
"""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.causes.evidence import Tokens, sureness
from trimtab.diagnosis.records import Cause

CAP, BAD, FIT, LEAST, MOST_OF, MOST = 3.0, 0.3, 0.15, 4, 0.5, 500
WORDS = 3.0  # nats in a response that can be told from others


def find_swapped_responses(tokens: Tokens) -> tuple[Cause | None, Tokens]:
    """The cause, if found, and the tokens with every response's own log-probs put back."""
    edges = np.flatnonzero(np.diff(tokens.row, prepend=-1, append=-1))
    starts, lengths = edges[:-1], np.diff(edges)
    own = np.add.reduceat(np.minimum(np.abs(tokens.log_ratio), CAP), starts) / lengths if len(starts) else starts
    words = -np.add.reduceat(tokens.behavior, starts) if len(starts) else starts
    bad = (own > BAD) & (lengths >= 4) & (words > WORDS)
    trainer, put_back, judged = tokens.trainer.copy(), np.zeros(len(starts), dtype=bool), 0
    for length in np.unique(lengths[bad]):
        equal = np.flatnonzero(lengths == length)[:MOST]
        if len(equal) < 3:
            continue
        place = starts[equal][:, None] + np.arange(length)
        values = tokens.trainer[place]
        for i in np.flatnonzero(bad[equal]):
            judged += 1
            distance = np.minimum(np.abs(tokens.behavior[place[i]] - values), CAP).mean(-1)
            owner, second = (int(place) for place in np.argpartition(distance, 1)[:2])
            if owner != i and distance[owner] < FIT * min(own[equal[i]], distance[second]):
                trainer[place[i]] = values[owner]
                put_back[equal[i]] = True
    found = int(put_back.sum())
    if found < max(LEAST, MOST_OF * judged):
        return None, tokens
    evidence = (
        f"{found} of {len(starts)} responses carry the trainer's log-probs of another response of equal length: that "
        f"one's fit at less than {FIT:g} of the distance"
    )
    fix = "Keep responses and their log-probs in one order: join them by an id, not by place, after sorting or packing."
    # The others may be strangers' too and be too certain to show it.
    return Cause("misaligned", sureness(found, LEAST), evidence, fix), tokens.repaired(
        trainer, np.repeat(put_back, lengths)
    )
