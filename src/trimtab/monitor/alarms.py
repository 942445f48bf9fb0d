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
"""Number of steps in a window, whose median or mean is compared with that of earlier steps."""
KEPT = 2 * WINDOW
"""Number of newest steps that the rules read, besides the first `WINDOW` steps and the window of the best reward."""
LEAST_BEFORE = 3
"""Least number of steps for the median of the first steps."""
COLLAPSED_SHARE = 0.5
"""The reward collapses if it falls below this share of the best reward."""
RECENT = 5
"""Number of last steps whose median counts as the present state."""
EXACT = 1e-7
"""Up to this k3, trainer and sampler differ only by rounding in float32."""
SHIFT_STEPS = 3
"""Number of last steps whose mean log k3 is compared with earlier means (`_shift`)."""
LEAST_SPREAD = 0.25
"""The standard deviation of log k3 between steps counts as at least this, even if rounding hardly varies."""
LOW_ESS = 0.5
"""Effective sample size (share of tokens) below which weights lose most of a batch, and errors of means say nothing."""
DIAGNOSE = "run `trimtab diagnose` on the sample"
"""What most alarms advise; code that shows an alarm replaces it by its own command."""

# Comparisons are written `not x > limit`, so that NaN (a missing metric) raises no alarm.


@dataclass(frozen=True)
class Step:
    """A finished step."""

    number: int
    metrics: Mapping[str, float]  # by name, such as `mismatch/k3`; a rule whose metrics are missing raises no alarm
    ratio: MeanRatio | None  # the sums of the mean ratio; None if only metrics are known

    def __getitem__(self, name: str) -> float:
        """Returns a metric; NaN if the step does not have it."""
        return self.metrics.get(name, math.nan)


@dataclass(frozen=True)
class Alarm(Finding):
    """A finding at a step. value: the number that was judged."""

    value: float = math.nan
    step: int = -1


class AlarmRule(NamedTuple):
    """A row of the table of rules."""

    judge: Callable[[Sequence[Step]], Alarm | None]  # returns the alarm at the last of the steps, if any
    metric: str  # the metric that it judges
    steps: int  # the least number of steps that it needs


def alarms(steps: Sequence[Step]) -> list[Alarm]:
    """Returns the alarms that the last of the steps raises. steps: in order."""
    asked = (rule.judge(steps) for rule in RULES if len(steps) >= rule.steps)
    return [replace(alarm, step=steps[-1].number) for alarm in asked if alarm is not None]


def first_alarms(steps: Sequence[Step]) -> list[Alarm]:
    """Returns each alarm of a whole run at the first step that raises it, in the order of these steps.

    `alarms` after every step, as `Monitor` calls it, gives the same. Takes about 0.15 ms per step.
    """
    history, raised = History(), dict[str, Alarm]()
    for step in steps:
        history.add(step)
        for alarm in alarms(history.steps()):
            raised.setdefault(alarm.name, alarm)
    return list(raised.values())


def lasting_alarms(steps: Sequence[Step]) -> list[Alarm]:
    """Returns the alarms that are still raised when the last steps are compared with those before the alarm."""
    lasting = {alarm.name: alarm for alarm in (alarms(steps) if steps else ())}
    places = {step.number: place for place, step in enumerate(steps)}
    for alarm in first_alarms(steps):
        before = steps[: max(places[alarm.step] + 1 - WINDOW, 0)]
        if alarm.name in {one.name for one in alarms([*before, *steps[-WINDOW:]])}:
            lasting[alarm.name] = alarm
    return sorted(lasting.values(), key=lambda alarm: alarm.step)


class History:
    """The steps of a run that the rules read: the first, the newest, and between them the window of the best reward."""

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
    """Alarm if k3 rises within two or three steps: new weights do not reach the sampler, whatever its versions say."""
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
    """Returns status, number of steps and description if the last two steps are far above all steps before them.

    They must exceed 4 times the window's largest k3 before (`benchmarks/monitor.py`).
    """
    k3 = np.maximum(_values(steps[-WINDOW:], "mismatch/k3"), EXACT)
    before = np.fmax.reduce(k3[:-2])  # without missing values; NaN if all are missing
    if not k3[-2:].min() > 4 * before:
        return None
    detail = f"k3 {short(k3[-1])} per token at step {steps[-1].number}, at most {short(before)} before the last two"
    return "fail", 2, detail


