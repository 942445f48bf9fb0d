"""Checks a loss: against an objective, or which objective it is."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from trimtab.check_loss.differences import KINDS, find_differences
from trimtab.check_loss.identification import identify, reference
from trimtab.check_loss.loss_answer import Answer, Curve, Difference, Nearest
from trimtab.check_loss.loss_function import Loss
from trimtab.check_loss.probe_batches import DRIFT, MISMATCH, Probe
from trimtab.check_loss.readings import SIGNS, Readings
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives import Objective

POINTS = 120


def check(loss: Loss, objective: Objective | None = None, *, spec: str = "", ignore: Sequence[str] = ()) -> Answer:
    """Returns whether a loss is an objective, and what differs; without one, the nearest objectives.

    spec: the objective as it was asked for. ignore: kinds of differences (`differences.KINDS`) that do not count.
    Raises `TrimtabError` for an unknown one.
    """
    for kind in ignore:
        if kind not in KINDS:
            raise TrimtabError(f"there is no difference {kind!r} to ignore{did_you_mean(kind, KINDS)}")
    began = time.perf_counter()
    readings = Readings(loss)
    nearest: list[Nearest] = []
    with torch.random.fork_rng(devices=[]):
        if objective is None:
            candidates = identify(readings)
            found = _counted(candidates[0].differences, ignore)
            shown = [one for one in candidates if not _counted(one.differences, ignore)] or candidates[:1]
            nearest = [Nearest(one.settings, _counted(one.differences, ignore)) for one in shown]
            objective = candidates[0].objective
        else:
            found = _counted(find_differences(readings, reference(objective), objective.name), ignore)
        curves = _curves(readings, reference(objective))
    return Answer(
        loss.name, spec, objective.name, found, tuple(nearest), loss.inputs, tuple(curves), time.perf_counter() - began
    )


def _counted(differences: Sequence[Difference], ignore: Sequence[str]) -> tuple[Difference, ...]:
    return tuple(one for one in differences if one.kind not in ignore)


def _curves(mine: Readings, theirs: Readings) -> list[Curve]:
    """Returns the weights of a token against its ratio; those against the sampler only where a loss reads it."""
    probes = [DRIFT]
    reads_behavior = any(
        abs(one.exponents[True, "behavior", "own", 1]) > 1e-6 or any(one.bends(MISMATCH).values())
        for one in (mine, theirs)
    )
    if reads_behavior:
        probes.append(MISMATCH)
    return [_curve(mine, theirs, probe, positive) for probe in probes for positive in SIGNS]


def _curve(mine: Readings, theirs: Readings, probe: Probe, positive: bool) -> Curve:
    """Returns one curve, to a little beyond the outermost bound."""
    bends = [bend for one in (mine, theirs) for side in one.bends(probe).values() for bend in side]
    reach = min(3.0, max([math.log(2), *(1.2 * abs(bend.x) for bend in bends)]))
    shifts = torch.linspace(-reach, reach, POINTS).double()
    values = [[_number(value) for value in one.weights(probe, shifts, SIGNS[positive])] for one in (mine, theirs)]
    return Curve(probe.name, positive, shifts.exp().tolist(), *values)


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(float(value)) else None
