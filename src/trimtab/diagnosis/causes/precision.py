"""Detects `precision` and `quantized` from the size of the zero-mean residual in logits.

The run's recipe decides, if it lies next to the files. Otherwise size decides: rounding shifts logits by about the
same amount wherever the model is undecided, so it is measured there, with trainer and sampler treated alike. The effect
of a bit differs by model and text, by a factor of two between prose and few-shot arithmetic on one model. The border
is therefore above the values measured with bfloat16 on both sides in whole runs, before and after training
(docs/detection.md), and the confidence near it is low. The rms of the logits varies less between such runs and has more
weight than k3. A residual below `least-rms` is that of two float32 forwards, or the rounding of the file.

With enough distinct ids there is a second indication: rounding errors differ in every context, other weights shift a
token the same way in all of them. The share of the variance explained by the token id is 0 to .02 for bfloat16, .12
and more for eight bits and .24 for four bits and for weights a few updates old.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs, share
from trimtab.diagnosis.causes.noise_groups import direction, drift_between_steps, uneven_by
from trimtab.diagnosis.causes.what_is_left import Against, Context, Finding, Left
from trimtab.diagnosis.records import Settings
from trimtab.diagnosis.thresholds import THRESHOLDS as LIMITS
from trimtab.runs.metric_catalog import k3_ranges

FIX_PRECISION = (
    "Usually harmless: any correction with bounds near 1 absorbs it. Run both sides in one dtype (float16 or float32 "
    "logits) to shrink it."
)
FIX_QUANTIZED = (
    "Sample with unquantized weights and KV cache, or correct with token weights and a sequence or geometric mask; "
    "rare tokens are hit hardest."
)

FIX_ROUTING = (
    "Replay the sampler's routing in the trainer (vLLM and SGLang return the experts of each token), or mask tokens "
    "beyond bounds on the ratio; dense models have no experts: then look at these tokens."
)


@dataclass(frozen=True)
class Noise:
    """The zero-mean residual between trainer and sampler.

    rms: in logits, at undecided tokens. k3: over all tokens. tokens: number that rms is computed from.
    is_lower_bound: whether rms is only a lower bound. persistent: share of the variance explained by token ids; None if
    unknown, 0 if not significant. far, far_k3: share of the undecided tokens beyond five times the usual shift, and of
    k3 in them.
    """

    rms: float
    k3: float
    tokens: int
    is_lower_bound: bool = False
    persistent: float | None = None
    far: float = 0.0
    far_k3: float = 0.0

    @property
    def depends_on_ids(self) -> bool:
        """Whether the shift depends on the token id, as with other weights."""
        return self.persistent is not None and self.persistent > 0

    @property
    def coarseness(self) -> float:
        """Log-distance from the border between 16-bit arithmetic and quantized weights; positive beyond it."""
        by_rms = math.log(max(self.rms, 1e-9) / LIMITS["border-rms"])
        if self.is_lower_bound:
            return by_rms
        by_k3 = 0.5 * math.log(max(self.k3, 1e-12) / LIMITS["border-k3"])
        weight, by_ids = LIMITS["border-rms-weight"], LIMITS["border-ids"] if self.depends_on_ids else 0.0
        return weight * by_rms + (1 - weight) * by_k3 + by_ids


def measure_noise(tokens: LogprobPairs) -> Noise:
    """Measures the noise of tokens without systematic differences."""
    log_ratio, middle = tokens.log_ratio, tokens.middle
    excess = np.expm1(np.clip(log_ratio, -20, 20)) - log_ratio
    k3 = float(excess.mean()) if len(tokens) else 0.0
    if middle.sum() < 10:
        middle = tokens.behavior < -1e-3
    shift = tokens.shift[middle]
    if len(shift) < 10:
        return Noise(0.0, 0.0, len(shift))
    scale = 1.48 * float(np.median(np.abs(shift)))
    # Clipped, so that a few outliers do not determine the rms.
    clipped = np.clip(shift, -5 * scale, 5 * scale)
    far, of_k3 = np.abs(shift) > 5 * scale, excess[middle]
    return Noise(
        float(np.sqrt((clipped**2).mean())),
        k3,
        len(shift),
        persistent=persistence(tokens, scale),
        far=share(far),
        far_k3=float(of_k3[far].sum() / max(of_k3.sum(), 1e-300)),
    )


def noise_of(tokens: LogprobPairs, context: Context) -> Noise:
    """Measures the noise, or a lower bound of it against a systematic shape."""
    return measure_noise(tokens) if context.against is None else noise_lower_bound(tokens, context.against)


def persistence(tokens: LogprobPairs, scale: float) -> float | None:
    """Returns the share of the shifts' variance explained by the token id, which other weights cause and rounding not.

    None without ids or with too few distinct ones, since ids of a small alphabet encode the position, and where it is
    not significant in too few tokens; 0 where it is not in enough of them.
    """
    if tokens.ids is None or scale <= 0:
        return None
    middle = tokens.middle
    shift = np.clip(tokens.shift[middle] / scale, -4, 4)
    _, ids = np.unique(tokens.ids[middle], return_inverse=True)
    count = np.bincount(ids)
    often = count > 1
    if often.sum() < LIMITS["ids-least"]:
        return None
    products = (np.bincount(ids, shift)[often] ** 2 - np.bincount(ids, shift**2)[often]) / count[often]
    part = float(products.sum() / (count[often] - 1).sum() / (shift**2).mean())
    z = float(products.mean() / max(products.std(), 1e-12) * math.sqrt(len(products)))
    if part > LIMITS["ids-part"] and z > 3.0:
        return part
    return 0.0 if middle.sum() >= LIMITS["id-tokens"] else None


def noise_lower_bound(tokens: LogprobPairs, against: Against) -> Noise:
    """Returns a lower bound on the noise despite a systematic difference, from tokens that moved against it.

    At tokens of probability above 1/2, another temperature moves every logit in one direction, and so does truncation.
    Moves in the other direction are noise; the tail of a normal beyond a point extends half its scale or less past it.
    """
    undecided = tokens.middle & (np.minimum(tokens.behavior, tokens.trainer) > math.log(0.5))
    direction = (
        math.copysign(1.0, against.line.a - 1.0) if against.line is not None else (-1.0 if against.sampler_cut else 1.0)
    )
    opposite = -direction * tokens.shift[undecided]
    wrong = opposite[opposite > LIMITS["least-rms"]]
    if len(wrong) < 20 or share(opposite > LIMITS["least-rms"]) < 0.01:
        return Noise(0.0, 0.0, len(wrong), is_lower_bound=True)
    # With few tokens on the wrong side only the tail is visible; with half of them all of the noise is.
    factor = 1.0 if share(opposite > LIMITS["least-rms"]) > 0.3 else 1.5
    return Noise(float(np.sqrt((wrong**2).mean())) * factor, 0.0, len(wrong), is_lower_bound=True)


def objection(tokens: LogprobPairs, left: Left) -> str:
    """Returns why a difference cannot be noise, empty if it can: noise has mean ratio 1, no direction and one size."""
    if left.contract == "outside":
        return "rounding, quantization and routing leave the mean ratio at 1, so this is none of them"
    if left.contract == "silent":
        return "a few tokens decide the mean, so noise can be neither named nor excluded"
    if left.k3 > LIMITS["noise-k3"]:
        return "no rounding or quantization is known to be as large"
    if (share_of := direction(tokens)) > LIMITS["direction"]:
        return (
            f"the probability of a token decides where its logit moves ({share_of:.0%} of the variance), unlike noise"
        )
    steps = drift_between_steps(tokens)
    if steps is not None and np.ptp(steps.sizes) > math.log(LIMITS["step-growth-noise"]):
        return f"{steps.text}, and noise has one size"
    name, part = max(uneven_by(tokens).items(), key=lambda item: item[1], default=("", 0.0))
    if part > LIMITS["uneven"]:
        return f"the {name} decides {part:.0%} of the variance of its size, and noise has one size"
    return ""


def find_noise(tokens: LogprobPairs, context: Context) -> list[Finding]:
    """Names the noise if it exceeds that of float32 and of the file's rounding, and if it can be noise at all.

    Where a few tokens are far beyond the others, or the tokens of a few prompts are in all their responses, these were
    routed to other experts; where many are, it is not one noise. The run's settings decide if they determine whether
    the sampler is quantized.
    """
    noise = noise_of(tokens, context)
    if not noise.is_lower_bound and noise.k3 < max(LIMITS["least-k3"], 3 * context.floor):
        return []
    known = context.settings if context.settings is not None and context.settings.coarse is not None else None
    if not noise.is_lower_bound and known is None and (found := _by_prompt(tokens)):
        return found
    if noise.rms < LIMITS["least-rms"]:
        return []
    size = f"logits move by {noise.rms:.2g} (rms over {noise.tokens} undecided tokens)"
    size += ", seen against a larger systematic shift" if noise.is_lower_bound else f", k3 = {noise.k3:.1e}"
    if not noise.is_lower_bound:
        left = Left.of(tokens)
        if objection(tokens, left) if known is None else left.contract != "inside":
            return []
        size += f", {left.text}"
        # After lists were shifted back some pairs at the edges of stretches stay wrong.
        usual = LIMITS["leftover-share"] if context.repaired else LIMITS["one-noise-share"]
        usual = max(usual, LIMITS["one-noise-tokens"] / noise.tokens)
        if noise.far > usual and noise.far_k3 > LIMITS["coarse-noise-k3" if noise.coarseness > 0 else "one-noise-k3"]:
            return _routing(tokens, noise, size)
    if known is not None:
        return _by_recipe(tokens, noise, size, known)
    found = _by_size(tokens, noise, size)
    few = noise.tokens < LIMITS["noise-tokens"]  # in which the tail of another noise does not show
    return [replace(found, at_most=min(found.at_most, LIMITS["confidence-few"])) if few else found]


def _by_size(tokens: LogprobPairs, noise: Noise, size: str) -> Finding:
    """Names the noise by its size; sizes that both kinds have leave a doubt, unless token ids tell them apart."""
    certainty = min(0.95, 0.55 + 0.5 * abs(noise.coarseness))
    if noise.coarseness > 0:
        evidence = f"{size}: more than bfloat16 on both sides gives (up to .23 and 3e-3)"
        if noise.depends_on_ids:
            evidence += f"; {noise.persistent:.0%} of it depends on the token id, as with other weights"
        else:
            certainty = min(certainty, LIMITS["confidence-by-size"])
            evidence += ", unless float32 weights are trained with a bfloat16 sampler: see the engine's settings"
        return _noise("quantized", tokens, round(certainty, 2), evidence, FIX_QUANTIZED)
    kind = "float16 or tf32" if noise.rms < LIMITS["bfloat16-rms"] else "bfloat16"
    evidence = f"{size}: the size of {kind} arithmetic"
    if noise.rms > LIMITS["eight-bits-rms"] and noise.persistent is None:
        certainty = min(certainty, LIMITS["confidence-eight-bits"])
        evidence += ", which weights of eight bits have too (token ids would tell them apart)"
    return _noise("precision", tokens, round(certainty, 2), evidence, FIX_PRECISION)


def _by_prompt(tokens: LogprobPairs) -> list[Finding]:
    """Returns `routing` where the size of the error repeats for a prompt and nothing else decides it."""
    found = uneven_by(tokens)
    by_prompt = found.pop("prompt", 0.0)
    if by_prompt < LIMITS["prompt-repeats"] or by_prompt < 2 * max(found.values(), default=0.0):
        return []
    if Left.of(tokens).contract != "inside" or direction(tokens) > LIMITS["direction"]:
        return []
    prompt = tokens.of_response(tokens.table.prompt)
    assert prompt is not None
    log_ratio = np.clip(tokens.log_ratio, -20, 20)
    _, index, count = np.unique(prompt, return_inverse=True, return_counts=True)
    k3 = np.bincount(index, np.expm1(log_ratio) - log_ratio)
    order = np.argsort(-k3 / count)
    worst = order[: 1 + int(np.searchsorted(np.cumsum(k3[order]), 0.8 * k3.sum()))]
    if len(worst) > LIMITS["prompt-worst"] * len(count):  # quantized weights err alike in like contexts, in all prompts
        return []
    evidence = (
        f"the error repeats for a prompt: {len(worst)} of {len(count)} prompts hold 80% of k3 in all their responses, "
        f"and the prompt decides {by_prompt:.0%} of the variance of its size. That is arithmetic, such as other "
        "experts or another kernel for these prompts, not chance"
    )
    return [_noise("routing", tokens, LIMITS["confidence-routing"], evidence, FIX_ROUTING)]


def _noise(name: str, tokens: LogprobPairs, certainty: float, evidence: str, fix: str) -> Finding:
    return Finding(name, evidence, fix, tokens, len(tokens), certainty, is_final=True)


def _routing(tokens: LogprobPairs, noise: Noise, size: str) -> list[Finding]:
    """Returns `routing` if few tokens hold most of k3 and the others are as usual; nothing for other mixtures."""
    if (
        noise.far > LIMITS["routing-share"]
        or noise.far_k3 < LIMITS["routing-k3"]
        or noise.coarseness > LIMITS["border-ids"]
    ):
        return []
    evidence = (
        f"{noise.far:.1%} of the undecided tokens are more than five times as far apart as usual and hold "
        f"{noise.far_k3:.0%} of k3; {size}: other experts answered for these tokens"
    )
    return [_noise("routing", tokens, LIMITS["confidence-routing"], evidence, FIX_ROUTING)]


def _by_recipe(tokens: LogprobPairs, noise: Noise, size: str, settings: Settings) -> list[Finding]:
    """Returns the cause according to the recipe; nothing for more noise than rounding makes."""
    recipe_text = f"the run's recipe says {settings}"
    if settings.coarse:
        return [_noise("quantized", tokens, LIMITS["confidence-by-recipe"], f"{size}; {recipe_text}", FIX_QUANTIZED)]
    if noise.k3 > k3_ranges()["moe"].high or (noise.is_lower_bound and noise.rms > LIMITS["recipe-rms"]):
        return []
    if settings.sixteen_bits:
        return [_noise("precision", tokens, LIMITS["confidence-by-recipe"], f"{size}; {recipe_text}", FIX_PRECISION)]
    doubt = f"{size}, although {recipe_text}: check the dtype that the sampler runs in"
    return [_noise("precision", tokens, 0.5, doubt, FIX_PRECISION)]
