"""What differs between a loss and an objective, in words: the cause first, each in one sentence with what to change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from trimtab.check_loss.bounds import differing_bounds
from trimtab.check_loss.probes import DRIFT, DRIFT_ALL, MISMATCH, PROBES, UP, Batch, Update, of_rows
from trimtab.check_loss.readings import FAR, ONES, RANDOM, SHIFTS, SIGNS, SPREADS, TO_REFERENCE, UNKNOWN, Readings

KINDS = (
    *("rounding", "no-gradient", "dropped", "alignment", "sign", "normalized-advantage", "live-weight"),
    *("batch-statistics", "log-ratio", "policy", "level", "kink", "min-max", "clip-side", "dual-clip", "inverse"),
    *("clip", "weight", "shape", "kl", "zero-advantage", "kl-padding", "padding", "denominator", "default", "scale"),
    *("micro-batches", "input", "unexplained", "exponent", "nan", "value"),
)
"""Kinds of differences, most harmful first, as far as one does not hide another."""
NOTES = ("exponent",)
"""Kinds that a right loss may have."""
NAMES = {"current": "π", "proximal": "π_old", "behavior": "μ"}
NOT_COUNTED = "tokens that the mask rejects are not counted, count them"
LEVELS = {
    "token": "ratio of the token",
    "sequence": "product over the response",
    "geometric": "geometric mean over the response",
    "prefix": "product over the tokens up to it",
    "prefix_geometric": "geometric mean over the tokens up to it",
}


@dataclass(frozen=True)
class Difference:
    """kind: one of `KINDS`. text: a sentence with figures and what to change."""

    kind: str
    text: str


@dataclass
class Comparison:
    """What differs in `mine` from the objective `theirs`, and the name of that."""

    mine: Readings
    theirs: Readings
    name: str
    found: list[Difference] = field(default_factory=list)

    def differences(self) -> list[Difference]:
        """Returns what differs; nothing if no probe and no random batch does."""
        if self.mine.rounded and not self.theirs.rounded:
            return [Difference("rounding", "values are rounded to about 3 digits: compute in float32")]
        self._neutral()
        if not self._has("normalized-advantage"):
            self._uncounted()
        unread = self._has("no-gradient", "dropped", "alignment", "log-ratio")
        hidden = unread or self._has("live-weight")
        if not hidden:
            if not self._has("normalized-advantage") and not self._neighbors():
                self._ratio()
                if not self._has("log-ratio", "policy", "level", "kink", "shape"):
                    self.found += [Difference(*one) for one in differing_bounds(self.mine, self.theirs, self.name)]
                if not self.found:
                    self._shape()
            self._zero_advantage()
        self._padding()
        if not unread:
            self._denominator()
            self._defaults()
        for rest in (self._inputs, self._random, self._of_tokens):
            if all(one.kind == "micro-batches" for one in self.found):
                rest()
        if not hidden:
            self._exponent()
        for name, change in list(self.mine.padding["nan"].items())[:1]:
            what = "loss and gradient" if math.isnan(change) else "the gradient"
            remedy = "select with torch.where(mask, ..., 0.0), before exp and before the sum"
            self._add("nan", f"NaN in `{name}` at padding makes {what} NaN: {remedy}")
        return sorted(self.found, key=lambda one: one.kind == "value")

    def _add(self, kind: str, text: str) -> None:
        self.found.append(Difference(kind, text))

    def _has(self, *kinds: str) -> bool:
        return any(one.kind in kinds for one in self.found)

    def _neutral(self) -> None:
        """What shows where all policies are equal."""
        (batch, own), (_, other) = self.mine.neutral["plain"], self.theirs.neutral["plain"]
        mask = batch["mask"]
        gradient, flat = (own / other)[mask], (self.mine.flat / self.theirs.flat)[mask]
        same_value = _gap(self.mine.by_advantage / self.theirs.by_advantage, torch.ones(())) < 1e-9
        if not same_value and _gap(gradient, flat) > 1e-6:
            where = "where all policies are equal, but log-probs of tokens are not, the gradient is"
            shifted = "those of a policy are of other tokens, one too early or too late?"
            self._add("alignment", f"{where} {_range(gradient / flat)} times as large: {shifted}")
            return
        if self._dropped(own, other, batch):
            return
        linear = 3 * self.mine.homogeneity, 3 * self.theirs.homogeneity
        if not abs(linear[0] - linear[1]) < 1e-6:
            times = f"advantages 3 times as large give {linear[0]:.3g} times the gradient, not {linear[1]:.3g}"
            self._add("normalized-advantage", f"{times}: do not normalize advantages inside the loss")
        if same_value and float((gradient - 1).abs().max()) > 1e-6:
            where = "where all policies are equal the loss is right and its gradient"
            self._add("live-weight", f"{where} {_range(gradient)} times as large: detach the weight")
        elif not same_value and bool((gradient < 0).all()):
            self._add("sign", "the loss rises with the advantage: change its sign")
        elif not same_value and torch.equal(gradient < 0, (batch["advantage"] < 0).expand_as(mask)[mask]):
            self._add("sign", "for A < 0 the gradient has the sign of A > 0: keep the sign of the advantage")

    def _dropped(self, own: Tensor, other: Tensor, batch: Batch) -> bool:
        """Which tokens get no gradient where all policies are equal, though the objective gives them one."""
        trained = other.abs() > 1e-12
        gone = trained & ~(own.abs() > 1e-12)
        if not bool(gone.any()):
            return False
        place, advantage = torch.arange(own.shape[1]).expand_as(own), batch["advantage"]
        apart = {**batch, **{name: batch[name] - low for low, name in enumerate(NAMES, 2)}}
        sets = {
            "tokens with A < 0 get": trained & (advantage < 0),
            "tokens with A > 0 get": trained & (advantage > 0),
            "the last trained token of a response gets": trained & (place == trained.sum(1, keepdim=True) - 1),
            "the first trained token of a response gets": trained & (place == 0),
        }
        who = next((words for words, tokens in sets.items() if torch.equal(gone, tokens)), "some tokens get")
        if bool(own.isnan().any()):
            self._add("no-gradient", "where all policies are equal the gradient is NaN")
        elif bool((self.mine.loss.policy_gradient(apart).abs() > 1e-12)[gone].any()):
            where = f"{who} no gradient where all policies are equal, but do where they differ"
            self._add("log-ratio", f"{where}: is exp of the log-ratio missing?")
        elif torch.equal(gone, trained):
            self._add("no-gradient", "where all policies are equal the loss has no gradient: is it detached?")
        else:
            self._add("dropped", f"{who} no gradient: keep all in the loss")
        return True

    def _neighbors(self) -> bool:
        """Whether a response changes the gradient of others, and why."""
        parts = self.mine.split
        if any(float(part.max() - part.min()) > 1e-6 for part in parts):
            times = f"in a micro-batch the gradients of tokens are {_range(torch.cat(parts))} times those in the whole"
            self._add("batch-statistics", f"{times}: what a token counts depends on the others of its micro-batch")
            return True
        for (x, positive, probe), own in self.mine.neighbors.items():
            other = self.theirs.neighbors[x, positive, probe]
            where = f"where {self.theirs.label(probe).partition(' ')[0]} is {math.exp(x):.3g}"
            if _counts_kept(own, other, torch.ones_like(own, dtype=torch.bool)):
                text = f"{where} in one place, the other tokens have {float(own.max()):.4g} times the gradient"
                self._add("denominator", f"{text}: {NOT_COUNTED}")
                return True
            others = own[[0, 2]]
            if not _gap(others, other[[0, 2]]) <= 1e-6:
                text = f"the gradient of a response is {_range(others)} times as large {where} in another one"
                remedy = "another response's drift must not change it, is a sum or mean over the wrong axis?"
                if bool(own.all()) and abs(float(own.mean()) - 1) < 1e-6:
                    remedy = "the weights are divided by their mean over the batch"
                self._add("batch-statistics", f"{text}, in {self.name} {_range(other[[0, 2]])}: {remedy}")
                return True
        return False

    def _defaults(self) -> None:
        """Whether the default of a count is that of the batch."""
        shifts, loss, said = torch.tensor([3.0, -3.0]).double(), self.mine.loss, ""
        for batch in (*(probe.batch(shifts, advantage) for probe in ONES for advantage in SIGNS.values()), *RANDOM):
            own, other = loss.read(batch, Update(batch, counted=False)).gradient, loss.read(batch).gradient
            if _gap(own.nan_to_num(), other.nan_to_num()) > 1e-9 * float(other.nan_to_num().abs().max()):
                times = _range(own / other)
                text = f"called without the counts of the update, one batch has {times} times the gradient with them: "
                said = said or f"{text}the default must be the count of the batch"
                if _counts_kept(own, other, batch["mask"]):
                    said = f"{text}{NOT_COUNTED}"
                    break
        if said:
            self._add("default", said)

    def _ratio(self) -> None:
        """Which policies are compared, at which level, by the local exponents."""
        mine, theirs = self.mine, self.theirs
        for probe, positive in product((DRIFT, MISMATCH), SIGNS):
            slopes = [one.exponent(positive, probe.policy) for one in (mine, theirs)]
            straight = abs(mine.curvature(probe, positive)) < 1e-3 < 0.01 < theirs.curvature(probe, positive)
            if straight and abs(slopes[0] - slopes[1]) < 2e-3:
                text = "the weight grows with log r, not with r: exp of the log-ratio is missing"
                self._add("log-ratio", f"{theirs.label(probe)}: {text}")
                return
        differing = [key for key, value in theirs.exponents.items() if not abs(mine.exponents[key] - value) < 2e-3]
        if not differing:
            return
        positive, policy, place, _ = differing[0]
        changes = f"{NAMES[policy]} of a token changes the weight of a token {place} it"
        own, other = ({name: one.exponent(positive, name) for name in NAMES} for one in (mine, theirs))
        used, expected = ({name for name, power in one.items() if abs(power) > 1e-3} for one in (own, other))
        proportional = used == expected and len({round(own[name] / other[name], 3) for name in expected}) <= 1
        levels, weighted = ([one.level(positive, who) for one in (mine, theirs)] for who in ("current", "behavior"))
        kinked = [name for name in NAMES if mine.kink(positive, name) > 1e-2 > theirs.kink(positive, name)]
        doubled = {name: other[name] * (1 + (proportional or name == "behavior")) for name in expected}
        if math.isnan(mine.exponents[differing[0]]):
            text = f"{changes}: where all policies are equal that weight is 0 or NaN, and no exponent can be read"
            self._add("level", text)
        elif not used and expected and any(any(mine.bends(probe).values()) for probe in (DRIFT, DRIFT_ALL)):
            where = "the weight of a token does not grow with r, though r is bounded"
            self._add("log-ratio", f"{where}: is exp of the log-ratio missing?")
        elif kinked:
            below, above = (abs(mine.exponents[positive, kinked[0], "own", side]) for side in (-1, 1))
            powers = f"its exponent is {below:.3g} below and {above:.3g} above"
            self._add("kink", f"the weight of a token bends at a ratio of 1, {powers}; {self.name} has no bound at 1")
        elif levels[0] != levels[1] and proportional:
            is_not = f"the ratio is the {LEVELS[levels[0]]}, not the {LEVELS[levels[1]]}"
            self._add("level", f"{is_not}: change how log-ratios are summed")
        elif used == expected and levels[0] == levels[1] and weighted[0] != weighted[1]:
            is_not = f"the weight is of the {LEVELS[weighted[0]]}, not of the {LEVELS[weighted[1]]}"
            self._add("level", f"{is_not}: change how log-ratios are summed")
        elif all(abs(own[name] - other[name]) < 2e-3 for name in NAMES):
            powers = f"with the exponent {mine.exponents[differing[0]]:.3g}, not {theirs.exponents[differing[0]]:.3g}"
            self._add("level", f"{changes} {powers}: the ratio or the weight is taken over other tokens")
        else:
            text = f"near 1 the weight of a token grows with {_powers(own)}, in {self.name} with {_powers(other)}"
            remedy = "weigh a token as that does" if proportional else "use the ratio to that policy"
            if used and all(abs(own[name] - power) < 2e-3 for name, power in doubled.items()):
                remedy = "the weight is applied twice"
            self._add("shape" if proportional else "policy", f"{text}: {remedy}")

    def _shape(self) -> None:
        """The largest difference of the weights of a probe at `SHIFTS`."""
        for probe, positive in product(PROBES, SIGNS):
            shifts = SHIFTS.clamp(max=probe.highest)
            if found := self._apart(
                positive, shifts, *(one.curves[probe, positive] for one in (self.mine, self.theirs))
            ):
                self._add("shape", f"{self.theirs.label(probe)}: {found[1]}")
                return

    def _exponent(self) -> None:
        """Up to which log-ratio the gradients are equal."""
        others = ("dual-clip", "min-max", "clip-side", "clip", "policy", "level", "kink", "shape", "log-ratio")
        if self._has(*others, "normalized-advantage", "batch-statistics"):
            return
        for positive, advantage in SIGNS.items():
            weights = (one.weights(DRIFT, FAR, advantage) for one in (self.mine, self.theirs))
            if found := self._apart(positive, FAR, *weights):
                reach = f"gradients are equal for |log-ratio| <= {math.floor(found[0])}"
                self._add("exponent", f"{reach}, {found[1]}: {self.name} clamps log-ratios to ±20 before exp")
                return

    def _apart(self, positive: bool, shifts: Tensor, own: Tensor, other: Tensor) -> tuple[float, str] | None:
        """Returns the smallest shift at which weights differ, and the largest difference in words; None without one."""
        gap = ((own - other).abs() / (1 + other.abs())).nan_to_num(math.inf)
        if float(gap.max()) <= 1e-6:
            return None
        worst = int(gap.argmax())
        where = f"for A {'>' if positive else '<'} 0 and a log-ratio of {float(shifts[worst]):.4g}"
        values = f"{float(own[worst]):.4g}, in {self.name} {float(other[worst]) + 0:.4g}"
        return float(shifts.abs()[gap > 1e-6].min()), f"{where} the weight is {values}"

    def _zero_advantage(self) -> None:
        """KL, entropy and regression: what is left where advantages are 0."""
        mine, theirs = self.mine, self.theirs
        read = slice(len(TO_REFERENCE) if theirs.kl_form[0] == "none" else None)  # of no KL nothing is weighted
        if _gap(mine.kl_curve[read], theirs.kl_curve[read]) > 1e-7:
            self._add("kl", f"the KL term is {_kl_words(mine)}, in {self.name} {_kl_words(theirs)}: change it")
        gap = (mine.pull - theirs.pull).abs()
        if not float(gap.max()) <= 1e-7 and not self.found:
            worst = int(gap.argmax())
            who, nats = "policy" if worst < 4 else "sampler", (-1, -0.5, 0.5, 1)[worst % 4]
            values = f"{float(mine.pull[worst]):.4g}, in {self.name} {float(theirs.pull[worst]):.4g}"
            kind = "policy" if float(gap[:4].max()) <= 1e-7 else "zero-advantage"
            self._add(kind, f"at A = 0 a response whose {who} moved by {nats:g} nats a token has the gradient {values}")

    def _padding(self) -> None:
        counted = self.mine.padding["number"]
        for name in sorted(counted, key=lambda name: name != "reference")[:1]:
            kind, what = ("kl-padding", "the KL term") if name == "reference" else ("padding", "the loss")
            change = f"another `{name}` there changes the loss by {counted[name]:.3g}"
            self._add(kind, f"{what} counts padding, {change}: select by the mask before summing")

    def _denominator(self) -> None:
        (own, factor), (other, expected) = self.mine.aggregation, self.theirs.aggregation
        if self._has("normalized-advantage", "live-weight"):
            pass
        elif own != other and not self._has("denominator"):
            self._add("denominator", f"the denominator is {own}, in {self.name} {other}: change the aggregation")
        elif own != UNKNOWN and abs(factor / expected - 1) > 1e-6 and not self._has("sign"):
            times = f"the gradient is {factor / expected:.4g} times as large at every token"
            self._add("scale", f"{times}: change the factor of the loss")
        mine, theirs = (torch.cat(one.split) for one in (self.mine, self.theirs))
        if not _gap(mine, theirs) <= 1e-6 and not self._has("batch-statistics"):
            times = f"two micro-batches together give {_range(mine)} times the gradient of the whole"
            remedy = "divide by the count of the whole update (parameters `tokens` and `responses` get it)"
            self._add("micro-batches", f"{times}: {remedy}")

    def _inputs(self) -> None:
        for name, expected in self.theirs.inputs.items():
            if _gap(self.mine.inputs[name], expected) > 1e-7:
                effect = "another effect" if bool(self.mine.inputs[name].count_nonzero()) else "no effect"
                self._add("input", f"`{name}` has {effect}, and {self.name} reads it")
                return

    def _random(self) -> None:
        for spread, own, other in zip(SPREADS, self.mine.random, self.theirs.random, strict=True):
            batch = f"on a random batch with policies {spread:g} nats apart"
            gap = _gap(own.gradient, other.gradient) / max(float(other.gradient.abs().max()), 1e-12)
            if not gap <= 1e-6:
                text = f"{batch} the gradient of a token differs by {gap:.2g} of the largest, which no probe explains"
                self._add("unexplained", text)
                return
            if not abs(own.loss - other.loss) <= 1e-6 * max(1.0, abs(other.loss)) and not self._has("value"):
                values = f"{own.loss:.6g}, in {self.name} {other.loss:.6g}"
                self._add("value", f"gradients are equal, the value is not: {values} {batch}")

    def _uncounted(self) -> None:
        """Whether responses with A = 0 are left out of the denominator: one of three, and none of three."""
        times = []
        for middle in (UP, 0.0):
            batch = {**of_rows(3, UP), "advantage": torch.tensor([[UP], [middle], [UP]]).double()}
            own, other = (one.loss.read(batch).gradient[::2, :-2] for one in (self.mine, self.theirs))
            times.append(own / other)
        if _gap(times[1] / times[0], torch.tensor(1.5)) <= 1e-6:
            text = "responses with A = 0 are not counted: count them, and their tokens"
            self.found.insert(0, Difference("denominator", text))

    def _of_tokens(self) -> None:
        """Whether advantages that differ within a response are taken as the objective takes them."""
        for packed in (False, True):
            for (mask, own), (_, other) in zip(
                *(one.of_tokens(packed) for one in (self.mine, self.theirs)), strict=False
            ):
                counts = _counts_kept(own, other, mask)
                if (counts or not packed) and not _gap(own, other) <= 1e-6 * float(other.abs().max()):
                    times = f"the gradient is {_range(own / other)} times as large"
                    remedy = NOT_COUNTED if counts else "use the advantage of each token"
                    self._add("denominator", f"where advantages differ within a response {times}: {remedy}")
                    return


def _counts_kept(own: Tensor, other: Tensor, mask: Tensor) -> bool:
    """Whether gradients are larger by as much as there are fewer tokens with one, in all or in the same response."""
    kept, times = (other != 0) & mask, own / other
    if not torch.equal(own[mask] != 0, kept[mask]) or not _gap(times[kept], torch.ones(())) > 1e-6:
        return False
    shares = kept.sum() / mask.sum(), kept.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return any(_gap((times * share)[kept], torch.ones(())) < 1e-6 for share in shares)


def _kl_words(readings: Readings) -> str:
    kind, coefficient = readings.kl_form
    if kind == "none":
        return "none"
    weights = zip(("μ", "π_old"), readings.kl_weights.tolist(), strict=True)
    weighted = [f", {times:.4g} times where {who} is 0.5 nats away" for who, times in weights if abs(times - 1) > 1e-9]
    if kind == "k1" and coefficient < 0:
        kind, coefficient = "k1 of the reverse direction", -coefficient
    form = "of no known form" if kind == "other" else f"{kind} with the coefficient {coefficient:.4g}"
    return "".join([form, *weighted])


def _powers(powers: dict[str, float]) -> str:
    return " ".join(f"{NAMES[name]}^{power:.3g}" for name, power in powers.items() if abs(power) > 1e-3) or "no policy"


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _range(values: Tensor) -> str:
    """Returns the smallest and the largest; NaN is 0 / 0, a gradient that is 0 on both sides."""
    values = values[values.isfinite()] + 0.0  # no -0
    if not len(values):
        return "an unknown number of"
    low, high = float(values.min()), float(values.max())
    return f"{low:.3g}" if high - low < 1e-6 else f"{low:.3g} to {high:.3g}"
