"""Properties that hold for every objective: functions of the laboratory and the name of an objective there.

`test_every_preset.py` runs them on every preset, `test_compositions.py` on compositions that no preset has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode


def same(left, right) -> None:
    assert_close(left.loss, right.loss, rtol=1e-9, atol=1e-11)
    assert_close(left.grad, right.grad, rtol=1e-9, atol=1e-11)
    assert_close(left.entropy_grad, right.entropy_grad, rtol=1e-9, atol=1e-11)


def on_policy_it_is_the_plain_policy_gradient(lab, name):
    batch = lab.Batch.random(0, 8, 7)
    policy = batch.current
    batch = batch.changed(behavior=policy, proximal=policy, reference=policy, head_behavior=batch.head_current)
    kinds = [{}]
    if name != "oapl":  # it has no choice of aggregation
        kinds += [{"aggregation": "seq-mean-token-mean"}, {"aggregation": "token-mean"}]
        kinds += [{"aggregation": "constant", "length_max": 9}, {"aggregation": "seq-mean-token-sum"}]
    if lab.objective(name).rejects:
        kinds.append({"denominator": "kept"})
    for shared in kinds:
        obj = lab.objective(name, **shared)
        slope = batch.advantage.expand(policy.shape)
        if name == "oapl":
            slope = 2 * 1e-3 * slope
        if name == "luffy":
            shaped = 0.1 * policy.exp() / (policy.exp() + 0.1) ** 2
            slope = torch.where(batch.off_policy, shaped * slope, slope)
        expected = torch.where(batch.mask, -slope * lab.scale(obj, batch.mask), 0.0)
        assert_close(lab.run(obj, batch).grad, expected, rtol=1e-9, atol=1e-12)


def values_at_padding_change_nothing(lab, name):
    batch = lab.Batch.random(0)

    def with_junk(tensor: Tensor) -> Tensor:
        if tensor.shape[:2] != batch.mask.shape or not tensor.dtype.is_floating_point:
            return tensor
        return torch.where(batch.mask.view(*batch.mask.shape, *[1] * (tensor.ndim - 2)), tensor, batch.junk(tensor))

    def padded(tensor: Tensor) -> Tensor:
        if tensor.shape[1] == 1:
            return tensor
        more = batch.junk(tensor.new_zeros(tensor.shape[0], 100, *tensor.shape[2:]))
        return torch.cat([tensor, torch.zeros_like(more) if tensor is batch.mask else more], dim=1)

    for obj in lab.variants(name):
        clean, dirty, wide = lab.run(obj, batch), lab.run(obj, batch.map(with_junk)), lab.run(obj, batch.map(padded))
        same(clean, dirty)
        assert (dirty.grad[~batch.mask] == 0).all()
        assert_close(wide.loss, clean.loss, rtol=1e-9, atol=1e-11)
        assert_close(wide.grad[:, :6], clean.grad, rtol=1e-9, atol=1e-11)
        assert (wide.grad[:, 6:] == 0).all()
        assert dirty.metrics == pytest.approx(clean.metrics, nan_ok=True)


def an_observation_equals_the_response_with_the_observation_cut_out(lab, name):
    seed, place, length = lab.in_turn(name, [(0, 0, 1), (1, 3, 2), (2, 6, 3)])
    batch = lab.Batch.random(seed, rows=5)

    def observed(tensor: Tensor) -> Tensor:
        if tensor.shape[1] == 1:
            return tensor
        middle = batch.junk(tensor.new_zeros(tensor.shape[0], length, *tensor.shape[2:]))
        if tensor is batch.mask:
            middle = torch.zeros_like(middle)
        elif tensor is batch.turn:
            middle = tensor[:, [max(0, place - 1)]].expand(-1, length)
        return torch.cat([tensor[:, :place], middle, tensor[:, place:]], dim=1)

    for obj in lab.variants(name):
        cut, whole = lab.run(obj, batch), lab.run(obj, batch.map(observed))
        assert_close(whole.loss, cut.loss, rtol=1e-9, atol=1e-11)
        for left, right in ((whole.grad, cut.grad), (whole.entropy_grad, cut.entropy_grad)):
            assert_close(torch.cat([left[:, :place], left[:, place + length :]], dim=1), right, rtol=1e-9, atol=1e-11)
            assert (left[:, place : place + length] == 0).all()
        assert whole.metrics == pytest.approx(cut.metrics, nan_ok=True)


def any_split_into_micro_batches_gives_the_same_update(lab, name):
    cuts = lab.in_turn(name, [[1], [0, 3, 3]])
    batch = lab.Batch.random(len(cuts), rows=6, spread=0.6)
    parts = [batch.rows(rows) for rows in torch.arange(6).tensor_split(cuts)]
    for obj in lab.variants(name):
        whole = lab.run(obj, batch)
        state = sum(lab.prepare(obj, part) for part in parts)
        runs = [lab.run(obj, part, state) for part in parts]
        assert_close(sum(run.loss for run in runs), whole.loss, rtol=1e-9, atol=1e-11)
        assert_close(torch.cat([run.grad for run in runs]), whole.grad, rtol=1e-9, atol=1e-11)
        assert_close(torch.cat([run.entropy_grad for run in runs]), whole.entropy_grad, rtol=1e-9, atol=1e-11)


def metrics_of_micro_batches_add_up_to_those_of_the_update(lab, name):
    batch = lab.Batch.random(0, rows=6)
    obj = lab.objective(name, kl="k3", kl_coef=0.1)
    state = lab.prepare(obj, batch)
    halves = [
        obj(part.logps(), part.advantage, state=state).metrics
        for part in (batch.map(lambda t: t[:2]), batch.map(lambda t: t[2:]))
    ]
    whole = obj(batch.logps(), batch.advantage).metrics.finalize()
    merged = (halves[0] + halves[1]).finalize()
    assert merged.keys() == whole.keys()
    for key in whole.keys() - {"batch/empty"}:
        assert merged[key] == pytest.approx(whole[key], rel=1e-5, abs=1e-7, nan_ok=True), key


def order_of_rows_does_not_matter(lab, name):
    batch = lab.Batch.random(1)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    for obj in lab.variants(name):
        whole, shuffled = lab.run(obj, batch), lab.run(obj, batch.rows(order))
        assert_close(shuffled.loss, whole.loss, rtol=1e-9, atol=1e-11)
        assert_close(shuffled.grad, whole.grad[order], rtol=1e-9, atol=1e-11)


def packed_rows_equal_unpacked_ones(lab, name):
    seed, width = lab.in_turn(name, [(1, 1), (0, 10)])
    batch = lab.Batch.random(seed, rows=4, time=5)
    ids = torch.arange(4)[:, None].expand(4, 5)
    per_token = batch.changed(sequence_ids=ids, advantage=batch.advantage.expand(4, 5))
    # Tokens of different responses in any order, those of one response in their own.
    labels = ids.reshape(-1)[torch.randperm(20, generator=torch.Generator().manual_seed(seed))]
    order = torch.empty(20, dtype=torch.long).scatter(0, labels.argsort(stable=True), torch.arange(20))
    packed = per_token.map(lambda tensor: tensor.flatten(0, 1)[order].unflatten(0, (-1, width)))
    for obj in lab.variants(name):
        rows, slots = lab.run(obj, batch), lab.run(obj, packed)
        assert_close(slots.loss, rows.loss, rtol=1e-9, atol=1e-11)
        assert_close(slots.grad, rows.grad.reshape(-1)[order].view(-1, width), rtol=1e-9, atol=1e-11)
        state = lab.prepare(obj, packed)
        assert_close(lab.run(obj, packed, state).loss, rows.loss, rtol=1e-9, atol=1e-11)
        assert slots.metrics == pytest.approx(rows.metrics, nan_ok=True, rel=1e-5)


def gradient_reaches_the_current_policy_alone(lab, name):
    batch = lab.Batch.random(0)
    for obj in lab.variants(name):
        grown = {key: getattr(batch, key).clone().requires_grad_() for key in ("behavior", "proximal", "reference")}
        current = batch.current.clone().requires_grad_()
        obj(batch.changed(current=current, **grown).logps(), batch.advantage).loss.backward()
        assert all(tensor.grad is None for tensor in grown.values())
        assert not lab.prepare(obj, batch.changed(current=current)).tokens.requires_grad


def external_tokens_are_read_by_the_shaped_loss_alone_and_without_their_behavior(lab, name):
    batch = lab.Batch.random(0)
    for obj in lab.variants(name):
        clean = lab.run(obj, batch)
        if "off_policy" not in obj.needs:
            same(lab.run(obj, batch.changed(off_policy=~batch.off_policy)), clean)
            continue
        junk = batch.junk(batch.behavior)
        with_junk = {key: torch.where(batch.off_policy, junk, getattr(batch, key)) for key in ("behavior", "proximal")}
        dirty = lab.run(obj, batch.changed(**with_junk))
        same(dirty, clean)
        assert dirty.metrics == pytest.approx(clean.metrics, nan_ok=True)
        assert dirty.loss.isfinite()
        assert dirty.grad.isfinite().all()


def extreme_log_ratios_stay_finite_and_are_reported(lab, name):
    batch = lab.Batch.random(3)
    batch = batch.changed(mask=torch.ones_like(batch.mask), off_policy=torch.zeros_like(batch.off_policy))
    for far in (1e4, -1e4):
        moved = batch.changed(current=batch.current + far, reference=batch.reference - far)
        for obj in lab.variants(name):
            run = lab.run(obj, moved)
            assert run.loss.isfinite()
            assert run.grad.isfinite().all()
            assert run.metrics["ratio/bounded"] == 1.0
            if obj.kl.coef:
                assert run.metrics["kl/bounded"] == 1.0


def extreme_mismatch_stays_finite(lab, name):
    batch = lab.Batch.random(3)
    for far in (1e4, -90.0):  # a sampler's log-prob below -100 is no mismatch: it counts as not finite
        for obj in lab.variants(name):
            run = lab.run(obj, batch.changed(behavior=batch.behavior + far))
            assert run.loss.isfinite()
            assert run.grad.isfinite().all()


def nothing_to_train_is_zero_and_counted(lab, name):
    batch = lab.Batch.random(1)
    for obj in lab.variants(name):
        empty = batch.changed(mask=torch.zeros_like(batch.mask))
        for shape in (empty, empty.map(lambda tensor: tensor[:0])):
            run = lab.run(obj, shape)
            assert run.loss == 0
            assert (run.grad == 0).all()
            assert run.metrics["batch/empty"] == 1
            assert run.metrics["loss/policy"] == 0


def everything_rejected_is_zero_and_counted(lab, name):
    batch = lab.Batch.random(1)
    mask = batch.mask.clone()
    mask[0, 0] = True
    # 30 nats below the sampler with negative advantages: outside every band, and off-policy for OPSM.
    batch = batch.changed(
        mask=mask, behavior=batch.current + 30, proximal=batch.current, advantage=-torch.ones(8, 1).double()
    )
    for denominator in ("original", "kept") if lab.objective(name).rejects else ("original",):
        obj = lab.objective(name, denominator=denominator)
        run = lab.run(obj, batch)
        if not obj.masks and (obj.weight is None or obj.weight.low == 0):
            assert run.metrics.get("reject/tokens", 0) == 0
            continue
        assert run.loss == 0
        assert (run.grad == 0).all()
        assert run.metrics["batch/empty"] == 1
        assert run.metrics["reject/tokens"] == run.metrics["reject/sequences"] == 1


def a_diverged_model_gives_nan(lab, name):
    batch = lab.Batch.random(1)
    row, column = batch.mask.nonzero()[0].tolist()
    for junk in (float("nan"), float("inf"), float("-inf")):
        current = batch.current.clone()
        current[row, column] = junk
        assert lab.run(lab.objective(name), batch.changed(current=current)).loss.isnan()


def it_runs_on_meta_tensors_so_nothing_waits_for_the_device(lab, name):
    plain = lab.Batch.random(1, rows=4).map(lambda tensor: tensor.to("meta"))
    ids = torch.arange(4)[:, None].expand(4, 6).to("meta")
    packed = plain.changed(sequence_ids=ids, advantage=plain.advantage.expand(4, 6))
    first, second, *normalized = lab.variants(name)
    if normalized:
        second = replace(second, weight=normalized[0].weight)
    # Rows and packed rows in turn: their sums are the same functions in every preset.
    obj, batch = lab.in_turn(name, [(first, plain), (second, packed), (second, plain)])
    state = obj.prepare(batch.logps(), batch.advantage)
    current = batch.current.clone().requires_grad_()
    out = obj(batch.changed(current=current).logps(), batch.advantage, state=state + state)
    out.loss.backward()
    assert out.loss.is_meta
    assert sum(part.summary() != {} for part in (out.metrics + out.metrics).parts.values()) > 0


def a_missing_policy_is_named(lab, name):
    batch = lab.Batch.random(1)
    obj = lab.objective(name, kl="k3", kl_coef=0.1, entropy_coef=0.1)
    for field in obj.needs | {"current"}:
        with pytest.raises(ValueError, match=rf"needs {field}, which is None"):
            obj(replace(batch.logps(), **{field: None}), batch.advantage)
    policies = {"behavior", "proximal", "reference", "entropy", "off_policy", "turn", "age"}
    absent = policies | {"head_current", "head_behavior"}
    assert obj(replace(batch.logps(), **dict.fromkeys(absent - obj.needs)), batch.advantage).loss.isfinite()


def low_precision_inputs_are_computed_in_float32(lab, name):
    batch = lab.Batch.random(2)
    half = batch.map(lambda tensor: tensor.to(torch.bfloat16) if tensor.dtype == torch.float64 else tensor)
    single = half.map(lambda tensor: tensor.float() if tensor.dtype == torch.bfloat16 else tensor)
    low, high = lab.run(lab.objective(name), half), lab.run(lab.objective(name), single)
    assert low.loss.dtype == torch.float32
    assert_close(low.loss, high.loss)


class Rounded(TorchDispatchMode):
    """Collects the operations whose result in float32 holds more than counts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                values = tensor[tensor.isfinite()]
                if (values != values.round()).any():
                    self.found.add(str(func))
        return out


