"""Detects `precision` and `quantized` from the size of the zero-mean residual in logits.

What the run's own recipe says decides, where it lies beside the files. Without it size does: rounding shifts logits by
about the same amount wherever the model is undecided, so it is read there, from trainer and sampler alike. How much a
bit matters differs by model and text, twice between prose and few-shot arithmetic on one model, so the border
lies beyond what bfloat16 on both sides was measured to give in whole runs, before and after training (docs/causes.md),
and next to it the confidence is low. The rms of the logits, which differs less between such runs, weighs more than k3.
Below `LEAST` it is two float32 forwards, or the rounding of the file.

Where ids are known and many, a second fact helps: rounding in arithmetic is new in every context, other weights shift a
token the same way wherever it stands. That share of the variance is 0 to .02 for bfloat16, .12 and more for eight bits
and .24 for four bits and for weights a few updates old.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.causes.evidence import Tokens, share
from trimtab.diagnosis.causes.sampling_faults import Line
from trimtab.diagnosis.records import Cause, Settings
from trimtab.runs.metric_ranges import k3_ranges

LEAST, LEAST_K3 = 4e-4, 1e-8
BORDER_RMS, BORDER_K3, BY_RMS = 0.25, 5.8e-3, 0.7
NUDGE, PERSISTENT, IDS = 0.7, 0.07, 60
UNTOLD = 0.8  # confidence at most where size alone speaks
TOLD, FARTHEST = 0.95, 1.3  # logits: float32 against bfloat16 after an update, the farthest any arithmetic was seen
SIXTEEN = 0.008  # logits: below, float16 or tf32 rather than bfloat16
FIX_PRECISION = (
    "Usually harmless: any correction with bounds near 1 absorbs it. Run both sides in one dtype (float16 or float32 "
    "logits) to shrink it."
)
FIX_QUANTIZED = (
    "Sample with unquantized weights and KV cache, or correct with token weights and a sequence or geometric mask; "
    "rare tokens are hit hardest."
)


@dataclass(frozen=True)
class Noise:
    """rms: logits, at undecided tokens. k3: of all tokens. tokens: it rests on. bound: only a lower one is known.
    persistent: share of the variance that belongs to token ids; None where that cannot be told, 0 if not
    significant."""

    rms: float
    k3: float
    tokens: int
    bound: bool = False
    persistent: float | None = None

    @property
    def other_weights(self) -> bool:
        """Whether the same token is shifted the same way wherever it stands."""
        return self.persistent is not None and self.persistent > 0

    @property
    def coarse(self) -> float:
        """Log-distance from the border between 16-bit arithmetic and quantized weights; positive beyond it."""
        by_rms = math.log(max(self.rms, 1e-9) / BORDER_RMS)
        if self.bound:
            return by_rms
        by_k3 = 0.5 * math.log(max(self.k3, 1e-12) / BORDER_K3)
        return BY_RMS * by_rms + (1 - BY_RMS) * by_k3 + (NUDGE if self.other_weights else 0.0)


def noise_of(tokens: Tokens) -> Noise:
    """The noise of tokens with nothing systematic left."""
    log_ratio = tokens.log_ratio
    k3 = float((np.expm1(np.clip(log_ratio, -20, 20)) - log_ratio).mean()) if len(tokens) else 0.0
    shift = tokens.shift[tokens.middle]
    if len(shift) < 10:
        shift = tokens.shift[tokens.behavior < -1e-3]
    if len(shift) < 10:
        return Noise(0.0, 0.0, len(shift))
    scale = 1.48 * float(np.median(np.abs(shift)))
    # A handful of wild tokens is not the size of the noise.
    held = np.clip(shift, -5 * scale, 5 * scale)
    return Noise(float(np.sqrt((held**2).mean())), k3, len(shift), persistent=persistence(tokens, scale))


def persistence(tokens: Tokens, scale: float) -> float | None:
    """Share of the shifts' variance that comes back wherever a token id does: other weights, not other rounding.

    None without ids or with too few of them: in a small alphabet a token stands for its place. 0 if not significant.
    """
    if tokens.ids is None or scale <= 0:
        return None
    middle = tokens.middle
    shift = np.clip(tokens.shift[middle] / scale, -4, 4)
    _, ids = np.unique(tokens.ids[middle], return_inverse=True)
    count = np.bincount(ids)
    often = count > 1
    if often.sum() < IDS:
        return None
    products = (np.bincount(ids, shift)[often] ** 2 - np.bincount(ids, shift**2)[often]) / count[often]
    part = float(products.sum() / (count[often] - 1).sum() / (shift**2).mean())
    clear = float(products.mean() / max(products.std(), 1e-12) * math.sqrt(len(products)))
    return part if part > PERSISTENT and clear > 3.0 else 0.0


def noise_beside(tokens: Tokens, line: Line | None, *, sampler_cut: bool) -> Noise:
    """A lower bound on the noise where a systematic shape covers it: from tokens that moved against the shape.

    At tokens more likely than not, another temperature moves every logit one way, and so does truncation. What
    moved the other way is noise; the tail of a normal that lies beyond a point is half its scale or less past it.
    """
    undecided = tokens.middle & (np.minimum(tokens.behavior, tokens.trainer) > math.log(0.5))
    way = math.copysign(1.0, line.a - 1.0) if line is not None else (-1.0 if sampler_cut else 1.0)
    against = -way * tokens.shift[undecided]
    wrong = against[against > LEAST]
    if len(wrong) < 20 or share(against > LEAST) < 0.01:
        return Noise(0.0, 0.0, len(wrong), bound=True)
    many = share(against > LEAST)
    # Few on the wrong side: only the tail is seen. Half of them: all of the noise is.
    return Noise(float(np.sqrt((wrong**2).mean())) * (1.0 if many > 0.3 else 1.5), 0.0, len(wrong), bound=True)


def name_noise(noise: Noise, floor: float, settings: Settings | None = None) -> Cause | None:
    """`precision` or `quantized`, if the noise is more than float32 and the file's own rounding give.

    settings: what the run's recipe says, which decides where it says whether the sampler is quantized.
    """
    if noise.rms < LEAST or (not noise.bound and noise.k3 < max(LEAST_K3, 3 * floor)):
        return None
    size = f"logits move by {noise.rms:.2g} (rms over {noise.tokens} undecided tokens)"
    size += ", seen against a larger systematic shift" if noise.bound else f", k3 = {noise.k3:.1e}"
    if settings is not None and settings.coarse is not None:
        return _as_told(noise, size, settings)
    sure = round(min(0.95, 0.55 + 0.5 * abs(noise.coarse)), 2)
    if noise.coarse > 0:
        evidence = f"{size}: more than bfloat16 on both sides gives (up to .23 and 3e-3)"
        if noise.other_weights:
            evidence += f"; {noise.persistent:.0%} of it comes back wherever a token does, as that of other weights"
        else:
            sure = min(sure, UNTOLD)
            evidence += ", if no float32 weights are trained beside bfloat16 ones; the engine's settings tell"
        return Cause("quantized", sure, evidence, FIX_QUANTIZED)
    kind = "float16 or tf32" if noise.rms < SIXTEEN else "bfloat16"
    return Cause("precision", sure, f"{size}: the size of {kind} arithmetic", FIX_PRECISION)


def _as_told(noise: Noise, size: str, settings: Settings) -> Cause | None:
    """The name that the recipe gives; None for more noise than any arithmetic makes, which has another cause."""
    says = f"the run's recipe says {settings}"
    if settings.coarse:
        return Cause("quantized", TOLD, f"{size}; {says}", FIX_QUANTIZED)
    if noise.k3 > k3_ranges()["moe"].high or (noise.bound and noise.rms > FARTHEST):
        return None
    if settings.sixteen_bits:
        return Cause("precision", TOLD, f"{size}; {says}", FIX_PRECISION)
    return Cause("precision", 0.5, f"{size}, although {says}: see whether the sampler runs in that", FIX_PRECISION)
