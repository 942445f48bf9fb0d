"""Ranks the candidates for a difference that nothing in the data proves, by the signs that its tokens show.

A candidate's score is the sum of its log odds (candidates.toml): a prior, and what each sign adds or takes away. The
order is what is meant to be used; the scores are not probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.diagnosis.records import Candidate, CandidateKind, read_table

KINDS = tuple(CandidateKind(**row) for row in read_table("candidates.toml")["candidate"])
EXCLUDED, FOUND = -100.0, 100.0


def rank(signs: Mapping[str, str], side: str = "", tested: Mapping[str, bool] | None = None) -> tuple[Candidate, ...]:
    """Returns the candidates, most likely first; empty without signs.

    side: the side that `trimtab rescore` found to be off, "" if unknown. tested: whether the test of a candidate found
    it, by name.
    """
    if not signs:
        return ()
    tested = tested or {}
    scored = []
    for kind in KINDS:
        score = kind.prior
        score += sum(weight for name, weight in kind.speaks_for.items() if name in signs)
        score -= sum(weight for name, weight in kind.speaks_against.items() if name in signs)
        if (side and side not in kind.sides) or not tested.get(kind.name, True):
            score += EXCLUDED
        if tested.get(kind.name):
            score += FOUND
        scored.append((score, kind))
    scored.sort(key=lambda pair: -pair[0])
    return tuple(
        _candidate(kind, signs, is_found=tested.get(kind.name, False)) for score, kind in scored if score > EXCLUDED / 2
    )


def _candidate(kind: CandidateKind, signs: Mapping[str, str], *, is_found: bool) -> Candidate:
    """Returns the candidate with the sign that speaks most for it, and the one that speaks most against it."""
    speaks_for, speaks_against = (
        max((name for name in weights if name in signs), key=lambda name: weights[name], default="")
        for weights in (kind.speaks_for, kind.speaks_against)
    )
    test = f"{kind.test}: {kind.wrong} if it is this one"
    return Candidate(kind.name, kind.plain, signs.get(speaks_for, ""), signs.get(speaks_against, ""), test, is_found)