def with_odd_numbers(part: Any) -> Any:
    """A part of an objective whose numbers have no exact float32."""
    numbers = {field.name: getattr(part, field.name) for field in fields(part)}
    return replace(part, **{k: v * 1.001 for k, v in numbers.items() if isinstance(v, float) and math.isfinite(v)})


def float64_inputs_are_computed_in_float64(lab, name):
    batch = lab.Batch.random(0)
    for obj in lab.variants(name):
        uneven = replace(obj, surrogate=with_odd_numbers(obj.surrogate))
        if obj.weight is not None:
            uneven = replace(uneven, weight=with_odd_numbers(obj.weight))
        uneven = replace(uneven, masks=tuple(map(with_odd_numbers, obj.masks)))
        with Rounded() as rounded:
            lab.run(uneven, batch)
        assert rounded.found == set()


@contextmanager
def stop_gradients(held: list[Tensor], *, replay: bool) -> Iterator[None]:
    """Record what `detach` returns, or give the recorded values back in the same order.

    A loss with stop-gradients is the derivative of no function of its input alone; with the detached values held at
    their first value it is, and finite differences apply.
    """
    original, place = Tensor.detach, iter(held)

    def detach(tensor: Tensor) -> Tensor:
        if replay:
            return next(place)
        held.append(original(tensor).clone())
        return original(tensor)

    Tensor.detach = detach
    try:
        yield
    finally:
        Tensor.detach = original


