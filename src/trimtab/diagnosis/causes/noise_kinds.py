"""Detects `precision`, `quantized` and `routing` in what remains, or says why it is none of them: `unexplained`.

Noise (rounding, quantized weights, routing) moves logits up and down by about one size, at any step, weight age, prompt
and depth of the context. Its mean is 0 at any probability of the token. A difference that moves one group of
tokens further, or tokens of one probability in one direction, is not noise (`objection`).

The run's recipe decides, if it lies next to the files. Otherwise the size of the noise decides, measured at undecided
tokens and symmetric in trainer and sampler, together with the token ids: other weights shift an id alike in every
context, rounding does not. docs/reference-detection.md has the measurements behind the borders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from trimtab.diagnosis.causes.detector import (
    LEAST_K3,
    LEAST_RMS,
    CauseMatch,
    Context,
    LogprobPairs,
    Residual,
    centered,
    correlation,
    growth_of,
    log_size,
    rms_of,
    robust_scale,
    share,
    usual_rms,
)
from trimtab.diagnosis.measure.trained_tokens import explained
from trimtab.diagnosis.records import UNPROVEN, Cause, Numerics
from trimtab.runs.metric_catalog import K3, judge, k3_ranges
from trimtab.text import short

MAX_K3 = 0.12  # largest k3 that is called noise [4 bits in exact streams: .1]
MAX_DIRECTION = 0.35  # largest share of the variance of shifts by probability [8 bits: .3, temperature: .5]
MAX_GROUP_SHARE = 0.2  # largest share of the variance of log sizes by group [8 bits, trained: .08, bases: .02]
MIN_GROUP_TOKENS = 40  # fewest undecided tokens of a group that is compared
MIN_GROUPS = 2  # fewest groups with so many tokens that are compared
MIN_PROMPT_TOKENS = 20  # fewest undecided tokens of a prompt that is compared
MIN_PROMPTS = 8  # fewest prompts with so many tokens that are compared
MIN_STEP_GROWTH = 1.8  # least growth of sizes from the step with the smallest to the one with the largest
STEP_GROWTH_Z = 6.0  # standard errors of that growth, large since both steps are selected
MIN_STEP_ORDER = 0.9  # least share of the variance of sizes that an ascending curve over the steps explains
MAX_STEP_GROWTH = 3.0  # growth of sizes above which a mismatch is not called noise [4 bits, in training: 2.3]
MIN_RESPONSE_TOKENS = 8  # fewest undecided tokens of a response that is compared with others
MIN_RESPONSES = 8  # fewest responses that are compared
MIN_SPLIT = 3.0  # standard deviations within the two groups that these must be apart
APART = 4.0  # times as large in the responses that carry a difference as in those that do not

QUANTIZED = {"eight bits": (0.13, 0.44), "four bits": (0.39, 2.0)}
"""Smallest and largest measured root mean square of logits, by the bits of weights (docs/reference-detection.md)."""
PARTS = 8  # number of parts, with equally many tokens, that depths and probabilities are split into


def objection(tokens: LogprobPairs, residual: Residual) -> str:
    """Returns why a difference cannot be noise, or "": noise has mean ratio 1, no direction and one size."""
    if residual.mean_is_one == "no":
        return "rounding, quantization and routing leave the mean ratio at 1, so this is none of them"
    if residual.mean_is_one == "unknown":
        return "a few tokens decide the mean, so noise can be neither named nor excluded"
    if residual.k3 > MAX_K3:
        return f"beyond {MAX_K3:g} quantized weights are not told from other damage"
    if (part := part_by_probability(tokens)) > MAX_DIRECTION:
        return f"the probability of a token decides where its logit moves ({part:.0%} of the variance), unlike noise"
    steps = drift_between_steps(tokens)
    if steps is not None and np.ptp(steps.sizes) > math.log(MAX_STEP_GROWTH):
        return f"{steps.text}, and noise has one size"
    name, part = max(uneven_by(tokens).items(), key=lambda item: item[1], default=("", 0.0))
    if part > MAX_GROUP_SHARE:
        return f"the {name} decides {part:.0%} of the variance of its size, and noise has one size"
    return ""


def part_by_probability(tokens: LogprobPairs) -> float:
    """Returns the share of the variance of shifts that the token's probability explains: near 0 for noise."""
    undecided = tokens.undecided
    if undecided.sum() < MIN_GROUP_TOKENS:
        return 0.0
    shift = tokens.shift[undecided]
    scale = robust_scale(shift)
    return explained(np.clip(shift, -5 * scale, 5 * scale), parts_of(tokens.mean[undecided]))


