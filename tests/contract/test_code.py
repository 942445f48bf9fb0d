"""The printed code of an objective, run with torch alone, is the objective: loss, gradient, denominators, NaN."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.conftest import FORMS, Batch
from tests.contract.test_compositions import AGGREGATIONS, parts
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.objectives import KL, Lines, Objective, State, Surrogate, Terms, Value, keywords_of, objective, objectives
from trimtab.objectives.regularizers import KL_KINDS

TOLERANCE = 1e-12
GROWN = ("current", "entropy", "head_current")
"""Tensors with a gradient."""


class Printed:
    """The functions of a printed text, in a namespace that has nothing else."""

    def __init__(self, obj: Objective) -> None:
        self.text = obj.code()
        names: dict[str, Any] = {"__builtins__": {**vars(__import__("builtins")), "__import__": torch_only}}
        exec(compile(self.text, "printed", "exec"), names)  # noqa: S102 - it is the text of this package
        found = {name: value for name, value in names.items() if inspect.isfunction(value)}
        [self.loss] = [value for name, value in found.items() if name.endswith("_loss")]
        ends = ("limit", "mean_weight", "kept")
        self.of_update = {end: value for name, value in found.items() for end in ends if name.endswith(f"_{end}")}

    def __call__(self, batch: Batch, splits: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        """The loss and its gradients, of micro-batches that end before the given rows."""
        grown = {name: getattr(batch, name).detach().clone().requires_grad_() for name in GROWN}
        whole = batch.changed(**grown)
        takes = inspect.signature(self.loss).parameters
        of_update: dict[str, Any] = {}
        if splits:
            trained = "with a trained token" in self.text
            counts = {"tokens": batch.mask.sum(), "responses": batch.mask.any(1).sum() if trained else len(batch.mask)}
            of_update = {name: max(1, int(count)) for name, count in counts.items() if name in takes}
            of_update |= {name: function(**arguments(function, batch)) for name, function in self.of_update.items()}
        pieces = torch.arange(len(batch.mask)).tensor_split(splits)
        losses = [self.loss(**arguments(self.loss, whole.rows(rows)), **of_update) for rows in pieces]
        total = torch.stack(losses).sum()
        if total.requires_grad:
            total.backward()
        return total.detach(), [torch.zeros_like(one) if one.grad is None else one.grad for one in grown.values()]


def torch_only(name: str, *_: Any) -> Any:
    assert name == "torch"
    return torch


def arguments(function: Callable[..., Any], batch: Batch) -> dict[str, Tensor]:
    names = {field.name for field in fields(batch)} & set(inspect.signature(function).parameters)
    return {name: getattr(batch, name) for name in names}


def expected(obj: Objective, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    grown = {name: getattr(batch, name).detach().clone().requires_grad_() for name in GROWN}
    loss = obj(batch.changed(**grown).logps(), batch.advantage).loss
    if loss.requires_grad:
        loss.backward()
    return loss.detach(), [torch.zeros_like(one) if one.grad is None else one.grad for one in grown.values()]


def difference(left: tuple[Tensor, list[Tensor]], right: tuple[Tensor, list[Tensor]]) -> float:
    """The largest difference of losses and gradients, relative where these are above 1."""
    pairs = zip([left[0], *left[1]], [right[0], *right[1]], strict=True)
    gaps = [((a - b).abs() / b.abs().clamp(min=1)).flatten() for a, b in pairs]
    return float(torch.cat(gaps).nan_to_num(nan=math.inf).max())


def with_junk(batch: Batch) -> Batch:
    """NaN, infinity and large numbers at padding."""

    def padded(tensor: Tensor) -> Tensor:
        if tensor.shape[1:2] != batch.mask.shape[1:] or not tensor.dtype.is_floating_point:
            return tensor
        mask = batch.mask.view(*batch.mask.shape, *[1] * (tensor.ndim - 2))
        return torch.where(mask, tensor, Batch.junk(tensor))

    return batch.map(padded)


def batches() -> Iterator[Batch]:
    """Policies that are close, far apart, equal, and beyond the bound of the exponent; nothing to train."""
    for seed, spread in enumerate((1e-3, 0.3, 1.5)):
        yield with_junk(Batch.random(seed, spread=spread))
    same = Batch.random(4)
    yield with_junk(same.changed(behavior=same.current, proximal=same.current, reference=same.current))
    far = Batch.random(5)
    yield far.changed(current=far.current - 40, reference=far.reference + 15, behavior=far.behavior - 10)
    yield far.changed(mask=torch.zeros_like(far.mask))


def check(obj: Objective, chosen: Iterable[Batch] = (), splits: Iterable[tuple[int, ...]] = ((), (3,))) -> Printed:
    printed = Printed(obj)
    for number, batch in enumerate(chosen or batches()):
        right = expected(obj, batch)
        for ends in splits:
            gap = difference(printed(batch, ends), right)
            assert gap <= TOLERANCE, f"batch {number}, parts that end at {ends}: {gap}\n{printed.text}"
    return printed


def objective_of(name: str, **keywords: Any) -> Objective:
    name, own = FORMS.get(name, (name, {}))
    return objective(name, **{**own, **keywords})


@pytest.mark.parametrize("name", [*objectives(), "m2po-mask"])
def test_the_code_of_a_preset_is_the_preset_in_at_most_40_lines(name: str) -> None:
    obj = objective_of(name)
    printed = check(obj, splits=((), (3,), (1, 2, 5, 5)))
    rows = [row for row in printed.text.splitlines() if row.strip()]
    assert len(rows) <= 40
    assert max(map(len, rows)) <= 120
    assert printed.text.isascii()
    check(replace(obj, kl=KL("unbiased", 0.3), entropy_coef=0.2), [with_junk(Batch.random(6))])


@pytest.mark.parametrize("name", objectives())
def test_the_code_follows_every_keyword(name: str) -> None:
    """Each number a fifth larger and smaller, where the part allows it, and each word."""
    default = objective(name).code()
    for key, value in keywords_of(name).items():
        if isinstance(value, bool) or key == "normalize":
            values: list[dict[str, Any]] = [{key: True}, {key: False}]
        elif isinstance(value, float):
            values = [{key: value * 1.2 if value else 0.1}, {key: value * 0.8 if value else 0.2}]
        else:
            values = WORDS.get(key, [])
        printed = set()
        for chosen in values:
            try:
                obj = objective_of(name, **chosen)
            except TrimtabError:
                continue
            printed.add(check(obj, [with_junk(Batch.random(7, spread=0.6))]).text)
        refused = key == "denominator" and not objective(name).rejects
        assert refused or printed - {default}, key


WORDS: dict[str, list[dict[str, Any]]] = {
    "clip_dual": [{"clip_dual": 1.5}, {"clip_dual": 4.0}],
    "form": [{"form": "mask"}, {"form": "cap"}],
    "aggregation": [{"aggregation": kind} for kind in AGGREGATIONS if kind != "constant"],
    "length_max": [{"aggregation": "constant", "length_max": length} for length in (9, 20)],
    "denominator": [{"denominator": "kept"}, {"denominator": "kept", "kl_coef": 0.1}],
    "kl": [{"kl": kind, "kl_coef": 0.1} for kind in KL_KINDS],
}


@settings(max_examples=200)
@given(parts(), st.integers(0, 1000))
def test_the_code_of_compositions_is_the_composition(drawn: dict[str, Any], seed: int) -> None:
    check(objective("composed", **drawn), [with_junk(Batch.random(seed, spread=0.4))], ((), (2, 3)))


def test_an_extreme_or_empty_batch_gives_the_same() -> None:
    """Log-ratios of 1e4 nats, nothing to train, no rows, everything rejected, external tokens without a policy."""
    plain = Batch.random(3)
    everything = plain.changed(mask=torch.ones_like(plain.mask), off_policy=torch.zeros_like(plain.off_policy))
    odd = [everything.changed(current=plain.current + far, reference=plain.reference - far) for far in (1e4, -1e4)]
    odd += [plain.changed(behavior=plain.behavior + far) for far in (1e4, -90.0)]
    odd += [plain.map(lambda tensor: tensor[:0]), plain.changed(mask=torch.zeros_like(plain.mask))]
    odd += [plain.changed(behavior=plain.current + 30, proximal=plain.current, advantage=-plain.advantage.abs() - 1)]
    junk = Batch.junk(plain.behavior)
    external = {key: torch.where(plain.off_policy, junk, getattr(plain, key)) for key in ("behavior", "proximal")}
    for name in (*objectives(), "m2po-mask"):
        obj = objective_of(name)
        check(obj, odd, [()])
        if obj.rejects:
            check(replace(obj, aggregation=replace(obj.aggregation, denominator="kept")), odd, [()])
        if "off_policy" in obj.needs:
            check(replace(obj, kl=KL("unbiased", 0.3)), [plain.changed(**external)], [()])


def test_a_log_prob_that_is_not_finite_gives_nan() -> None:
    plain = Batch.random(1)
    row, column = plain.mask.nonzero()[0].tolist()
    for name in objectives():
        printed = Printed(objective_of(name, kl_coef=0.1))
        takes = inspect.signature(printed.loss).parameters
        for key in {"current", "proximal", "behavior", "reference"} & set(takes):
            for value in (math.nan, math.inf, -math.inf, *([-9999.0, -101.0] if key == "behavior" else [])):
                broken = getattr(plain, key).clone()
                broken[row, column] = value
                batch = plain.changed(**{key: broken, "off_policy": torch.zeros_like(plain.mask)})
                assert printed(batch)[0].isnan(), (name, key, value)


def test_gradient_reaches_the_current_policy_alone_and_bfloat16_is_widened() -> None:
    plain = Batch.random(2)
    narrow = plain.map(lambda tensor: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor)
    for name in objectives():
        printed = Printed(objective_of(name, kl_coef=0.1, entropy_coef=0.1))
        fixed = ("proximal", "behavior", "reference", "head_behavior")
        grown = plain.changed(**{key: getattr(plain, key).clone().requires_grad_() for key in (*fixed, "current")})
        printed.loss(**arguments(printed.loss, grown)).backward()
        assert all(getattr(grown, key).grad is None for key in fixed)
        assert grown.current.grad is not None
        low, high = (
            printed(one)[0] for one in (narrow, narrow.map(lambda t: t.float() if t.is_floating_point() else t))
        )
        assert low.dtype == torch.float32
        assert low == high


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("torch.minimum", "torch.maximum"),
        ("losses / length", "losses / mask.shape[1]"),
        ("torch.where(mask, behavior.detach(), zero)", "behavior.detach()"),
    ],
)
def test_a_slip_in_the_code_is_found(right: str, wrong: str) -> None:
    printed = Printed(objective("icepop"))
    assert right in printed.text
    names: dict[str, Any] = {}
    exec(printed.text.replace(right, wrong), names)  # noqa: S102
    printed.loss = names["icepop_loss"]
    assert max(difference(printed(one), expected(objective("icepop"), one)) for one in batches()) > 1e-3


@dataclass(frozen=True)
class Squashed(Surrogate):
    """tanh(r) A, with names that the function has already."""

    def __call__(self, terms: Terms, state: State) -> Value:  # noqa: ARG002
        return torch.tanh(terms.ratio) * terms.advantage, {}

    def equation(self, ratio: str) -> str:
        return f"tanh({ratio}) A"

    def code(self, lines: Lines) -> str:
        return f"{lines.define('length', 'torch.tanh(ratio)')} * {lines.define('mask', 'advantage')}"


class Halved(Squashed):
    """With the code of another class."""

    def __call__(self, terms: Terms, state: State) -> Value:
        return super().__call__(terms, state)[0] / 2, {}


def test_a_class_of_ones_own_has_the_code_that_it_defines() -> None:
    own = replace(objective("icepop"), name='my "loss"\n', surrogate=Squashed())
    assert "def my_loss_loss(" in check(own).text
    with pytest.raises(TrimtabError, match=r"^objective 'dppo': TotalVariation has no code to print: define its code"):
        objective("tests.unit.objectives.own_rule:dppo").code()
    with pytest.raises(TrimtabError, match=r"Halved has no code to print"):
        replace(own, surrogate=Halved()).code()
