"""Tensors of a wrong type, shape, kind of number or device: one line that names the argument, whichever takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from jaxtyping import config
from tests.contract.conftest import Batch
from torch import Tensor

from trimtab import Monitor
from trimtab.corrections.masks import Band, Veto
from trimtab.corrections.weights import Weight
from trimtab.errors import TrimtabError
from trimtab.objectives import Clipped, PolicyLogps, correct, mismatch, objective, objectives
from trimtab.testing import assert_parity

ROWS, TIME = 3, 4
REALS = ("advantage", "reward", "group", "truncated")


@pytest.fixture(autouse=True)
def without_annotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside tests, where annotations are not checked."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


def logps() -> dict[str, Tensor]:
    rows = torch.arange(ROWS)[:, None].expand(ROWS, TIME).contiguous()
    whole = Batch.random(0, ROWS, TIME).changed(mask=torch.ones(ROWS, TIME, dtype=torch.bool), sequence_ids=rows)
    return {name: tensor for name, tensor in vars(whole).items() if name != "advantage"}


def wrong(name: str, good: Tensor) -> Iterator[Any]:
    """Everything that is not a tensor of this shape, kind, layout and device."""
    yield from (good.tolist(), good.numpy(), 1.0, "text", {})
    yield from (good.reshape(-1) if good.ndim > 1 else good[None], good[..., None], good[:-1], good[:1], good.sum())
    if good.ndim == 2:
        yield from (good.T, good[:, :-1] if good.shape[1] > 1 else good[:, :0])
    yield torch.empty_like(good, device="meta")
    yield good.to(torch.complex64)
    if name not in REALS:
        yield good.float() if not good.is_floating_point() else good.long()
        yield good.to(torch.uint8) if good.dtype == torch.bool else good > 0
        yield good.float().to_sparse()


def refuses(name: str, good: Tensor, call: Callable[[Any], object]) -> None:
    for value in wrong(name, good):
        with pytest.raises(ValueError, match=f"^{name} ") as error:
            call(value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("preset", objectives())
def test_every_preset_names_the_argument_that_is_wrong(preset: str) -> None:
    made, good, advantage = objective(preset), logps(), torch.randn(ROWS, 1)
    given = PolicyLogps(**good)
    assert torch.isfinite(made(given, advantage).loss)
    for name, tensor in good.items():
        if name != "mask":
            refuses(name, tensor, lambda value, name=name: made(PolicyLogps(**{**good, name: value}), advantage))
    for call in (made, made.prepare):
        refuses("advantage", advantage, lambda value, call=call: call(given, value))
    with pytest.raises(ValueError, match=r"takes PolicyLogps, .* not dict"):
        made(good, advantage)  # pyright: ignore[reportArgumentType]


def test_a_mask_of_another_type_or_shape_is_named() -> None:
    good = logps()
    for value in ([[True]], 1.0, good["mask"].numpy(), good["mask"].float(), good["mask"][0], good["mask"][..., None]):
        with pytest.raises(ValueError, match=r"^mask "):
            PolicyLogps(**{**good, "mask": value})
    # Of two shapes that differ the other one is named, beside that of the mask.
    with pytest.raises(ValueError, match=r"current has shape \(3, 4\), mask \(2, 4\): it must be \(batch, time\)"):
        PolicyLogps(**{**good, "mask": good["mask"][:2]})


def test_functions_name_the_argument_that_is_wrong() -> None:
    good = {name: tensor for name, tensor in logps().items() if name in ("proximal", "behavior", "current", "turn")}
    mask, ids = logps()["mask"], logps()["sequence_ids"]
    good |= {"sequence_ids": ids, "advantage": torch.randn(ROWS, 1)}
    parts = {"weight": Weight("token", "truncate", max=2.0), "masks": [Band("geometric", 0.9, 1.1)]}
    correct(mask=mask, **good, **parts)
    for name, tensor in good.items():
        refuses(name, tensor, lambda value, name=name: correct(mask=mask, **{**good, name: value}, **parts))
    for one in ({"weight": 2.0}, {"masks": Band("geometric", 0.9, 1.1)}, {"masks": [0.9]}):
        with pytest.raises(ValueError, match=r"^weight must be a Weight, masks a list"):
            correct(good["proximal"], good["behavior"], mask, **one)  # pyright: ignore[reportArgumentType]
    pair = (good["proximal"], good["behavior"])
    refuses("logp_train", pair[0], lambda value: mismatch(value, pair[1], mask))
    refuses("logp_rollout", pair[1], lambda value: mismatch(pair[0], value, mask))
    refuses("sequence_ids", ids, lambda value: mismatch(*pair, mask, sequence_ids=value))
    refuses("logp_a", pair[0], lambda value: assert_parity(value, pair[1], mask))
    refuses("logp_b", pair[1], lambda value: assert_parity(pair[0], value, mask))


def test_parts_name_a_number_that_is_missing() -> None:
    for part, name in ((Clipped, "low"), (Veto, "min")):
        with pytest.raises(TrimtabError, match=f"{part.__name__}: {name} is None: give a number in "):
            part(None)
    assert Clipped(dual=None).dual is None


def test_the_monitor_names_the_argument_that_is_wrong() -> None:
    good = {
        "logp_train": logps()["proximal"],
        "logp_rollout": logps()["behavior"],
        "response_ids": logps()["age"],
        **{name: torch.ones(ROWS) for name in ("reward", "advantage", "truncated", "group")},
    }
    rest = {"mask": logps()["mask"], "step": 1, "version": 0, "grad_norm": 1.0}
    monitor = Monitor()
    for name, tensor in good.items():
        refuses(name, tensor, lambda value, name=name: monitor.observe(**{**good, **rest, name: value}))
    numbers = {
        "step": (1.5, "1", None, 10**400, torch.ones(2)),
        "version": (1.5, "1", 10**400, torch.ones(2), torch.ones(ROWS, 1)),
        "grad_norm": ("one", [1.0], 10**400, 10**5000, 1j, torch.ones(2)),
    }
    for name, values in numbers.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name} "):
                monitor.observe(**{**good, **rest, name: value})
    assert monitor.observe(**good, **rest)["mismatch/tokens"] == ROWS * TIME, "nothing of the refused calls was added"
