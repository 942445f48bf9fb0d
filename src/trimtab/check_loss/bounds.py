"""What differs in the bounds of a loss and an objective: clips, caps and masks."""

from __future__ import annotations

from dataclasses import replace

from trimtab.check_loss.bends import describe, same
from trimtab.check_loss.probes import DRIFT, DRIFT_ALL, MISMATCH, MISMATCH_ALL, PROBES, TOKENS, Probe
from trimtab.check_loss.readings import Readings

Side = tuple[bool, int]
"""Whether A > 0, and the direction in which the ratio leaves 1."""
SIDES: dict[Side, str] = {(True, 1): "A > 0 above 1", (True, -1): "A > 0 below 1"}
SIDES |= {(False, 1): "A < 0 above 1", (False, -1): "A < 0 below 1"}


def differing_bounds(mine: Readings, theirs: Readings, name: str) -> list[tuple[str, str, str]]:
    """Returns the first difference of each kind, those first that name a cause.

    Each is a kind, the key of its sentence in differences.toml, and the bounds in words.
    """
    first: dict[str, tuple[str, str, str]] = {}
    for probe in PROBES:
        a, b = mine.bends(probe), theirs.bends(probe)
        changed = [side for side in b if not same(a[side], b[side])]
        if not changed or _of_mean(mine, theirs, probe, changed):
            continue
        kind, key = _cause(mine, theirs, probe, changed)
        sides = [
            f"{SIDES[side]} the gradient's weight {describe(a[side])}, in {name} it {describe(b[side])}"
            for side in (changed[:1] if kind == "level" else changed)
        ]
        first.setdefault(kind, (kind, key, f"{theirs.label(probe)}: {'; '.join(sides)}"))
    return sorted(first.values(), key=lambda one: one[0] in ("clip", "weight"))


def _cause(mine: Readings, theirs: Readings, probe: Probe, changed: list[Side]) -> tuple[str, str]:
    """Returns the kind of difference, and what to change."""
    a, b, current = mine.bends(probe), theirs.bends(probe), probe.policy == "current"
    upper, lower = b[True, 1], b[False, -1]
    mirrored = {side: tuple(replace(bend, x=-bend.x) for bend in bends) for side, bends in b.items()}
    if any(b.values()) and all(same(a[positive, side], mirrored[positive, -side]) for positive, side in SIDES):
        return "inverse", "bounds"
    if current and upper and not a[True, 1] and not a[False, -1] and a[False, 1] and same(a[True, -1], lower):
        return "min-max", "bounds"
    if current and not any(positive for positive, _ in changed) and lower and not a[False, -1] and a[False, 1]:
        return "clip-side", "bounds"
    if current and changed == [(False, 1)] and not a[False, 1]:
        return "dual-clip", "bounds"
    kind = "clip" if current else "weight"
    if current and upper and changed == [(True, -1), (False, 1)] and all(a[side] for side in changed):
        return kind, "minimum"
    if not current and _of_product(mine, theirs, probe):
        return kind, "product"
    if probe.span == "mean" and _of_ratios(mine, theirs, probe):
        return "level", "ratios"
    if rejected := _rejected(mine, theirs, probe):
        return "level", rejected
    for side in changed if probe.span == "response" else ():
        own, other = (_of_sum(one, probe, side) for one in (mine, theirs))
        if own is not None and other is not None and own != other:
            return "level", "sum" if own else "mean"
    ends = {(one.kind, other.kind) for side in changed for one, other in zip(a[side], b[side], strict=False)}
    if ends == {("zero", "constant")}:
        return kind, "keep"
    if ends == {("constant", "zero")}:
        return kind, "reject"
    if any(a[side] for side in changed):
        return kind, "other"
    return kind, "cap" if all(bend.kind == "constant" for side in changed for bend in b[side]) else "missing"


def _of_sum(readings: Readings, probe: Probe, side: Side) -> bool | None:
    """Whether a bound comes nearer to 1 in a response twice as long, as one on a sum over it; None without one."""
    short, long = (readings.bends(replace(probe, tokens=count))[side] for count in (TOKENS, 2 * TOKENS))
    return long[0].x / short[0].x < 0.9 if short and long and short[0].kind == long[0].kind else None


def _of_mean(mine: Readings, theirs: Readings, probe: Probe, changed: list[Side]) -> bool:
    """Whether the bounds are on means over the response, which the probe of a response shows as they are."""
    if (whole := {DRIFT: DRIFT_ALL, MISMATCH: MISMATCH_ALL}.get(probe)) is None:
        return False
    for side in changed:
        apart = [one for one in (mine, theirs) if not same(one.bends(probe)[side], one.bends(whole)[side])]
        differs = not same(mine.bends(whole)[side], theirs.bends(whole)[side])
        if not differs or not any(_of_sum(one, whole, side) is False for one in apart):
            return False
    return True


def _of_ratios(mine: Readings, theirs: Readings, probe: Probe) -> bool:
    """Whether a bound on a response is on a mean of ratios: it moves though that of log-ratios stays."""
    token, whole = (replace(probe, span=span) for span in ("token", "response"))
    moves = any(not same(bends, mine.bends(token)[side]) for side, bends in mine.bends(probe).items())
    return moves and any(theirs.bends(whole).values()) and not any(theirs.bends(probe).values())


def _rejected(mine: Readings, theirs: Readings, probe: Probe) -> str:
    """Returns whether a token is rejected without its response, or the reverse; "" where neither."""
    for key, expected in theirs.neighbors.items():
        own, other = (int(one[1].count_nonzero()) for one in (mine.neighbors[key], expected))
        if key[2].span == "token" and key[2].policy == probe.policy and {own, other} == {0, TOKENS - 1}:
            return "of-token" if own else "of-response"
    return ""


def _of_product(mine: Readings, theirs: Readings, probe: Probe) -> bool:
    """Whether the clip of the ratio is on its product with the weight.

    It then shows where the weight alone moves, and not where the proximal policy does, which leaves the product alike.
    """
    drift, joint = (replace(probe, policy=policy) for policy in ("current", "proximal"))
    for side in ((True, 1), (False, -1)):
        clip = theirs.bends(drift)[side][:1]
        shown = [same(one.bends(way)[side][:1], clip) for one in (mine, theirs) for way in (probe, joint)]
        if not clip or shown != [True, False, False, True]:
            return False
    return True