def uneven_by(tokens: LogprobPairs) -> dict[str, float]:
    """Returns the share of the variance of log sizes that age, prompt and depth explain, by their names."""
    tokens = tokens.distinct
    undecided = tokens.undecided
    if undecided.sum() < 2 * MIN_GROUP_TOKENS:
        return {}
    size = log_size(tokens.shift[undecided])
    found = {}
    groups_of = {"age of the weights": tokens.age, "prompt": tokens.prompt, "depth": parts_of(tokens.depth)}
    for name, group in groups_of.items():
        if group is None:
            continue
        least, groups = (MIN_PROMPT_TOKENS, MIN_PROMPTS) if name == "prompt" else (MIN_GROUP_TOKENS, MIN_GROUPS)
        count = np.unique(group[undecided], return_counts=True)[1]
        if (count >= least).sum() >= groups:
            found[name] = explained(size, group[undecided], least)
    return found


def parts_of(values: np.ndarray) -> np.ndarray:
    """Returns the part of each value, from 0: `PARTS` quantile bins with equally many values."""
    return np.searchsorted(np.quantile(values, np.arange(1, PARTS) / PARTS), values, side="left")


def carriers(undecided: LogprobPairs) -> tuple[np.ndarray, int]:
    """Returns the rows that carry the difference, and the number of rows compared (with enough undecided tokens).

    If the mean log sizes of rows form two groups far apart, the larger group carries it; otherwise no row does. Sizes
    are centered by step first, since a size that grows over steps also differs between responses.
    """
    size = log_size(undecided.shift)
    size = size if undecided.step is None else centered(size, undecided.step)
    rows, index, number = np.unique(undecided.row, return_inverse=True, return_counts=True)
    rows, sizes = (values[number >= MIN_RESPONSE_TOKENS] for values in (rows, np.bincount(index, size) / number))
    place = np.argsort(sizes)
    order, count = sizes[place], len(place)
    if count < MIN_RESPONSES:
        return rows[:0], count
    first = np.arange(1, count)  # sizes of the lower group
    low = np.cumsum(order)[:-1] / first
    high = (order.sum() - np.cumsum(order)[:-1]) / (count - first)
    cut = int(np.argmax(first * (count - first) * (high - low) ** 2)) + 1
    apart = float(high[cut - 1] - low[cut - 1])
    within = math.sqrt(float(order[:cut].var() * cut + order[cut:].var() * (count - cut)) / count)
    return rows[place[count if apart < max(math.log(APART), MIN_SPLIT * within) else cut :]], count


@dataclass(frozen=True)
class Steps:
    """Training steps with enough tokens, ascending."""

    steps: list[int]
    sizes: list[float]  # mean log size of the shifts of each step
    text: str  # how much the sizes differ

    @property
    def ascends(self) -> bool:
        """Whether sizes grow in the order of the steps."""
        return self.order >= MIN_STEP_ORDER

    @property
    def order(self) -> float:
        """The share of the variance of sizes that the best ascending curve over the steps explains.

        It is also 1 if sizes rise at first and then stay, which a slope or a correlation hardly shows.
        """
        parts: list[list[float]] = []
        for size in self.sizes:
            parts.append([size])
            while len(parts) > 1 and np.mean(parts[-2]) >= np.mean(parts[-1]):  # a descending pair gets one mean
                parts[-2:] = [parts[-2] + parts[-1]]
        ascending = np.concatenate([np.full(len(part), np.mean(part)) for part in parts])
        return 1 - float(np.square(self.sizes - ascending).mean() / np.var(self.sizes))


def drift_between_steps(tokens: LogprobPairs) -> Steps | None:
    """Returns the sizes of shifts by step if they differ by more than rounding explains, else None.

    As a policy becomes certain, its logits grow, and rounding moves them further; k3 grows by at most as much, since
    fewer tokens are undecided. With other weights, k3 grows with the square of the shifts. The border is power 1.5.
    """
    step = tokens.step
    if step is None:
        return None
    undecided, shift = tokens.undecided, tokens.shift
    shifts = {int(s): shift[undecided & (step == s)] for s in np.unique(step)}
    shifts = {s: values for s, values in shifts.items() if len(values) >= MIN_GROUP_TOKENS}
    if len(shifts) < 2:
        return None
    sizes = {s: float(log_size(values).mean()) for s, values in shifts.items()}
    smallest, largest = min(sizes, key=lambda s: sizes[s]), max(sizes, key=lambda s: sizes[s])
    growth, z = growth_of(shifts[largest], shifts[smallest])
    is_clear = growth >= MIN_STEP_GROWTH and z >= STEP_GROWTH_Z
    if not is_clear or rms_of(shifts[largest]) < LEAST_RMS:
        return None
    low, high = (Residual.of(tokens.select(step == at)).k3 for at in (smallest, largest))
    if high < growth**1.5 * low:
        return None
    text = f"logits move {growth:.1f} times as far at step {largest} as at step {smallest} (z = {z:.1f})"
    return Steps(list(sizes), list(sizes.values()), text)


