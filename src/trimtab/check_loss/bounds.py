"""Names the cause if the bounds of a loss (clips, caps and masks) are not those of the objective."""

from __future__ import annotations

from dataclasses import replace

from trimtab.check_loss.bends import describe, same
from trimtab.check_loss.probes import DRIFT, DRIFT_ALL, MISMATCH, MISMATCH_ALL, PROBES, TOKENS, Probe
from trimtab.check_loss.readings import Readings

Side = tuple[bool, int]
"""Whether A > 0, and the direction in which the ratio leaves 1."""
SIDES: dict[Side, str] = {(True, 1): "A > 0 above 1", (True, -1): "A > 0 below 1"}
SIDES |= {(False, 1): "A < 0 above 1", (False, -1): "A < 0 below 1"}


def differing_bounds(actual: Readings, expected: Readings, name: str) -> list[tuple[str, str, dict[str, str]]]:
    """Returns the first difference of each kind: kind, key in differences.toml, and the bounds in words.

    "clip" and "weight" are last: other kinds name a cause that is more precise.
    """
    first: dict[str, tuple[str, str, dict[str, str]]] = {}
    for probe in PROBES:
        got, want = actual.bends(probe), expected.bends(probe)
        changed = [side for side in want if not same(got[side], want[side])]
        if not changed or _of_mean(actual, expected, probe, changed):
            continue
        kind, key = _cause(actual, expected, probe, changed)
        sides = [
            f"{SIDES[side]} the gradient's weight {describe(got[side])}, in {name} it {describe(want[side])}"
            for side in (changed[:1] if kind == "level" else changed)
        ]
        first.setdefault(kind, (kind, key, {"bounds": f"{expected.label(probe)}: {'; '.join(sides)}"}))
    return sorted(first.values(), key=lambda difference: difference[0] in ("clip", "weight"))


def _cause(actual: Readings, expected: Readings, probe: Probe, changed: list[Side]) -> tuple[str, str]:
    """Returns the kind of difference and the key of its sentence: of the first cause in this order that applies."""
    got, want, current = actual.bends(probe), expected.bends(probe), probe.policy == "current"
    upper, lower = want[True, 1], want[False, -1]
    mirrored = {side: tuple(replace(bend, x=-bend.x) for bend in bends) for side, bends in want.items()}
    if any(want.values()) and all(same(got[positive, side], mirrored[positive, -side]) for positive, side in SIDES):
        return "inverse", "bounds"
    if current and upper and not got[True, 1] and not got[False, -1] and got[False, 1] and same(got[True, -1], lower):
        return "min-max", "bounds"
    if current and not any(positive for positive, _ in changed) and lower and not got[False, -1] and got[False, 1]:
        return "clip-side", "bounds"
    if current and changed == [(False, 1)] and not got[False, 1]:
        return "dual-clip", "bounds"
    kind = "clip" if current else "weight"
    if current and upper and changed == [(True, -1), (False, 1)] and all(got[side] for side in changed):
        return kind, "minimum"
    if not current and _of_product(actual, expected, probe):
        return kind, "product"
    if probe.span == "mean" and _of_ratios(actual, expected, probe):
        return "level", "ratios"
    if rejected := _rejected(actual, expected, probe):
        return "level", rejected
    for side in changed if probe.span == "response" else ():
        of_sum, expected_sum = (_of_sum(readings, probe, side) for readings in (actual, expected))
        if of_sum is not None and expected_sum is not None and of_sum != expected_sum:
            return "level", "sum" if of_sum else "mean"
    ends = {(bend.kind, wanted.kind) for side in changed for bend, wanted in zip(got[side], want[side], strict=False)}
    if ends == {("zero", "constant")}:
        return kind, "keep"
    if ends == {("constant", "zero")}:
        return kind, "reject"
    if any(got[side] for side in changed):
        return kind, "other"
    return kind, "cap" if all(bend.kind == "constant" for side in changed for bend in want[side]) else "missing"


def _of_sum(readings: Readings, probe: Probe, side: Side) -> bool | None:
    """Returns whether a bound is nearer to 1 in a response twice as long, as bounds on a sum are; None without one."""
    short, long = (readings.bends(replace(probe, tokens=count))[side] for count in (TOKENS, 2 * TOKENS))
    return long[0].x / short[0].x < 0.9 if short and long and short[0].kind == long[0].kind else None


def _of_mean(actual: Readings, expected: Readings, probe: Probe, changed: list[Side]) -> bool:
    """Returns whether bounds of a token are on a mean over the response: the probe of a response shows their value."""
    if (whole := {DRIFT: DRIFT_ALL, MISMATCH: MISMATCH_ALL}.get(probe)) is None:
        return False
    for side in changed:
        apart = [each for each in (actual, expected) if not same(each.bends(probe)[side], each.bends(whole)[side])]
        differs = not same(actual.bends(whole)[side], expected.bends(whole)[side])
        if not differs or not any(_of_sum(each, whole, side) is False for each in apart):
            return False
    return True


def _of_ratios(actual: Readings, expected: Readings, probe: Probe) -> bool:
    """Returns whether a bound is on a mean of ratios: it is reached although the mean of log-ratios is kept."""
    token, whole = (replace(probe, span=span) for span in ("token", "response"))
    moves = any(not same(bends, actual.bends(token)[side]) for side, bends in actual.bends(probe).items())
    return moves and any(expected.bends(whole).values()) and not any(expected.bends(probe).values())


def _rejected(actual: Readings, expected: Readings, probe: Probe) -> str:
    """Returns "of-token" if a loss rejects a token, not its response, "of-response" in the reverse case, else ""."""
    for key in expected.neighbors:
        trained, expected_trained = (int(side.neighbors[key][1].count_nonzero()) for side in (actual, expected))
        if key[2].span == "token" and key[2].policy == probe.policy and {trained, expected_trained} == {0, TOKENS - 1}:
            return "of-token" if trained else "of-response"
    return ""


def _of_product(actual: Readings, expected: Readings, probe: Probe) -> bool:
    """Returns whether the ratio times the weight is clipped, in place of the ratio alone.

    Such a clip is reached if only the weight moves. It is not if the proximal policy moves: the product stays.
    """
    drift, joint = (replace(probe, policy=policy) for policy in ("current", "proximal"))
    for side in ((True, 1), (False, -1)):
        clip = expected.bends(drift)[side][:1]
        shown = [same(each.bends(way)[side][:1], clip) for each in (actual, expected) for way in (probe, joint)]
        if not clip or shown != [True, False, False, True]:
            return False
    return True