def _shift(steps: Sequence[Step]) -> tuple[Status, int, str] | None:
    """Returns the same as `_jump` if the mean of the last three steps is beyond earlier means: weaker evidence.

    `_jump` misses the first lost weights of a 4-bit sampler. The limit is 4.6 standard errors; 40 runs without a fault
    reached 4.1 (`benchmarks/monitor.py`).
    """
    logs = np.log(np.maximum([step["mismatch/k3"] for step in steps[-KEPT:]], EXACT))
    before, last = logs[:-SHIFT_STEPS], logs[-SHIFT_STEPS:]
    if len(before) < WINDOW:
        return None
    middle, spread = before.mean(), np.maximum(before.std(ddof=1), LEAST_SPREAD)
    now = np.minimum(last, middle + 4 * spread).mean()  # clipped, so that one step alone is not enough
    # The spread of means over as many steps, not of single steps: k3 of neighboring steps is correlated.
    means = np.convolve(before, np.full(SHIFT_STEPS, 1 / SHIFT_STEPS), "valid")
    error = np.maximum(means.std(ddof=1), LEAST_SPREAD / math.sqrt(SHIFT_STEPS))
    distance = (now - middle) / (error * math.sqrt(1 + SHIFT_STEPS / len(before)))
    if not distance > 4.6:
        return None
    detail = (
        f"k3 {short(np.exp(now))} per token over the last {SHIFT_STEPS} steps, {short(np.exp(middle))} over the "
        f"{len(before)} before, {distance:.1f} standard errors less"
    )
    return "note", SHIFT_STEPS, detail


def k3_rises(steps: Sequence[Step]) -> Alarm | None:
    """Alarm if k3 grows slowly to 5 times that of the first steps, and to more than is published for dense models."""
    first, last = (median(part, "mismatch/k3") for part in (steps[:WINDOW], steps[-WINDOW:]))
    if not (last > 5 * max(first, EXACT) and last > 1e-3):
        return None
    detail = f"k3 {short(last)} per token over the last {WINDOW} steps, {short(first)} over the first {WINDOW}"
    return Alarm("note", "k3-rising", detail, DIAGNOSE, last)


def k3_is_large(steps: Sequence[Step]) -> Alarm | None:
    """Alarm if k3 is larger than in any published working setup (1e-5 to 1e-1)."""
    k3 = median(steps[-RECENT:], "mismatch/k3")
    if not k3 > 0.1:
        return None
    detail = f"k3 {short(k3)} per token: beyond what is published for working setups (1e-5 to 1e-1)"
    return Alarm("fail", "k3-large", detail, DIAGNOSE, k3)


def mean_ratio_is_off(steps: Sequence[Step]) -> Alarm | None:
    """Alarm if the mean of trainer / sampler in ten steps is not 1, as for correct log-probs with any rounding."""
    recent = steps[-10:]
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
    """Returns a sentence if the mean ratio is 0.005 and six standard errors away from 1, else an empty string."""
    values = {name: float(value) for name, value in ratio.summary().items()}
    mean, error = values[""], values["/error"]
    if not abs(mean - 1) > max(6 * error, 0.005):
        return ""
    return f"the mean of trainer / sampler is {mean:.4f} +- {error:.4f} and must be 1 for correct log-probs"


def effective_sample_size_is_low(steps: Sequence[Step]) -> Alarm | None:
    """Alarm if importance weights would use less than half of the batch."""
    ess = median(steps[-RECENT:], "mismatch/ess_token")
    if not ess < LOW_ESS:
        return None
    detail = f"effective sample size {ess:.2f} of the tokens: under importance weights most of the batch is lost"
    return Alarm("note", "ess", detail, "refresh the sampler more often, or lower the mismatch", ess)


def gradient_norm_falls(steps: Sequence[Step]) -> Alarm | None:
    """Alarm if the gradient norm fell below 35% of that before, and the reward did not rise.

    In Miles' report it fell from about 0.07 to 0.02 before a collapse.
    The gradient also gets smaller if prompts are learned, because groups of equal rewards have none; the reward then
    rises. Rewards that are missing or not finite do not prevent the alarm; a norm that is not finite is not a fall.
    """
    earlier, last = steps[-KEPT:-WINDOW], steps[-WINDOW:]
    before, after = median(earlier, "grad_norm"), median(last, "grad_norm")
    if not after < 0.35 * before or clearly_above(_values(last, "reward/mean"), _values(earlier, "reward/mean")):
        return None
    detail = f"the gradient norm fell from {before:.2g} to {after:.2g}, medians of {WINDOW} steps each"
    return Alarm("note", "gradient-norm", detail, "look at reward and entropy: this came before collapses", after)


