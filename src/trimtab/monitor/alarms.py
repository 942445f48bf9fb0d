"""The rules that raise an alarm from the metrics of the steps so far. Pure functions; no state, no input or output."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trimtab.errors import Finding, Status
from trimtab.monitor.metrics_of_step import MeanRatio
from trimtab.text import short

WINDOW = 20
"""Steps whose median or mean is compared with that of the steps before them."""
KEPT = 2 * WINDOW
"""Number of newest steps that the rules read, beside the first `WINDOW` steps and those of the best reward."""
NORM_FALL = 0.35
"""Share of its median before that the gradient norm must fall to. Miles reports .07 to .02 before a collapse."""
NORM_RISE = 10.0
"""How many times its median in the first steps the gradient norm must reach to have exploded."""
LEAST_BEFORE = 3
"""Steps before the last ones that such a median needs."""
COLLAPSED_SHARE = 0.5
"""Share of the best reward below which the last one has collapsed."""
STANDARD_ERRORS = 3.0
"""By how many of them a mean must be above another one to be clearly above it."""
RECENT = 5
"""Steps whose median counts as the present state."""
EXACT = 1e-7
"""k3 below which trainer and sampler compute the same up to rounding of float32."""
JUMP = 4.0
"""How many times the largest k3 of the window both of the last two steps must reach (`benchmarks/monitor.py`)."""
SHIFT_STEPS = 3
"""Steps whose mean log k3 is compared with such means before: a sampler of four bits hides the first lost weights from
`JUMP`."""
SHIFT_ERRORS = 4.6
"""Standard errors that their distance must reach; 40 runs without a fault reached 4.1 (`benchmarks/monitor.py`)."""
LEAST_SPREAD = 0.25
"""Standard deviation of log k3 between steps that is assumed at least, where rounding hardly varies."""
LARGEST = 4.0
"""Standard deviations from the mean as which a step counts at most, so that one of them is not enough."""
RISE = 5.0
"""How many times its median in the first steps the median k3 of the last ones must reach."""
RATIO_STEPS = 10
"""Steps over which the mean ratio is taken."""
RATIO_ERRORS = 6.0
"""Standard errors from 1 beyond which the mean ratio is wrong."""
RATIO_DISTANCE = 0.005
"""Distance from 1 below which it does not matter."""
LOW_ESS = 0.5
"""Effective sample size of tokens below which weights lose most of a batch, and an error of a mean says nothing."""
LARGE_K3 = 0.1
"""k3 beyond everything published for a working setup (1e-5 to 1e-1)."""
LENGTH_RISE = 2.0
"""How many times their first length responses must reach."""
TRUNCATED = 0.2
"""Share of truncated responses that is not remarkable."""
TRUNCATED_RISE = 0.15
"""Growth of that share since the first steps that is not remarkable."""
DIAGNOSE = "run `trimtab diagnose` on the sample"
"""What most alarms advise; who shows an alarm puts its own command in the place of this."""
MISSING = 0.001
"""Share of trained tokens without a finite log-prob that is not remarkable."""

# Comparisons are written `not x > limit`, so that NaN (a metric that is not there) raises no alarm.


@dataclass(frozen=True)
class Step:
    """A finished step.

    metrics: by name, such as `mismatch/k3`; a rule whose metrics are missing raises no alarm. ratio: the sums behind
    the mean ratio; None where only metrics are known.
    """

    number: int
    metrics: Mapping[str, float]
    ratio: MeanRatio | None

    def __getitem__(self, name: str) -> float:
        """Returns a metric; NaN where the step does not have it."""
        return self.metrics.get(name, math.nan)


@dataclass(frozen=True)
class Alarm(Finding):
    """A finding at a step. value: the figure that was judged."""

    value: float = math.nan
    step: int = -1


class AlarmRule(NamedTuple):
    """A row of the table of rules. judge: says whether the last of the steps raises an alarm by `metric`.

    steps: the number that it needs.
    """

    judge: Callable[[Sequence[Step]], Alarm | None]
    metric: str
    steps: int


def alarms(steps: Sequence[Step]) -> list[Alarm]:
    """Returns the alarms at the last of the steps, which are in order."""
    asked = (rule.judge(steps) for rule in RULES if len(steps) >= rule.steps)
    return [replace(alarm, step=steps[-1].number) for alarm in asked if alarm is not None]


def first_alarms(steps: Sequence[Step]) -> list[Alarm]:
    """Returns each alarm of a whole run at the first step that raises it, in their order.

    The same as `alarms` after every step, as `Monitor` calls it. Takes about 0.15 ms a step.
    """
    history, raised = History(), dict[str, Alarm]()
    for step in steps:
        history.add(step)
        for alarm in alarms(history.steps()):
            raised.setdefault(alarm.name, alarm)
    return list(raised.values())


def lasting_alarms(steps: Sequence[Step]) -> list[Alarm]:
    """Returns the alarms of a whole run that its last steps raise, too, beside the steps before the first alarm."""
    lasting = {alarm.name: alarm for alarm in (alarms(steps) if steps else ())}
    places = {step.number: place for place, step in enumerate(steps)}
    for alarm in first_alarms(steps):
        before = steps[: max(places[alarm.step] + 1 - WINDOW, 0)]
        if alarm.name in {one.name for one in alarms([*before, *steps[-WINDOW:]])}:
            lasting[alarm.name] = alarm
    return sorted(lasting.values(), key=lambda alarm: alarm.step)


class History:
    """The steps of a run that the rules read: the first, the newest, and between them those of the best reward."""

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self.count = 0
        self.newest: deque[Step] = deque(maxlen=KEPT)
        self._first: list[Step] = []
        self._best: tuple[float, int, list[Step]] = (-math.inf, 0, [])  # mean reward, place of the first step, steps
        for step in steps:
            self.add(step)

    def add(self, step: Step) -> None:
        self.newest.append(step)
        self.count += 1
        if len(self._first) < WINDOW:
            self._first.append(step)
        if self.count >= KEPT:
            block = list(islice(self.newest, WINDOW))
            reward = sum(one["reward/mean"] for one in block) / WINDOW
            if self._best[0] < reward < math.inf:
                self._best = reward, self.count - KEPT, block

    def steps(self) -> list[Step]:
        """Returns the steps in order, each once."""
        start = self.count - len(self.newest)
        best = [step for place, step in enumerate(self._best[2], self._best[1]) if WINDOW <= place < start]
        return [*self._first[:start], *best, *self.newest]


def weights_do_not_arrive(steps: Sequence[Step]) -> Alarm | None:
    """The mismatch rises within two or three steps: the sampler stays behind, whatever its versions say."""
    found = _jump(steps) or _shift(steps)
    if found is None:
        return None
    status, count, detail = found
    k3, ages = steps[-1]["mismatch/k3"], [step["age"] for step in steps[-WINDOW:]]
    if any(map(math.isnan, ages)):
        advice = "check that the sampler gets the new weights, and what changed at that step"
        return Alarm(status, "k3-jump", detail, advice, k3)
    if max(ages[-count:]) > max(ages[:-count]) + 0.5:
        detail += "; the sampler's weights got older"
        return Alarm("note", "stale", detail, "publish weights more often, or correct", k3)
    detail += ", while the version says that the sampler's weights are as new as before"
    advice = "compare the weights in the sampler with the trainer's: a checksum, or log-probs of a fixed text"
    return Alarm(status, "undelivered", detail, advice, k3)


def _jump(steps: Sequence[Step]) -> tuple[Status, int, str] | None:
    """Two steps in a row far above all before them; their status, number and description."""
    k3 = np.maximum(_values(steps[-WINDOW:], "mismatch/k3"), EXACT)
    before = np.fmax.reduce(k3[:-2])  # of the steps that have it; NaN without any
    if not k3[-2:].min() > JUMP * before:
        return None
    detail = f"k3 {short(k3[-1])} per token at step {steps[-1].number}, at most {short(before)} before the last two"
    return "fail", 2, detail


def _shift(steps: Sequence[Step]) -> tuple[Status, int, str] | None:
    """Three steps whose mean is beyond the spread of such means before; weaker evidence than a jump."""
    logs = np.log(np.maximum([step["mismatch/k3"] for step in steps[-KEPT:]], EXACT))
    before, last = logs[:-SHIFT_STEPS], logs[-SHIFT_STEPS:]
    if len(before) < WINDOW:
        return None
    middle, spread = before.mean(), np.maximum(before.std(ddof=1), LEAST_SPREAD)
    now = np.minimum(last, middle + LARGEST * spread).mean()
    # Means of as many steps, and not steps alone: k3 of neighboring steps is alike.
    means = np.convolve(before, np.full(SHIFT_STEPS, 1 / SHIFT_STEPS), "valid")
    error = np.maximum(means.std(ddof=1), LEAST_SPREAD / math.sqrt(SHIFT_STEPS))
    distance = (now - middle) / (error * math.sqrt(1 + SHIFT_STEPS / len(before)))
    if not distance > SHIFT_ERRORS:
        return None
    detail = (
        f"k3 {short(np.exp(now))} per token over the last {SHIFT_STEPS} steps, {short(np.exp(middle))} over the "
        f"{len(before)} before, {distance:.1f} standard errors less"
    )
    return "note", SHIFT_STEPS, detail


def k3_rises(steps: Sequence[Step]) -> Alarm | None:
    """Slow growth of k3 over many steps, to more than is published for dense models."""
    first, last = (median(part, "mismatch/k3") for part in (steps[:WINDOW], steps[-WINDOW:]))
    if not (last > RISE * max(first, EXACT) and last > 1e-3):
        return None
    detail = f"k3 {short(last)} per token over the last {WINDOW} steps, {short(first)} over the first {WINDOW}"
    return Alarm("note", "k3-rising", detail, DIAGNOSE, last)


def k3_is_large(steps: Sequence[Step]) -> Alarm | None:
    """More than any published working setup has."""
    k3 = median(steps[-RECENT:], "mismatch/k3")
    if not k3 > LARGE_K3:
        return None
    detail = f"k3 {short(k3)} per token: beyond what is published for working setups (1e-5 to 1e-1)"
    return Alarm("fail", "k3-large", detail, DIAGNOSE, k3)


def mean_ratio_is_off(steps: Sequence[Step]) -> Alarm | None:
    """The mean of trainer / sampler is 1 for correct log-probs, whatever the rounding."""
    recent = steps[-RATIO_STEPS:]
    ratios = [step.ratio for step in recent if step.ratio is not None]
    if not ratios or any(step["mismatch/ess_token"] < LOW_ESS for step in recent):
        return None
    ratio = reduce(add, ratios)
    detail = wrong_mean(ratio)
    if not detail:
        return None
    advice = f"compare temperature, top-p and top-k on both sides, and {DIAGNOSE}"
    return Alarm("fail", "mean-ratio", detail, advice, float(ratio.summary()[""]))


def wrong_mean(ratio: MeanRatio) -> str:
    """Says that the mean ratio is too far from 1 for its error; empty where it is not."""
    values = {name: float(value) for name, value in ratio.summary().items()}
    mean, error = values[""], values["/error"]
    if not abs(mean - 1) > max(RATIO_ERRORS * error, RATIO_DISTANCE):
        return ""
    return f"the mean of trainer / sampler is {mean:.4f} +- {error:.4f} and must be 1 for correct log-probs"


def effective_sample_size_is_low(steps: Sequence[Step]) -> Alarm | None:
    """Importance weights would use less than half of the batch."""
    ess = median(steps[-RECENT:], "mismatch/ess_token")
    if not ess < LOW_ESS:
        return None
    detail = f"effective sample size {ess:.2f} of the tokens: under importance weights most of the batch is lost"
    return Alarm("note", "ess", detail, "refresh the sampler more often, or lower the mismatch", ess)


def gradient_norm_falls(steps: Sequence[Step]) -> Alarm | None:
    """The gradient norm fell within the last steps, and the reward did not rise; Miles saw it before a collapse.

    A gradient also gets smaller where prompts are learned, because groups of equal rewards have none: the reward then
    rises. Rewards that are missing or not finite do not decide; a norm that is not finite is not a fall.
    """
    before, after = (_values(part, "grad_norm") for part in (steps[-KEPT:-WINDOW], steps[-WINDOW:]))
    if not np.median(after) < NORM_FALL * np.median(before):
        return None
    if clearly_above(*(_values(part, "reward/mean") for part in (steps[-WINDOW:], steps[-KEPT:-WINDOW]))):
        return None
    norm = float(np.median(after))
    detail = f"the gradient norm fell from {np.median(before):.2g} to {norm:.2g}, medians of {WINDOW} steps each"
    return Alarm("note", "gradient-norm", detail, "look at reward and entropy: this came before collapses", norm)


def gradient_norm_explodes(steps: Sequence[Step]) -> Alarm | None:
    """The gradient norm of the last steps is ten times that of the first, and no reward rose.

    A norm that is missing decides nothing; where a reward is, the alarm says so.
    """
    parts = steps[:-WINDOW][:WINDOW], steps[-WINDOW:]
    before, after = (_values(part, "grad_norm") for part in parts)
    if not 0 < NORM_RISE * np.median(before) <= np.median(after):
        return None
    earlier, later = (_values(part, "reward/mean") for part in parts)
    known = bool(np.isfinite([*earlier, *later]).all())
    if known and clearly_above(later, earlier):
        return None
    norm = float(np.median(after))
    detail = (
        f"the gradient norm rose from {np.median(before):.2g} to {norm:.2g}, medians of the first "
        f"{len(before)} and the last {WINDOW} steps{'' if known else '; whether the reward rose is not known'}"
    )
    advice = "look at reward and entropy, lower the learning rate, or go back to a checkpoint before the rise"
    return Alarm("note", "gradient-explosion", detail, advice, norm)


def gradient_is_zero(steps: Sequence[Step]) -> Alarm | None:
    """The gradient norm of the last steps is exactly 0."""
    if _values(steps[-WINDOW:], "grad_norm").any():  # NaN counts as True
        return None
    detail = f"the gradient norm is 0 in the last {WINDOW} steps: nothing is learned"
    advice = (
        "check that the loss depends on trained weights (ratio not detached, mask, adapter) and that advantages differ"
    )
    return Alarm("note", "gradient-zero", detail, advice, 0.0)


def reward_collapses(steps: Sequence[Step]) -> Alarm | None:
    """The reward of the last steps is below half of its best, by three standard errors."""
    rewards = _values(steps, "reward/mean")
    rewards[~np.isfinite(rewards)] = math.nan
    windows = sliding_window_view(rewards, WINDOW)
    means = windows[:-WINDOW].mean(-1)
    if np.isnan(means).all():
        return None
    best, last = windows[np.nanargmax(means)], windows[-1]
    if not (best.mean() > 0 and last.mean() < COLLAPSED_SHARE * best.mean() and clearly_above(best, last)):
        return None
    now = float(last.mean())
    detail = f"the reward fell from {best.mean():.3g} to {now:.3g}, means of the best {WINDOW} steps and the last"
    advice = "go back to a checkpoint before the fall, and look at its samples"
    return Alarm("fail", "reward-collapse", detail, advice, now)


def responses_are_truncated(steps: Sequence[Step]) -> Alarm | None:
    """More responses than in the first steps reach the limit of their length."""
    first, last = (median(part, "response/truncated") for part in (steps[: 2 * RECENT], steps[-RECENT:]))
    if not (last > TRUNCATED and last - first > TRUNCATED_RISE):
        return None
    detail = f"{last:.0%} of the responses are cut at the limit, {first:.0%} in the first steps"
    advice = "raise the limit, or look at what long responses are rewarded for"
    return Alarm("note", "truncation", detail, advice, last)


def responses_grow(steps: Sequence[Step]) -> Alarm | None:
    """Responses are much longer than in the first steps."""
    first, last = (median(part, "response/length") for part in (steps[: 2 * RECENT], steps[-RECENT:]))
    if not last > LENGTH_RISE * first:
        return None
    detail = f"responses have {last:.0f} tokens, {first:.0f} in the first steps"
    return Alarm("note", "length", detail, "look at samples: longer answers, or repetition?", last)


def log_probs_are_missing(steps: Sequence[Step]) -> Alarm | None:
    """Trained tokens without a finite log-prob on one side."""
    missing, finite = steps[-1]["nonfinite"], steps[-1]["mismatch/tokens"]
    share = missing / max(missing + finite, 1)
    if not share > MISSING:
        return None
    advice = "leave these tokens out of the loss, and find out on which side they are missing"
    return Alarm("note", "non-finite", f"{share:.1%} of the trained tokens have no finite log-prob", advice, share)


def clearly_above(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether the mean of one series is above that of the other by more than three standard errors."""
    standard_error = math.hypot(*(float(values.std(ddof=1)) / math.sqrt(len(values)) for values in (one, other)))
    return float(one.mean() - other.mean()) > STANDARD_ERRORS * standard_error