def find_unexplained(tokens: LogprobPairs, left: Residual, floor: float, *, is_rest: bool) -> Cause | None:
    """Returns the cause, or None within the noise floor. `is_rest`: whether other causes were found and undone."""
    if left.mean_is_one == "yes" and left.k3 < max(LEAST_K3, 3 * floor):
        return None
    related = correlation(np.exp(tokens.behavior), np.exp(tokens.trainer))
    evidence = "after the causes above are undone, " if is_rest else ""
    evidence += f"k3 {left.k3:.2g}, {left.text}, correlation of the probabilities {related:.2f}"
    if reason := objection(tokens, left):
        evidence += f": {reason}"
    return Cause("unexplained", UNPROVEN, evidence, share_of_k3=1.0, tokens=left.tokens)


BORDER_RMS = 0.25  # logits between 16 bits and quantized weights [whole runs: .18-.23, .38-.44]
BORDER_K3 = 0.0058  # k3 between 16 bits and quantized weights [whole runs: 1.3e-3 to 2.9e-3, 5.7e-3 to 1.2e-2]
RMS_WEIGHT = 0.7  # weight of the rms, which varies less between runs than k3
IDS_SHIFT = 0.7  # distance from the border that is added where noise depends on token ids
MIN_IDS_PART = 0.07  # least part of the variance that token ids explain [8 bits: .12, bfloat16: .02]
MIN_IDS = 60  # fewest ids that occur twice
MIN_ID_TOKENS = 1500  # fewest undecided tokens in which the part that depends on their ids shows
BFLOAT16_RMS = 0.008  # logits: an rms below is float16 or tf32 rather than bfloat16
EIGHT_BITS_RMS = 0.08  # logits: eight bits move as far, bfloat16 may as well [SmolLM2: .12, .07]
MAX_RECIPE_RMS = 1.3  # logits: the largest rms measured for float32 against bfloat16, after an update
MAX_STATED = 1.5  # times the largest rms that was measured up to which quantization that is stated explains it
RECIPE_CONFIDENCE = 0.95  # confidence where the run's recipe says it
MAX_FAR_SHARE = 0.008  # largest share of tokens beyond five usual shifts in noise of one size [tails of 12 bases]
MIN_FAR_TOKENS = 5  # fewest tokens beyond five usual shifts that count
MAX_FAR_SHARE_REPAIRED = 0.03  # that share after a repair, which leaves some wrong pairs
MAX_FAR_K3 = 0.3  # largest share of k3 in tokens beyond five usual shifts in noise of one size [tails of 12 bases]
MAX_FAR_K3_COARSE = 0.6  # that share for noise of quantized weights [SmolLM2, 8 bits: .32; in training: .55]
MIN_FAR_SIDES = 8  # fewest tokens beyond five usual shifts whose directions count
MAX_FAR_SIDE = 0.88  # largest share of them that moves one way: noise and other experts raise as many as they lower
MAX_ROUTING_SHARE = 0.15  # largest share of tokens beyond five usual shifts that other experts explain
MIN_ROUTING_K3 = 0.65  # least share of k3 in tokens beyond five usual shifts that is called routing [mixture: .9]
FEW_FAR_K3 = 0.8  # the same where they are as rare as in noise of one size


@dataclass(frozen=True)
class Noise:
    """The zero-mean difference that remains between trainer and sampler."""

    rms: float  # in logits, at undecided tokens
    k3: float | None  # over all tokens; None if unknown, and `rms` is only a lower bound
    tokens: int  # number of tokens that `rms` is computed from
    persistent: float | None = None  # share of the variance that token ids explain; None if unknown, 0 if insignificant
    far: float = 0.0  # share of the undecided tokens that are far: beyond five times the usual shift
    far_k3: float = 0.0  # share of the undecided tokens' k3 that far tokens hold
    far_side: float = 0.0  # share of far tokens that move the more frequent way; 0 if they are few

    @property
    def coarseness(self) -> float:
        """Log-distance from the border between 16-bit arithmetic and quantized weights; positive if quantized."""
        by_rms = math.log(max(self.rms, 1e-9) / BORDER_RMS)
        if self.k3 is None:
            return by_rms
        by_k3 = 0.5 * math.log(max(self.k3, 1e-12) / BORDER_K3)
        by_ids = IDS_SHIFT if self.persistent else 0.0
        return RMS_WEIGHT * by_rms + (1 - RMS_WEIGHT) * by_k3 + by_ids

    @property
    def text(self) -> str:
        size = f"logits of {self.tokens} undecided tokens differ by {self.rms:.2g} (root mean square)"
        return size + (" besides the larger difference above" if self.k3 is None else f", k3 = {short(self.k3)}")


