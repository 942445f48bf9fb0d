"""Finds concentrations of mismatch: bins with far more k3 than their share of tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.records import Measured, MismatchSize, View
from trimtab.diagnosis.token_texts import VISIBLE_WHITESPACE
from trimtab.pages.render import short_exponent

ORDERED = ("probability", "entropy", "position", "version")
"""Views with ordered bins: a hotspot is all bins up to one, or from one on."""
SINGLE = ("turn", "turn-number", "observation", "prompt", "token")
GAP, LIFT, SHARE, FEWEST = 0.15, 2.0, 0.1, 0.002
"""A hotspot of an ordered view has at least 15 percentage points more of the k3 than of the tokens. One of a single bin
has at least a tenth of all k3, twice its share of tokens, and 0.2% of the tokens."""


@dataclass(frozen=True)
class Hotspot:
    """A group of tokens with more k3 than its share of tokens; both shares in [0, 1]."""

    view: str
    what: str
    tokens: float
    k3: float


def hotspots(measured: Measured, texts: Mapping[int, str]) -> list[Hotspot]:
    """Returns at most one hotspot per view, by descending excess of k3.

    Entropy is included only without a hotspot of the behavior probability, which is closely related. `texts`: of token
    ids, where known.
    """
    if not measured.size.mismatch.get("k3", math.nan) > 0:
        return []
    result = {
        name: hotspot
        for name in (*ORDERED, *SINGLE)
        if name in measured.views
        for hotspot in [_stretch(measured, name) if name in ORDERED else _bin(measured, name, texts)]
        if hotspot is not None
    }
    if "probability" in result:
        result.pop("entropy", None)
    return sorted(result.values(), key=lambda hotspot: hotspot.tokens - hotspot.k3)


def shares(view: View, size: MismatchSize) -> tuple[np.ndarray, np.ndarray]:
    """Returns each bin's share of all trained tokens and of all k3, both (bins,). Bins may overlap or omit tokens."""
    tokens, k3 = size.mismatch["tokens"], size.mismatch["k3"]
    mass = np.nan_to_num(view.k3 * view.count, nan=0.0, posinf=0.0)
    return view.count / max(tokens, 1.0), mass / (k3 * tokens) if k3 * tokens > 0 else np.zeros(len(mass))


def _stretch(measured: Measured, name: str) -> Hotspot | None:
    """Returns the first or last bins of an ordered view with the largest excess of k3, or None."""
    view = measured.views[name]
    tokens, k3 = shares(view, measured.size)
    gap = np.cumsum(k3 - tokens)[:-1]
    if not len(gap) or np.abs(gap).max() < GAP:
        return None
    cut = int(np.abs(gap).argmax()) + 1
    first = bool(gap[cut - 1] > 0)
    chosen = slice(0, cut) if first else slice(cut, None)
    return Hotspot(name, _stretch_text(view, cut, first), float(tokens[chosen].sum()), float(k3[chosen].sum()))


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
    return f"{name} {'below' if first else 'above'} {short_exponent(edge)}"


def _bin(measured: Measured, name: str, texts: Mapping[int, str]) -> Hotspot | None:
    view = measured.views[name]
    tokens, k3 = shares(view, measured.size)
    candidates = (tokens >= FEWEST) & (k3 >= SHARE) & (k3 >= LIFT * tokens)
    if not candidates.any():
        return None
    best = int(np.argmax(np.where(candidates, k3 - tokens, -np.inf)))
    return Hotspot(name, bin_text(view, best, texts), float(tokens[best]), float(k3[best]))


def bin_text(view: View, index: int, texts: Mapping[int, str]) -> str:
    """Describes a bin of a view with unordered bins."""
    label = view.labels[index]
    if view.name == "turn-number":
        return f"turn {label}"
    if view.name == "prompt":
        return f"prompt {label} (the number of its first occurrence, from 0)"
    if view.name == "observation":
        return label if not label[0].isdigit() else f"tokens {label} after an observation"
    if view.name == "token":
        id_ = view.columns.get("id", np.full(len(view.labels), -1))[index]
        text = texts.get(int(id_))
        return f"token {label.translate(VISIBLE_WHITESPACE)}" + (f" ({text})" if text else "")
    if not re.fullmatch(r"[+-]?\d+", label):
        return "tokens away from the borders of turns"
    offset = int(label)
    if offset >= 0:
        return "the first token of later turns" if offset == 0 else f"token {offset + 1} of later turns"
    return "the last token before a turn's border" if offset == -1 else f"{-offset} tokens before a turn's border"
