"""Finds hotspots: parts of the data whose share of the k3 exceeds their share of the tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.measure.views import FIRST_AGES
from trimtab.diagnosis.records import Measured, MismatchSize, View, read_table
from trimtab.text import short_exponent

ORDERED = ("probability", "entropy", "position", "version")
"""Views with ordered bins: a hotspot is all bins up to one, or from one on."""
SINGLE = read_table("texts.toml")["bins"]
"""What the label of a bin counts, for views of which a hotspot is a single bin."""
GAP, LIFT, SHARE, FEWEST_SHARE = 0.15, 2.0, 0.1, 0.002
"""A hotspot of an ordered view has at least 15 percentage points more of the k3 than of the tokens. One of a single bin
has at least a tenth of all k3, twice its share of tokens, and 0.2% of the tokens."""


@dataclass(frozen=True)
class Hotspot:
    """A group of tokens with more k3 than its share of tokens; both shares in [0, 1]."""

    what: str
    tokens: float
    k3: float


def hotspots(measured: Measured, texts: Mapping[int, str]) -> list[Hotspot]:
    """Returns at most one hotspot per view, by descending excess of k3.

    Entropy is left out if the behavior probability has a hotspot, since the two are closely related. `texts`: texts of
    token ids, if known.
    """
    if not measured.size.mismatch.get("k3", math.nan) > 0:
        return []
    result = {}
    for name in (*ORDERED, *SINGLE):
        if (view := measured.views.get(name)) is None:
            continue
        tokens, k3 = shares(view, measured.size)
        found = _stretch(view, tokens, k3) if name in ORDERED else _bin(view, tokens, k3, texts)
        if found is not None:
            what, bins = found
            result[name] = Hotspot(what, float(tokens[bins].sum()), float(k3[bins].sum()))
    if "probability" in result:
        result.pop("entropy", None)
    return sorted(result.values(), key=lambda hotspot: hotspot.tokens - hotspot.k3)


def shares(view: View, size: MismatchSize) -> tuple[np.ndarray, np.ndarray]:
    """Returns each bin's share of all trained tokens and of all k3, both (bins,). Bins may overlap or omit tokens."""
    tokens, k3 = size.mismatch["tokens"], size.mismatch["k3"]
    mass = np.nan_to_num(view.k3 * view.count, nan=0.0, posinf=0.0)
    return view.count / max(tokens, 1.0), mass / (k3 * tokens) if k3 * tokens > 0 else np.zeros(len(mass))


def _stretch(view: View, tokens: np.ndarray, k3: np.ndarray) -> tuple[str, slice] | None:
    """Returns the first or last bins of an ordered view with the largest excess of k3, or None."""
    gap = np.cumsum(k3 - tokens)[:-1]
    if not len(gap) or np.abs(gap).max() < GAP:
        return None
    cut = int(np.abs(gap).argmax()) + 1
    first = bool(gap[cut - 1] > 0)
    bins = slice(0, cut) if first else slice(cut, None)
    if view.name == "version":
        label = view.labels[cut - 1] if first else FIRST_AGES[view.labels[cut]]
        return f"age {label}{' or more' if not first else ' or less' if cut > 1 else ''}", bins
    if view.name == "position" and view.edges is not None:
        share = 100 * float(view.edges[cut])
        return f"the {f'first {share:.0f}' if first else f'last {100 - share:.0f}'}% of the response", bins
    name = {"probability": "sampler probability"}.get(view.name, view.name)
    edge = f"{view.edges[cut]:.2g}" if view.edges is not None else view.labels[cut]
    return f"{name} {'below' if first else 'above'} {short_exponent(edge)}", bins


def _bin(view: View, tokens: np.ndarray, k3: np.ndarray, texts: Mapping[int, str]) -> tuple[str, slice] | None:
    candidates = (tokens >= FEWEST_SHARE) & (k3 >= SHARE) & (k3 >= LIFT * tokens)
    if not candidates.any():
        return None
    best = int(np.argmax(np.where(candidates, k3 - tokens, -np.inf)))
    text = texts.get(int(view.columns["id"][best])) if "id" in view.columns else None
    what = f"{SINGLE[view.name]} {view.labels[best]}"
    return f"{what} ({text})" if text else what, slice(best, best + 1)