def measure_noise(tokens: LogprobPairs) -> Noise:
    undecided = tokens.undecided
    if undecided.sum() < 10:
        undecided = tokens.behavior < -1e-3
    shift, k3 = tokens.shift[undecided], tokens.k3
    if len(shift) < 10:
        return Noise(0.0, 0.0, len(shift))
    scale = robust_scale(shift)
    far = np.abs(shift) > 5 * scale
    up = share(shift[far] > 0)
    return Noise(
        usual_rms(shift),
        float(k3.mean()),
        len(shift),
        persistent=id_part(tokens, scale),
        far=share(far),
        far_k3=float(k3[undecided][far].sum() / max(k3[undecided].sum(), 1e-300)),
        far_side=max(up, 1 - up) if far.sum() >= MIN_FAR_SIDES else 0.0,
    )


def id_part(tokens: LogprobPairs, scale: float) -> float | None:
    """Returns the share of the shifts' variance that the token id explains: rounding causes none, other weights do.

    None without ids or with too few repeated ids, since ids of a small alphabet encode the position. A share that is
    not significant is 0 with enough tokens, else None.
    """
    if tokens.ids is None or scale <= 0:
        return None
    undecided = tokens.undecided
    shift = np.clip(tokens.shift[undecided] / scale, -4, 4)
    _, ids = np.unique(tokens.ids[undecided], return_inverse=True)
    count = np.bincount(ids)
    often = count > 1
    if often.sum() < MIN_IDS:
        return None
    products = (np.bincount(ids, shift)[often] ** 2 - np.bincount(ids, shift**2)[often]) / count[often]
    part = float(products.sum() / (count[often] - 1).sum() / (shift**2).mean())
    z = float(products.mean() / max(products.std(), 1e-12) * math.sqrt(len(products)))
    if part > MIN_IDS_PART and z > 3.0:
        return part
    return 0.0 if undecided.sum() >= MIN_ID_TOKENS else None


def least_noise(tokens: LogprobPairs, direction: int) -> Noise:
    """Returns a lower bound on the noise beside a fault that cannot be undone and moves tokens in `direction`.

    Another temperature, and truncation, move the logits of all tokens of probability above 1/2 in one direction. Moves
    in the other direction are noise. The tail of a normal beyond a point extends half its scale or less past it.
    """
    probable = tokens.undecided & (np.minimum(tokens.behavior, tokens.trainer) > math.log(0.5))
    opposite = -direction * tokens.shift[probable]
    wrong = opposite[opposite > LEAST_RMS]
    if len(wrong) < 20 or len(wrong) < 0.01 * len(opposite):
        return Noise(0.0, None, len(wrong))
    # If few tokens move the other way, only the tail of the noise is visible; if half of them do, all of it is.
    factor = 1.0 if len(wrong) > 0.3 * len(opposite) else 1.5
    return Noise(rms_of(wrong) * factor, None, len(wrong))


