"""Frozen numbers of the peers, and the batches they belong to. Nothing here needs a peer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import trimtab
from trimtab.objectives import Objective, PolicyLogps
from trimtab.objectives.advantages import optimal_token_advantages

FROZEN = Path(__file__).parent / "frozen"
LOGPS = ("behavior", "proximal", "current", "reference", "entropy")

# Peers were run in float64 (see tools/parity/generate.py). Ours must agree in float64 to 1e-6, and in float32 to what a
# few hundred float32 additions cost; errors are relative to the largest frozen value of a tensor.
# Most are below 1e-6; the ratio of a sequence is the exponential of a sum of some 20 log-ratios, whose absolute error
# becomes a relative one: measured 8e-6, and another processor sums in another order.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-5}


@cache
def _tensors(name: str) -> dict[str, Tensor]:
    return load_file(FROZEN / f"{name}.safetensors")


@cache
def _document(name: str) -> dict[str, Any]:
    return json.loads((FROZEN / f"{name}.json").read_text())


@dataclass(frozen=True)
class Given:
    """One batch as Trimtab sees it: NaN wherever nothing is trained, so that a peek there would show."""

    name: str
    dtype: torch.dtype

    def __getattr__(self, field: str) -> Tensor:
        key = f"{self.name}/{field}"
        if key not in _tensors("inputs"):
            raise AttributeError(field)
        value = _tensors("inputs")[key]
        if value.is_floating_point():
            value = value.to(self.dtype)
        return torch.where(self.mask, value, torch.nan) if field in LOGPS else value

    def logps(self, current: Tensor | None = None, **changes: Any) -> PolicyLogps:
        fields: dict[str, Any] = {field: getattr(self, field) for field in LOGPS} | {"mask": self.mask}
        fields |= {"current": self.current if current is None else current} | changes
        return PolicyLogps(**fields)

    def run(self, objective: Objective, advantage: Tensor | None = None, **changes: Any) -> tuple[float, Tensor]:
        """Loss and its gradient in the current log-probs."""
        leaf = self.current.requires_grad_()
        loss = objective(self.logps(leaf, **changes), self.advantage if advantage is None else advantage).loss
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.item(), gradient

    def compare(
        self, objective: Objective, peer: Peer, case: str, dtype: torch.dtype | None = None, **changes: Any
    ) -> None:
        """Asserts that loss and gradient are those of a peer's case. dtype: of the tolerance, that of the batch."""
        loss, gradient = self.run(objective, **changes)
        assert_close(loss, peer.scalar(case, self.name, "loss"), dtype or self.dtype)
        assert_close(gradient, peer.tensor(case, self.name, "gradient"), dtype or self.dtype)

    def token_advantages(self, groups: Tensor | None = None) -> Tensor:
        """Advantages with the optimal token baseline, for the sums of squares of tools/parity/from_verl.py."""
        probability = self.behavior.exp()
        squares = probability.square() + (1 - probability).square() * (-self.entropy).exp()
        groups = self.groups if groups is None else groups
        return optimal_token_advantages(self.rewards, groups, self.behavior, squares, self.mask)

    def correct(self, *masks: Any, weight: Any = None, **changes: Any) -> Any:
        return trimtab.correct(self.proximal, self.behavior, self.mask, weight=weight, masks=masks, **changes)


@dataclass(frozen=True)
class Peer:
    """What one peer computed."""

    name: str

    @property
    def cases(self) -> set[str]:
        return set(_document(self.name)["cases"])

    def tensor(self, case: str, batch: str, key: str) -> Tensor:
        value = _tensors(self.name)[f"{case}/{batch}/{key}"]
        return value.double() if value.is_floating_point() else value

    def scalar(self, case: str, batch: str, key: str) -> float:
        return float(_document(self.name)["cases"][case]["scalars"][batch][key])

    def text(self, case: str, batch: str, key: str) -> str:
        return _document(self.name)["cases"][case]["scalars"][batch][key]

    def raised(self, case: str, batch: str) -> str:
        """The error the peer answered with, or an empty string."""
        return _document(self.name)["cases"][case]["scalars"].get(batch, {}).get("raised", "")


def assert_close(ours: Tensor | float, theirs: Tensor | float, dtype: torch.dtype) -> None:
    mine = torch.as_tensor(ours, dtype=torch.float64)
    reference = torch.as_tensor(theirs, dtype=torch.float64)
    scale = float(reference.abs().max()) if reference.numel() else 1.0
    torch.testing.assert_close(mine, reference, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)


def _peer(name: str) -> Any:
    return pytest.fixture(scope="session", name=name.replace("-", "_"))(lambda: Peer(name))


verl, trl, miles, prime_rl, areal, newer, hooks = map(
    _peer, ("verl", "trl", "miles", "prime-rl", "areal", "newer", "hooks")
)


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=["mild", "heavy", "ragged"])
def given(request: pytest.FixtureRequest, dtype: torch.dtype) -> Given:
    return Given(request.param, dtype)


@pytest.fixture
def load() -> Callable[[str], Given]:
    """A batch by name, in float64."""
    return lambda name: Given(name, torch.float64)


@pytest.fixture
def close(dtype: torch.dtype) -> Callable[[Any, Any], None]:
    return lambda ours, theirs: assert_close(ours, theirs, dtype)


@pytest.fixture
def close32() -> Callable[[Any, Any], None]:
    """For what the peer itself rounds to float32."""
    return lambda ours, theirs: assert_close(ours, theirs, torch.float32)


@pytest.fixture
def close64() -> Callable[[Any, Any], None]:
    return lambda ours, theirs: assert_close(ours, theirs, torch.float64)