def gradient_norm_explodes(steps: Sequence[Step]) -> Alarm | None:
    """Alarm if the gradient norm of the last steps is ten times that of the first steps, and the reward did not rise.

    If the norm is missing, there is no alarm; if a reward is missing, the alarm says so.
    """
    parts = steps[:-WINDOW][:WINDOW], steps[-WINDOW:]
    before, after = (median(part, "grad_norm") for part in parts)
    if not 0 < 10 * before <= after:
        return None
    earlier, last = (_values(part, "reward/mean") for part in parts)
    known = bool(np.isfinite([*earlier, *last]).all())
    if known and clearly_above(last, earlier):
        return None
    detail = (
        f"the gradient norm rose from {before:.2g} to {after:.2g}, medians of the first {len(parts[0])} and the last "
        f"{WINDOW} steps{'' if known else '; whether the reward rose is not known'}"
    )
    advice = "look at reward and entropy, lower the learning rate, or go back to a checkpoint before the rise"
    return Alarm("note", "gradient-explosion", detail, advice, after)


def gradient_is_zero(steps: Sequence[Step]) -> Alarm | None:
    """Alarm if the gradient norm of the last steps is exactly 0."""
    if _values(steps[-WINDOW:], "grad_norm").any():  # NaN counts as True
        return None
    detail = f"the gradient norm is 0 in the last {WINDOW} steps: nothing is learned"
    advice = (
        "check that the loss depends on trained weights (ratio not detached, mask, adapter) and that advantages differ"
    )
    return Alarm("note", "gradient-zero", detail, advice, 0.0)


def reward_collapses(steps: Sequence[Step]) -> Alarm | None:
    """Alarm if the last reward is below half of the best reward, and lower by more than three standard errors."""
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
    """Alarm if over 20% of the responses reach the length limit, 15 points more than in the first steps."""
    first, last = (median(part, "response/truncated") for part in (steps[: 2 * RECENT], steps[-RECENT:]))
    if not (last > 0.2 and last - first > 0.15):
        return None
    detail = f"{last:.0%} of the responses are cut at the limit, {first:.0%} in the first steps"
    advice = "raise the limit, or look at what long responses are rewarded for"
    return Alarm("note", "truncation", detail, advice, last)


def responses_grow(steps: Sequence[Step]) -> Alarm | None:
    """Alarm if responses are more than twice as long as in the first steps."""
    first, last = (median(part, "response/length") for part in (steps[: 2 * RECENT], steps[-RECENT:]))
    if not last > 2 * first:
        return None
    detail = f"responses have {last:.0f} tokens, {first:.0f} in the first steps"
    return Alarm("note", "length", detail, "look at samples: longer answers, or repetition?", last)


def log_probs_are_missing(steps: Sequence[Step]) -> Alarm | None:
    """Alarm if more than one trained token in 1,000 has no finite log-prob on one side."""
    missing, finite = steps[-1]["nonfinite"], steps[-1]["mismatch/tokens"]
    share = missing / max(missing + finite, 1)
    if not share > 0.001:
        return None
    advice = "leave these tokens out of the loss, and find out on which side they are missing"
    return Alarm("note", "non-finite", f"{share:.1%} of the trained tokens have no finite log-prob", advice, share)


def clearly_above(one: np.ndarray, other: np.ndarray) -> bool:
    """Returns whether the mean of one series is above that of the other by more than three standard errors."""
    standard_error = math.hypot(*(float(values.std(ddof=1)) / math.sqrt(len(values)) for values in (one, other)))
    return float(one.mean() - other.mean()) > 3 * standard_error


def _values(steps: Sequence[Step], name: str) -> np.ndarray:
    """Returns a metric, (steps,) float64; NaN if a step does not have it."""
    return np.array([step[name] for step in steps], np.float64)


def median(steps: Sequence[Step], name: str) -> float:
    """Returns the median of a metric; NaN if any step does not have it."""
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