def gradient_equals_finite_differences(lab, name):
    """The presets take turns with the estimators of the KL: a regularizer is added to the loss, whatever it is."""
    kl = lab.in_turn(name, ["k1", "k2", "k3", "unbiased"])
    batch = lab.Batch.random(11, rows=3, time=4, spread=0.15)
    obj = lab.objective(name, kl=kl, kl_coef=0.3, entropy_coef=0.2)
    held: list[Tensor] = []

    def loss(current: Tensor, *, replay: bool) -> Tensor:
        with stop_gradients(held, replay=replay):
            return obj(batch.changed(current=current).logps(), batch.advantage).loss

    current = batch.current.clone().requires_grad_()
    loss(current, replay=False).backward()
    step, here = 1e-6, loss(batch.current, replay=True)
    for index in map(tuple, batch.mask.nonzero().tolist()):
        moved = torch.zeros_like(batch.current)
        moved[index] = step
        up = (loss(batch.current + moved, replay=True) - here) / step
        down = (here - loss(batch.current - moved, replay=True)) / step
        # Both sides agree but at the token that sets M2PO's cap, which stands on the kink.
        slope = min((up, down, (up + down) / 2), key=lambda side: abs(side - current.grad[index]))
        assert abs(slope - current.grad[index]) < 1e-5 * (1 + abs(slope)), index


