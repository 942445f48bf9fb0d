"""What differs in the bounds of a loss and an objective: clips, caps and masks, with what to change."""

from __future__ import annotations

from dataclasses import replace

from trimtab.check_loss.bends import describe, same
from trimtab.check_loss.probes import DRIFT, DRIFT_ALL, MISMATCH, MISMATCH_ALL, PROBES, TOKENS, Probe
from trimtab.check_loss.readings import Readings

Side = tuple[bool, int]
"""Whether A > 0, and the direction in which the ratio leaves 1."""
SIDES: dict[Side, str] = {(True, 1): "A > 0 above 1", (True, -1): "A > 0 below 1"}
SIDES |= {(False, 1): "A < 0 above 1", (False, -1): "A < 0 below 1"}


def differing_bounds(mine: Readings, theirs: Readings, name: str) -> list[tuple[str, str]]:
    """Returns the first difference of each kind, and its sentence; those first that name a cause."""
    found = [one for probe in PROBES for one in _of_probe(mine, theirs, probe, name)]
    first: dict[str, str] = {}
    for kind, text in sorted(found, key=lambda one: one[0] in ("clip", "weight")):
        first.setdefault(kind, text)
    return list(first.items())


def _of_probe(mine: Readings, theirs: Readings, probe: Probe, name: str) -> list[tuple[str, str]]:
    a, b = mine.bends(probe), theirs.bends(probe)
    changed = [side for side in b if not same(a[side], b[side])]
    if not changed or _of_mean(mine, theirs, probe, changed):
        return []
    kind, remedy = _cause(mine, theirs, probe, changed)
    shown = changed[:1] if kind == "level" else changed
    sides = [
        f"{SIDES[side]} the gradient's weight {describe(a[side])}, in {name} it {describe(b[side])}" for side in shown
    ]
    return [(kind, f"{theirs.label(probe)}: {'; '.join(sides)}: {remedy}")]


def _cause(mine: Readings, theirs: Readings, probe: Probe, changed: list[Side]) -> tuple[str, str]:
    """Returns the kind of difference, and what to change."""
    a, b, current = mine.bends(probe), theirs.bends(probe), probe.policy == "current"
    upper, lower = b[True, 1], b[False, -1]
    mirrored = {side: tuple(replace(bend, x=-bend.x) for bend in bends) for side, bends in b.items()}
    if any(b.values()) and all(same(a[positive, side], mirrored[positive, -side]) for positive, side in SIDES):
        return "inverse", "bound the ratio, not its inverse"
    if current and upper and not a[True, 1] and not a[False, -1] and a[False, 1] and same(a[True, -1], lower):
        return "min-max", "the clip holds back what it should let pass, swap min and max"
    if current and not any(positive for positive, _ in changed) and lower and not a[False, -1] and a[False, 1]:
        return "clip-side", "for A < 0 clip the ratio from below"
    if current and changed == [(False, 1)] and not a[False, 1]:
        return "dual-clip", "for A < 0 bound the loss above (dual clip)"
    kind = "clip" if current else "weight"
    if current and upper and changed == [(True, -1), (False, 1)] and all(a[side] for side in changed):
        return kind, "it holds back what should pass, the minimum with the term that is not clipped is missing"
    if not current and _of_product(mine, theirs, probe):
        return kind, "the clip is on the weight times the ratio, clip the ratio alone"
    if rejected := _rejected(mine, theirs, probe):
        return "level", rejected
    for side in changed if probe.span == "response" else ():
        own, other = (_of_sum(one, probe, side) for one in (mine, theirs))
        if own is not None and other is not None and own != other:
            return "level", f"the bound is on a {'sum' if own else 'mean'} over the response, take the other"
    ends = {(one.kind, other.kind) for side in changed for one, other in zip(a[side], b[side], strict=False)}
    if ends == {("zero", "constant")}:
        return kind, "keep the weight at the bound, do not set it to 0"
    if ends == {("constant", "zero")}:
        return kind, "set the weight to 0 beyond the bound, do not keep it"
    if not any(a[side] for side in changed):
        capped = all(bend.kind == "constant" for side in changed for bend in b[side])
        return kind, f"the {'cap' if capped else 'bound'} is missing, add it"
    return kind, "change the bound"


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


def _rejected(mine: Readings, theirs: Readings, probe: Probe) -> str:
    """Returns what to say where a token is rejected without its response, or the reverse; "" where neither."""
    for key, expected in theirs.neighbors.items():
        own, other = (int(one[1].count_nonzero()) for one in (mine.neighbors[key], expected))
        if key[2].span == "token" and key[2].policy == probe.policy and {own, other} == {0, TOKENS - 1}:
            who, ways = (
                ("the others stay", "token, not per response") if own else ("none stays", "response, not per token")
            )
            return f"{who} trained of a response with such a token, it is rejected per {ways}"
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
