"""Ranks the candidates: possible causes of a difference that nothing in the data proves, by signs in its tokens.

A sign is a measurement beyond a threshold that chance does not reach, with a clause that states its numbers. No sign
proves a cause: a rotary setting and a quantized cache both make a difference grow with depth. If a sign cannot be
measured (a column is missing, too few tokens), neither the sign nor its opposite is reported.

A candidate's score is a sum of log odds (candidates.toml): a prior, plus or minus the weight of each sign. Only the
order matters; the scores are not probabilities. Candidates that one test tells apart are a family. Families are ordered
by the sum of their odds, so the first candidate may be in a later family.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from trimtab.diagnosis.causes import noise_kinds
from trimtab.diagnosis.causes.detector import (
    LogprobPairs,
    Residual,
    centered,
    correlation,
    growth_of,
    log_size,
    logit,
    robust_scale,
    slope_of,
    usual_rms,
)
from trimtab.diagnosis.causes.old_weights import advantage_correlation
from trimtab.diagnosis.measure.trained_tokens import explained
from trimtab.diagnosis.records import PROVEN, Candidate, CandidateKind, Cause, Measured, read_table

FAR = 5.0  # usual shifts beyond which a token is far
ONE_WAY = 0.7  # least share of all undecided tokens that move one way
SIGN_Z = 6.0  # standard errors beyond which a trend is one
MIN_TREND = 1.25  # least ratio of sizes between the ends of a trend
MIN_BEFORE = 0.15  # least share of the tokens before the depth at which a difference begins
MIN_ONSET = 8.0  # least growth along the context of what begins within responses [caches and positions: up to 5]
MIN_VARIANCE_PART = 0.08  # least part of the variance that a group decides
MIN_DIRECTION = 0.06  # least part of the variance of shifts that the probability decides
MAX_LOOSE = 0.3  # part of the variance on a line below which there is none [other contexts: .15, temperatures: .7]
END_LIFT = 5.0  # least ratio of the share of k3 of first or last tokens to their share of the tokens
MIN_SEEN = 0.7  # usual shifts by which tokens that occurred before must differ from others
UNLIKE = 0.3  # nats by which the lists of a response must differ on average before it is asked whether they are related
MAX_UNLIKE = 3.0  # nats: a difference beyond it counts as this much
MAX_RELATED = 0.2  # correlation below which lists have no relation [other contexts: .25 and more, weights: .28]
MAX_CHANCE = 0.3  # correlation plus two standard errors below which lists have no relation
MIN_UNRELATED = 60  # fewest tokens of such responses
NEAR = 1.0  # nats by which near tokens differ at most; a low mean ratio that far tokens alone make is chance
MIN_RAISED = 0.03  # least ratio of raised to lowered tokens that are far apart, where they go both ways
NEVER = -20.0  # log-prob as which smaller ones count
TURN_GROWTH = 4.0  # least growth of sizes from one turn to the next
MAX_TURNS = 50  # most turns that are compared

TESTS: Mapping[str, str] = read_table("candidates.toml")["test"]
KINDS = tuple(CandidateKind(**row | {"test": TESTS[row["test"]]}) for row in read_table("candidates.toml")["candidate"])
Sign = tuple[str, str]
"""A key of candidates.toml, and a clause with the numbers, for "since ..."."""


def find_candidates(measured: Measured, causes: Sequence[Cause], tested: Mapping[str, bool]) -> tuple[Candidate, ...]:
    """Returns the candidates for a difference that no cause proves, most likely first; empty if a cause is proven.

    tested: by name of a candidate, whether its test found it. If the ids were scored again and one side is wrong, that
    side is compared with those scores, and only candidates that are possible on that side remain.
    """
    # Placeholders are already left out: the other tokens have a cause of their own. Values above 0 have no candidates.
    open_ones = [cause for cause in causes if cause.name not in ("placeholder", "non-finite")]
    is_above_zero = any(cause.name == "unexplained" and cause.confidence >= PROVEN for cause in causes)
    is_clean_rest = len(open_ones) < len(causes) and {one.name for one in open_ones} == {"precision"}
    if not open_ones or open_ones[0].is_proven or is_above_zero or is_clean_rest:
        return ()
    tokens, sides = LogprobPairs.of(measured.sample), measured.rescored
    # If both sides are wrong, or neither, all are possible: one side's fault may add to the other side's rounding.
    side = sides.side if sides is not None and sides.side in ("sampler", "trainer") else ""
    if side and (rescored := measured.sample.rescored) is not None:
        right = np.minimum(rescored[tokens.index].astype(np.float64), 0.0)
        known = np.isfinite(right)
        right = {"trainer" if side == "sampler" else "behavior": right}
        tokens = replace(tokens, **right).select(known)
    return rank(find_signs(tokens, assumes_current=measured.origin.assumes_current), side, tested)


def find_signs(tokens: LogprobPairs, *, assumes_current: bool = False) -> dict[str, str]:
    """Returns the signs in tokens: the clause of each by its name; empty with fewer than 20 undecided tokens."""
    undecided = tokens.select(tokens.undecided)
    if len(undecided) < 20:
        return {}
    found = (
        *_of_mean(tokens),
        *_of_pairs(tokens),
        *_of_size(undecided),
        *_of_direction(undecided),
        *_of_tail(undecided),
        *_of_ids(tokens, undecided),
        *_of_responses(undecided),
        *_of_depth(undecided),
        *_of_turns(undecided),
        *_of_ends(tokens),
        *_of_time(tokens, assumes_current=assumes_current),
        *_of_settings(tokens),
    )
    return dict(found)


def _of_mean(tokens: LogprobPairs) -> Iterator[Sign]:
    residual = Residual.of(tokens)
    lost = -np.expm1(np.minimum(tokens.log_ratio, NEAR))
    near = np.abs(tokens.log_ratio) < NEAR
    both_ways = (tokens.log_ratio > NEAR).sum() > MIN_RAISED * (tokens.log_ratio < -NEAR).sum()
    # A low mean says nothing if ratios near 0 cause it, and the large ratios that balance them are too rare to be seen.
    is_chance = residual.ratio_mean < 1 and both_ways and lost[near].sum() < lost[~near].sum()
    if residual.mean_is_one == "no" and not is_chance:
        name = "mean-low" if residual.ratio_mean < 1 else "mean-high"
        yield name, f"the mean ratio is {residual.ratio_mean:.3g}, not 1 (z = {residual.z:.0f})"
    elif residual.mean_is_one == "yes":
        yield "mean-one", f"the mean ratio is {residual.ratio_mean:.4g}, as of two complete distributions"


def _of_pairs(tokens: LogprobPairs) -> Iterator[Sign]:
    """Yields a sign if the two lists of some responses are unrelated, as log-probs of different tokens are."""
    rows, index = np.unique(tokens.row, return_inverse=True)
    mean = np.bincount(index, np.minimum(np.abs(tokens.log_ratio), MAX_UNLIKE)) / np.bincount(index)
    unlike = (mean > UNLIKE)[index]
    if unlike.sum() < MIN_UNRELATED:
        return
    both = [values[unlike] for values in (tokens.behavior, tokens.trainer)]
    related = max(correlation(*map(change, both)) for change in (np.exp, lambda logp: np.maximum(logp, NEVER)))
    if related < MAX_RELATED and related + 2 / math.sqrt(unlike.sum()) < MAX_CHANCE:
        where = f"{int((mean > UNLIKE).sum())} of {len(rows)} responses"
        yield "no-relation", f"in {where} the two lists of log-probs have no relation (correlation {related:.2f})"


def _of_size(undecided: LogprobPairs) -> Iterator[Sign]:
    rms = usual_rms(undecided.shift)
    name, given = "size-large", "more than weights of 4 bits give"
    if rms < noise_kinds.QUANTIZED["eight bits"][0]:
        name, given = "size-small", "no more than 16-bit arithmetic gives"
    elif rms <= noise_kinds.QUANTIZED["four bits"][1]:
        name, given = "size-coarse", "within what weights of 8 or 4 bits give"
    yield name, f"logits differ by {rms:.2g} (root mean square), {given}"


def _of_direction(undecided: LogprobPairs) -> Iterator[Sign]:
    """Yields whether the probability decides where logits move, and whether on a line, in responses that carry it."""
    carried = np.isin(undecided.row, noise_kinds.carriers(undecided)[0])
    undecided = undecided.select(carried) if carried.sum() >= MIN_UNRELATED else undecided
    part = noise_kinds.part_by_probability(undecided)
    if part < MIN_DIRECTION:
        yield "no-direction", "the probability of a token does not decide where its logit moves"
        return
    scale = robust_scale(undecided.shift)
    shift = np.clip(undecided.shift, -FAR * scale, FAR * scale)
    moved = f"the probability decides {part:.0%} of where logits move"
    if correlation(undecided.shift / 2 + logit(undecided.behavior), shift) ** 2 < MAX_LOOSE:
        yield "loose", f"{moved}, but along no line"
    else:
        yield "straight", f"{moved}, in proportion to them"


def _of_tail(undecided: LogprobPairs) -> Iterator[Sign]:
    shift = undecided.shift
    # Tokens sampled from a very different distribution are less likely in the trainer, so `down` is then no sign.
    is_large = usual_rms(shift) > noise_kinds.QUANTIZED["four bits"][1]
    up = float((shift > 0).mean())
    side = up if is_large else max(up, 1 - up)
    if side >= ONE_WAY and (side - 0.5) * 2 * math.sqrt(len(shift)) > SIGN_Z:
        way = "up" if up > 0.5 else "down"
        yield "one-way", f"{side:.0%} of the trainer's logits move {way}"
    far = np.abs(shift) > FAR * robust_scale(shift)
    if far.sum() < noise_kinds.MIN_FAR_TOKENS:
        return
    up = float((shift[far] > 0).mean())
    held = float(undecided.k3[far].sum() / max(undecided.k3.sum(), 1e-300))
    if far.sum() >= noise_kinds.MIN_FAR_SIDES and max(up, 1 - up) > noise_kinds.MAX_FAR_SIDE:
        if is_large and up < 0.5:
            return
        ways = f"{int(max(up, 1 - up) * far.sum() + 0.5)} of {int(far.sum())} far tokens"
        yield "tail-one-sided", f"{ways} have a {'larger' if up > 0.5 else 'smaller'} probability in the trainer"
    elif 0 < up < 1 and held >= 0.5 and far.mean() <= noise_kinds.MAX_ROUTING_SHARE:
        yield "tail-two-sided", f"{far.mean():.1%} of the tokens, raised and lowered alike, hold {held:.0%} of k3"


def _of_ids(tokens: LogprobPairs, undecided: LogprobPairs) -> Iterator[Sign]:
    scale = robust_scale(undecided.shift)
    part = noise_kinds.id_part(tokens, scale)
    if part:
        yield "by-id", f"the token id decides {part:.0%} of the variance of its shift"
    elif part == 0:
        yield "not-by-id", "a token's shift differs from context to context"
    if tokens.ids is None:
        return
    key = np.stack([tokens.row, tokens.ids], axis=1)
    order = np.lexsort((np.arange(len(tokens)), key[:, 1], key[:, 0]))
    same = (np.diff(key[order], axis=0) == 0).all(1)
    seen = np.zeros(len(tokens), dtype=bool)
    seen[order[1:]] = same
    seen = seen[tokens.undecided]
    if min(seen.sum(), (~seen).sum()) < 40:
        return
    shift = np.clip(undecided.shift, -FAR * scale, FAR * scale)
    alike = noise_kinds.parts_of(undecided.mean)
    slope, z = slope_of(centered(shift, alike), centered(seen.astype(np.float64), alike), cluster=undecided.row)
    if abs(z) > SIGN_Z and abs(slope) > MIN_SEEN * scale:
        # They are higher in the trainer if the sampler has a penalty, and lower if the trainer sees another context.
        name, way = ("seen", "higher") if slope > 0 else ("seen-less", "lower")
        yield name, f"tokens that occurred before are {abs(slope):.2g} logits {way} in the trainer (z = {z:.0f})"


def _of_responses(undecided: LogprobPairs) -> Iterator[Sign]:
    """Yields which responses carry the difference, and whether the prompt decides."""
    size = log_size(undecided.shift)
    if undecided.step is not None:  # a size that grows over steps also differs between responses
        size = centered(size, undecided.step)
    rows, count = np.unique(undecided.row, return_counts=True)
    if (count >= noise_kinds.MIN_RESPONSE_TOKENS).sum() < 4:
        return
    part = explained(size, undecided.row, noise_kinds.MIN_RESPONSE_TOKENS)
    prompt = undecided.prompt
    of_prompt = 0.0 if prompt is None else explained(size, prompt, noise_kinds.MIN_RESPONSE_TOKENS)
    if part < MIN_VARIANCE_PART:
        yield "even", "all responses differ alike"
    elif prompt is not None and len(np.unique(prompt)) < 0.6 * len(rows) and of_prompt > 0.7 * part:
        yield "by-prompt", f"the prompt decides {of_prompt:.0%} of the variance of sizes"
    else:
        yield "by-response", f"the response decides {part:.0%} of the variance of sizes"
    carry, compared = noise_kinds.carriers(undecided)
    if part >= MIN_VARIANCE_PART and len(carry):
        yield "some-clean", f"{len(carry)} of {compared} responses carry it, the others are clean"


def _of_depth(undecided: LogprobPairs) -> Iterator[Sign]:
    size = centered(log_size(undecided.shift), noise_kinds.parts_of(undecided.mean))  # independent of the probability
    depth = np.log(undecided.depth + 4.0)
    _, z = slope_of(centered(size, undecided.row), centered(depth, undecided.row), cluster=undecided.row)
    part = noise_kinds.parts_of(undecided.depth)
    sizes = np.exp(np.bincount(part, size) / np.maximum(np.bincount(part), 1))
    times = float(sizes[-1] / sizes[0])
    if abs(z) < SIGN_Z:
        if len(undecided) >= 1000:
            yield "flat", "the size is the same along a response"
    elif z > 0 and times > MIN_TREND:
        yield "onset" if times > MIN_ONSET else "deeper", f"it grows {times:.1f} times along the context (z = {z:.0f})"
    elif z < 0 and times < 1 / MIN_TREND:
        yield "earlier", f"it is {1 / times:.1f} times as large at the start of a response as at its end"
    yield from _of_one_depth(undecided, part)


def _of_one_depth(undecided: LogprobPairs, part: np.ndarray) -> Iterator[Sign]:
    """Yields a sign if the difference begins at one depth of the context, in responses with tokens on both sides."""
    size = np.abs(undecided.shift)
    large = size > FAR * float(np.median(size[part == 0]))
    if large.sum() < noise_kinds.MIN_FAR_TOKENS:
        return
    begin = float(np.quantile(undecided.depth[large], 0.05))
    before = undecided.depth < begin
    soon = ~before & (undecided.depth <= np.quantile(undecided.depth[~before], 0.25))
    soon &= np.isin(undecided.row, undecided.row[before])  # in responses with tokens on both sides
    if before.mean() > MIN_BEFORE and soon.sum() >= noise_kinds.MIN_FAR_TOKENS and large[soon].mean() > 0.4:
        yield "one-depth", f"it begins at one depth, {begin:.0f} tokens into the context or response"


def _of_turns(undecided: LogprobPairs) -> Iterator[Sign]:
    """Yields a sign if the difference begins with a turn: sizes jump between turns, unlike growth with depth."""
    numbers = np.unique(undecided.turn)[:MAX_TURNS].tolist()
    turns = [undecided.shift[undecided.turn == number] for number in numbers]
    jumps = [
        (growth_of(after, before), number)
        for number, before, after in zip(numbers[1:], turns, turns[1:], strict=False)
        if min(len(before), len(after)) >= noise_kinds.MIN_GROUP_TOKENS
    ]
    (times, z), number = max(jumps, default=((0.0, 0.0), 0))
    if times > TURN_GROWTH and z > SIGN_Z:
        yield "from-turn", f"it is {times:.0f} times as large in turn {number + 1} as in the turn before (z = {z:.0f})"


def _of_ends(tokens: LogprobPairs) -> Iterator[Sign]:
    """Yields a sign if the first or last trained tokens of responses hold far more k3 than their share of tokens."""
    edge = np.flatnonzero(np.diff(tokens.row, prepend=-1, append=-1))
    k3 = tokens.k3
    for name, at in (("first", edge[:-1]), ("last", edge[1:] - 1)):
        part, held = len(at) / len(tokens), float(k3[at].sum() / max(k3.sum(), 1e-300))
        if len(at) >= noise_kinds.MIN_RESPONSES and part < 0.2 and held > 0.3 and held > END_LIFT * part:
            yield "ends", f"the {name} token of a response holds {held:.0%} of k3"


def _of_time(tokens: LogprobPairs, *, assumes_current: bool) -> Iterator[Sign]:
    steps = noise_kinds.drift_between_steps(tokens)
    if steps is not None and steps.ascends:
        yield "step-growth", steps.text
    elif steps is None and tokens.step is not None and len(np.unique(tokens.step)) >= 3:
        yield "step-constant", "it is the same at every step"
    if tokens.age is not None and not assumes_current:
        if tokens.age.any():
            yield "old-versions", f"versions say that tokens are {float(tokens.age.mean()):.1f} updates old"
        else:
            yield "current-versions", "versions say that the sampler's weights are current"
    related, z = advantage_correlation(tokens)
    if z > 5:
        yield "advantage", f"log-ratios follow the advantage (correlation {related:.2f}, z = {z:.0f})"


def _of_settings(tokens: LogprobPairs) -> Iterator[Sign]:
    known = {name: float(np.median(values)) for name, values in tokens.table.sampling.items()}
    # A top_k of 0, or of -1 in vLLM, is no truncation.
    other = {name: value for name, value in known.items() if (value > 0 if name == "top_k" else value != 1)}
    if other or "temperature" in known:
        text = ", ".join(f"{name} {value:g}" for name, value in (other or known).items())
        yield "settings-stated" if other else "settings-neutral", f"the file states {text}"


def rank(signs: Mapping[str, str], side: str = "", tested: Mapping[str, bool] | None = None) -> tuple[Candidate, ...]:
    """Returns the candidates, most likely first; empty without signs.

    side: the side that `trimtab rescore` found to be wrong, "" if unknown. tested: by name of a candidate, whether its
    test found it.
    """
    tested = tested or {}
    possible = (kind for kind in KINDS if (not side or side in kind.sides) and tested.get(kind.name, True) and signs)
    found = [_weigh(kind, signs, is_found=tested.get(kind.name, False)) for kind in possible]
    return tuple(sorted(found, key=lambda one: (one.found, one.odds), reverse=True))


def group_by_test(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Returns families: candidates with the same test. A family that its test found is first, then by sum of odds."""
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.test, []).append(candidate)
    return sorted(groups.values(), key=lambda group: (group[0].found, sum(one.odds for one in group)), reverse=True)


def _weigh(kind: CandidateKind, signs: Mapping[str, str], *, is_found: bool) -> Candidate:
    weights = [{name: part[name] for name in part if name in signs} for part in (kind.speaks_for, kind.speaks_against)]
    odds = math.exp(kind.prior + sum(weights[0].values()) - sum(weights[1].values()))
    strongest, opposed = (signs[max(part, key=lambda name: part[name])] if part else "" for part in weights)
    return Candidate(kind.name, kind.plain, strongest, opposed, kind.test, kind.wrong, odds, is_found)
