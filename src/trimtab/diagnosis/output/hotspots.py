"""Finds concentrations of mismatch: bins with far more k3 than their share of tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.records import Measured, Size, View

ORDERED = ("probability", "entropy", "position", "version")
"""Views whose neighboring bins belong together: a place is everything up to, or from, a bin."""
SINGLE = ("turn", "turn-number", "token")
GAP, LIFT, SHARE, FEWEST = 0.15, 2.0, 0.1, 0.002
"""A place of an ordered view holds 15 points more k3 than tokens. A single bin holds a tenth of all k3 and twice its
share of tokens; less than 0.2% of the tokens say nothing."""
SHOWN = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})


@dataclass(frozen=True)
class Place:
    """Tokens that hold more k3 than their share; both shares in [0, 1]."""

    view: str
    what: str
    tokens: float
    k3: float


def places(measured: Measured, texts: Mapping[int, str]) -> list[Place]:
    """One place of each view at most, the most striking first. Entropy only where the behavior probability, which
    says much the same, has none. `texts` of token ids, where known."""
    if not measured.size.mismatch.get("k3", math.nan) > 0:
        return []
    found = {
        name: place
        for name in (*ORDERED, *SINGLE)
        if name in measured.views
        for place in [_stretch(measured, name) if name in ORDERED else _bin(measured, name, texts)]
        if place is not None
    }
    if "probability" in found:
        found.pop("entropy", None)
    return sorted(found.values(), key=lambda place: place.tokens - place.k3)


def shares(view: View, size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Each bin's share of all trained tokens and of all k3, both (bins,). Bins may overlap, or leave tokens out."""
    tokens, k3 = size.mismatch["tokens"], size.mismatch["k3"]
    mass = np.nan_to_num(view.k3 * view.count, nan=0.0, posinf=0.0)
    return view.count / max(tokens, 1.0), mass / (k3 * tokens) if k3 * tokens > 0 else np.zeros(len(mass))


def pretty(label: str) -> str:
    """1e-5 for 1e-05."""
    return re.sub(r"e([+-])0(\d)", lambda found: f"e{found[1].replace('+', '')}{found[2]}", label)


def _stretch(measured: Measured, name: str) -> Place | None:
    """The first or the last bins of an ordered view that hold most k3 beyond their share of tokens."""
    view = measured.views[name]
    tokens, k3 = shares(view, measured.size)
    gap = np.cumsum(k3 - tokens)[:-1]
    if not len(gap) or np.abs(gap).max() < GAP:
        return None
    cut = int(np.abs(gap).argmax()) + 1
    first = bool(gap[cut - 1] > 0)
    chosen = slice(0, cut) if first else slice(cut, None)
    return Place(name, _stretch_text(view, cut, first), float(tokens[chosen].sum()), float(k3[chosen].sum()))


def _stretch_text(view: View, cut: int, first: bool) -> str:
    if view.name == "version":
        if first:
            return f"age {view.labels[cut - 1]}{' or less' if cut > 1 else ''}"
        return f"age {view.labels[cut].partition('-')[0].removesuffix(' and more')} or more"
    edge = f"{view.edges[cut]:.2g}" if view.edges is not None else view.labels[cut]
    if view.name == "position" and view.edges is not None:
        share = 100 * float(view.edges[cut])
        return f"the first {share:.0f}% of the response" if first else f"the last {100 - share:.0f}% of the response"
    name = {"probability": "sampler probability"}.get(view.name, view.name)
    return f"{name} {'below' if first else 'above'} {pretty(edge)}"


def _bin(measured: Measured, name: str, texts: Mapping[int, str]) -> Place | None:
    view = measured.views[name]
    tokens, k3 = shares(view, measured.size)
    there = (tokens >= FEWEST) & (k3 >= SHARE) & (k3 >= LIFT * tokens)
    if not there.any():
        return None
    best = int(np.argmax(np.where(there, k3 - tokens, -np.inf)))
    return Place(name, bin_text(view, best, texts), float(tokens[best]), float(k3[best]))


def bin_text(view: View, index: int, texts: Mapping[int, str]) -> str:
    """A bin of a view of unordered bins, in words."""
    label = view.labels[index]
    if view.name == "turn-number":
        return f"turn {label}"
    if view.name == "token":
        id_ = view.columns.get("id", np.full(len(view.labels), -1))[index]
        text = texts.get(int(id_))
        return f"token {label.translate(SHOWN)}" + (f" ({text})" if text else "")
    if not re.fullmatch(r"[+-]?\d+", label):
        return "tokens away from the borders of turns"
    place = int(label)
    if place >= 0:
        return "the first token of later turns" if place == 0 else f"token {place + 1} of later turns"
    return "the last token before a turn's border" if place == -1 else f"{-place} tokens before a turn's border"
