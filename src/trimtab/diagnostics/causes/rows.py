"""`misaligned`, its other form: the trainer's log-probs are those of another response.

A response whose log-probs disagree is compared with every other one of equal length. Two samples of one prompt agree
only where they share tokens; so a stranger that fits much better than the own list, and whose own list fits nobody
here, is the right owner.
"""

from __future__ import annotations

import numpy as np

from trimtab.diagnostics.causes.evidence import Tokens, sureness
from trimtab.diagnostics.diagnosis import Cause

CAP, BAD, FIT, LEAST, MOST = 3.0, 0.3, 0.3, 2, 400


def find_swapped(tokens: Tokens) -> tuple[Cause | None, Tokens]:
    """The cause, if found, and the tokens with every response's own log-probs put back."""
    edges = np.flatnonzero(np.diff(tokens.row, prepend=-1, append=-1))
    starts, lengths = edges[:-1], np.diff(edges)
    own = np.add.reduceat(np.minimum(np.abs(tokens.log_ratio), CAP), starts) / lengths if len(starts) else starts
    bad = np.flatnonzero((own > BAD) & (lengths >= 4))
    trainer, found = tokens.trainer.copy(), 0
    for length in np.unique(lengths[bad]):
        some = bad[lengths[bad] == length][:MOST]
        if len(some) < 2:
            continue
        place = starts[some][:, None] + np.arange(length)
        behavior, values = tokens.behavior[place], tokens.trainer[place]
        for i, response in enumerate(some):
            distance = np.minimum(np.abs(behavior[i] - values), CAP).mean(-1)
            owner = int(np.argmin(distance))
            if owner != i and distance[owner] < FIT * own[response]:
                trainer[place[i]] = values[owner]
                found += 1
    if found < LEAST:
        return None, tokens
    evidence = (
        f"{found} of {len(starts)} responses carry the trainer's log-probs of another response of equal length: that "
        f"one's fit at less than {FIT:g} of the distance"
    )
    fix = "Keep responses and their log-probs in one order: join them by an id, not by place, after sorting or packing."
    return Cause("misaligned", sureness(found, LEAST), evidence, fix), tokens.repaired(
        trainer, np.ones(len(tokens), dtype=bool)
    )
