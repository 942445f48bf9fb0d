"""Ranks the candidates for a difference that nothing in the data proves, by the signs that its tokens show.

A candidate's score is the sum of its log odds (candidates.toml): a prior, and what each sign adds or takes away. The
order is what is meant to be used; the scores are not probabilities. Candidates that one test tells apart are a family;
the family with the most odds together comes first, which need not be that of the first candidate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trimtab.diagnosis.records import Candidate, CandidateKind, read_table

TESTS: Mapping[str, str] = read_table("candidates.toml")["test"]
KINDS = tuple(CandidateKind(**row | {"test": TESTS[row["test"]]}) for row in read_table("candidates.toml")["candidate"])


def rank(signs: Mapping[str, str], side: str = "", tested: Mapping[str, bool] | None = None) -> tuple[Candidate, ...]:
    """Returns the candidates, most likely first; empty without signs.

    side: the side that `trimtab rescore` found to be off, "" if unknown. tested: whether the test of a candidate found
    it, by name.
    """
    tested = tested or {}
    possible = (kind for kind in KINDS if (not side or side in kind.sides) and tested.get(kind.name, True) and signs)
    found = [_candidate(kind, signs, is_found=tested.get(kind.name, False)) for kind in possible]
    return tuple(sorted(found, key=lambda one: (one.found, one.odds), reverse=True))


def families(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Returns the candidates that one test tells apart together: a family that was found, then by the sum of odds."""
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.test, []).append(candidate)
    return sorted(groups.values(), key=lambda group: (group[0].found, sum(one.odds for one in group)), reverse=True)


def _candidate(kind: CandidateKind, signs: Mapping[str, str], *, is_found: bool) -> Candidate:
    """Returns the candidate with the sign that speaks most for it, and the one that speaks most against it."""
    weights = [{name: part[name] for name in part if name in signs} for part in (kind.speaks_for, kind.speaks_against)]
    odds = math.exp(kind.prior + sum(weights[0].values()) - sum(weights[1].values()))
    strongest, opposed = (signs[max(part, key=lambda name: part[name])] if part else "" for part in weights)
    return Candidate(kind.name, kind.plain, strongest, opposed, kind.test, kind.wrong, odds, is_found)