def find_noise(tokens: LogprobPairs, context: Context) -> list[CauseMatch]:
    """Names the noise if it exceeds float32 and the file's rounding, and if nothing shows that it is not noise.

    A few tokens far beyond the others were routed to other experts; many such tokens mean several kinds of noise. The
    run's numerics decide if they determine whether the sampler is quantized.
    """
    noise = least_noise(tokens, context.direction) if context.direction else measure_noise(tokens)
    residual = Residual.of(tokens)
    known = context.numerics if context.numerics is not None and context.numerics.coarse is not None else None
    sixteen = known is not None and not known.is_recorded and not known.coarse
    if sixteen:  # what the user states about one side does not bound the other
        known = None
    if noise.rms < LEAST_RMS:
        return []
    text = noise.text
    if noise.k3 is not None:
        if noise.k3 < max(LEAST_K3, 3 * context.floor):
            return []
        if objection(tokens, residual) if known is None else residual.mean_is_one != "yes":
            return []
        text += f", {residual.text}"
    if noise.k3 is not None and _has_tail(noise, is_repaired=context.repaired):
        # In routing, few tokens hold most of k3 and the others are as usual, unlike in other mixtures of sizes.
        # At the k3 of a dense model, heavy-tailed rounding looks alike, so these tokens must hold nearly all of k3.
        least = FEW_FAR_K3 if noise.k3 <= k3_ranges()["dense"].high else MIN_ROUTING_K3
        is_few = noise.far <= MAX_ROUTING_SHARE and noise.far_k3 >= least
        if noise.far_side > MAX_FAR_SIDE or (is_few and noise.coarseness > IDS_SHIFT):
            return []
        if not is_few:
            text += ", of other sizes in other contexts"
            return [_by_size(tokens, noise, text)] if judge(K3, noise.k3) == "healthy" else []
        if carriers(tokens.select(tokens.undecided))[0].size:  # routing differs in every response, not only in some
            return []
        evidence = (
            f"{noise.far:.1%} of the undecided tokens differ more than five times as much as usual and hold "
            f"{noise.far_k3:.0%} of k3, as where other experts answer; {text}"
        )
        return [_noise("routing", tokens, UNPROVEN, evidence)]
    if known is not None:
        return _by_recipe(tokens, noise, text, known)
    if noise.rms > QUANTIZED["four bits"][1]:
        return []
    found = _by_size(tokens, noise, text)
    is_stated = sixteen and found.name == "precision" and noise.coarseness < 0 and not noise.persistent
    return [replace(found, is_stated=is_stated)]


def _has_tail(noise: Noise, *, is_repaired: bool) -> bool:
    """Returns whether more tokens are beyond five usual shifts, with more of k3, than in noise of one size."""
    # After lists are shifted back, some pairs at the edges of stretches stay wrong.
    usual = max((MAX_FAR_SHARE_REPAIRED if is_repaired else MAX_FAR_SHARE), MIN_FAR_TOKENS / noise.tokens)
    is_rare = not is_repaired and noise.far * noise.tokens >= MIN_FAR_TOKENS and noise.far_k3 > FEW_FAR_K3
    return is_rare or (noise.far > usual and noise.far_k3 > (MAX_FAR_K3_COARSE if noise.coarseness > 0 else MAX_FAR_K3))


def _by_recipe(tokens: LogprobPairs, noise: Noise, text: str, numerics: Numerics) -> list[CauseMatch]:
    """Returns the cause according to the numerics; empty if there is more noise than rounding makes."""
    sure, evidence = RECIPE_CONFIDENCE, f"{text}; {numerics.source} {numerics}"
    if numerics.coarse:
        most = MAX_STATED * QUANTIZED[numerics.bits][1]
        if noise.rms <= most:
            return [replace(_noise("quantized", tokens, sure, evidence), is_stated=True)]
        evidence += f", but weights of {numerics.bits} were not measured to move logits by more than {most:.2g}"
        return [_noise("quantized", tokens, UNPROVEN, evidence)]
    if noise.rms > MAX_RECIPE_RMS if noise.k3 is None else noise.k3 > k3_ranges()["moe"].high:
        return []
    if not numerics.sixteen_bits:
        sure, evidence = 0.5, f"{text}, although {numerics.source} {numerics}: check the dtype of the sampler"
    return [replace(_noise("precision", tokens, sure, evidence), is_stated=numerics.sixteen_bits)]


def _by_size(tokens: LogprobPairs, noise: Noise, text: str) -> CauseMatch:
    """Names the noise by its size. It may be wrong: other weights move logits as far as quantized weights do."""
    sure = min(UNPROVEN, 0.55 + 0.5 * abs(noise.coarseness))
    if noise.coarseness <= 0:
        kind = "float16 or tf32" if noise.rms < BFLOAT16_RMS else "bfloat16"
        evidence = f"{text}: the size of {kind} arithmetic"
        if noise.rms > EIGHT_BITS_RMS and noise.persistent is None:
            evidence += ", which weights of eight bits have too (token ids would tell them apart)"
        return _noise("precision", tokens, sure, evidence)
    evidence = f"{text}: more than bfloat16 on both sides gives (up to 0.23 and 3e-3)"
    if noise.persistent:
        evidence += f"; the token id decides {noise.persistent:.0%} of its variance, as with other weights"
    else:
        evidence += ", unless float32 weights are trained with a bfloat16 sampler: see the engine's settings"
    if tokens.age is None:
        evidence += "; old weights move logits as far, and without versions these files cannot tell"
    return _noise("quantized", tokens, sure, evidence)


def _noise(name: str, tokens: LogprobPairs, sure: float, evidence: str) -> CauseMatch:
    return CauseMatch(name, evidence, tokens, len(tokens), round(sure, 2), is_final=True)