def _values(steps: Sequence[Step], name: str) -> np.ndarray:
    """Returns a metric, (steps,) float64; NaN where a step does not have it."""
    return np.array([step[name] for step in steps], np.float64)


def median(steps: Sequence[Step], name: str) -> float:
    """Returns the median of a metric; NaN where a step does not have it."""
    values = sorted(step[name] for step in steps)
    return math.nan if any(map(math.isnan, values)) else (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2


RULES = (
    AlarmRule(weights_do_not_arrive, "mismatch/k3", 3),
    AlarmRule(k3_rises, "mismatch/k3", KEPT),
    AlarmRule(k3_is_large, "mismatch/k3", RECENT),
    AlarmRule(mean_ratio_is_off, "mean_ratio", 1),
    AlarmRule(effective_sample_size_is_low, "mismatch/ess_token", RECENT),
    AlarmRule(gradient_norm_falls, "grad_norm", KEPT),
    AlarmRule(gradient_norm_explodes, "grad_norm", WINDOW + LEAST_BEFORE),
    AlarmRule(gradient_is_zero, "grad_norm", WINDOW + LEAST_BEFORE),
    AlarmRule(reward_collapses, "reward/mean", KEPT),
    AlarmRule(responses_are_truncated, "response/truncated", 2 * RECENT),
    AlarmRule(responses_grow, "response/length", 2 * RECENT),
    AlarmRule(log_probs_are_missing, "nonfinite", 1),
)