def regularizers_use_the_mask_without_keep_and_the_same_aggregation(lab, name):
    batch = lab.Batch.random(5, rows=5)
    batch = batch.changed(off_policy=torch.zeros_like(batch.mask))
    reference, entropy = 0.7, 0.3
    plain = lab.run(lab.objective(name), batch).loss
    distance = batch.reference - batch.current
    for kl, value in {
        "k1": -distance,
        "k2": distance**2 / 2,
        "k3": distance.exp() - 1 - distance,
        "unbiased": (batch.current - batch.behavior).exp() * (distance.exp() - 1 - distance),
    }.items():
        obj = lab.objective(name, kl=kl, kl_coef=reference, entropy_coef=entropy)
        scale = torch.where(batch.mask, lab.scale(obj, batch.mask), 0.0)
        expected = plain + (scale * (reference * value - entropy * batch.entropy)).sum()
        assert_close(lab.run(obj, batch).loss, expected)


FOR_ALL = (
    values_at_padding_change_nothing,
    an_observation_equals_the_response_with_the_observation_cut_out,
    any_split_into_micro_batches_gives_the_same_update,
    metrics_of_micro_batches_add_up_to_those_of_the_update,
    order_of_rows_does_not_matter,
    packed_rows_equal_unpacked_ones,
    gradient_reaches_the_current_policy_alone,
    external_tokens_are_read_by_the_shaped_loss_alone_and_without_their_behavior,
    extreme_log_ratios_stay_finite_and_are_reported,
    extreme_mismatch_stays_finite,
    nothing_to_train_is_zero_and_counted,
    a_diverged_model_gives_nan,
    a_missing_policy_is_named,
    low_precision_inputs_are_computed_in_float32,
    gradient_equals_finite_differences,
    regularizers_use_the_mask_without_keep_and_the_same_aggregation,
)
FOR_PRESETS = (
    on_policy_it_is_the_plain_policy_gradient,
    everything_rejected_is_zero_and_counted,
    it_runs_on_meta_tensors_so_nothing_waits_for_the_device,
    float64_inputs_are_computed_in_float64,
)
"""Those that a composition need not have, or that cost most."""
