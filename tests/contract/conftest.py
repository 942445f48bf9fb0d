"""Helpers of all contract tests: random batches, and the plain policy gradient to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from trimtab.corrections import LEVELS
from trimtab.objectives import Metrics, Objective, PolicyLogps, State, objective, objectives

# Presets that are two losses, depending on a keyword, and a rule from outside the package.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "m2po-mask": ("m2po", {"form": "mask"}),
    "own-rule": ("tests.unit.objectives.own_rule:dppo", {}),
    "turn-level": ("tests.unit.objectives.own_rule:turn_level", {}),
}


NAMES = [*objectives(), *FORMS]


@dataclass(frozen=True)
class Batch:
    """Every field a preset may read, in float64, with advantages (batch, 1)."""

    current: Tensor
    behavior: Tensor
    proximal: Tensor
    reference: Tensor
    entropy: Tensor
    mask: Tensor
    off_policy: Tensor
    advantage: Tensor
    turn: Tensor
    age: Tensor
    head_current: Tensor
    head_behavior: Tensor
    sequence_ids: Tensor | None = None

    @classmethod
    def random(cls, seed: int, rows: int = 8, time: int = 6, spread: float = 0.3) -> Batch:
        """Policies `spread` apart; ragged masks, now and then an empty row."""
        make = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make, dtype=torch.float64)

        base = -normal(rows, time).abs() - 0.05
        policies = {
            name: base + spread * normal(rows, time) for name in ("current", "behavior", "proximal", "reference")
        }
        # The four most probable of six ids.
        logits = normal(rows, time, 6)
        heads = [(logits + spread * normal(rows, time, 6)).log_softmax(-1)[..., :4] for _ in range(2)]
        return cls(
            **policies,
            head_current=heads[0],
            head_behavior=heads[1],
            entropy=normal(rows, time).abs(),
            mask=torch.rand(rows, time, generator=make) < torch.rand(rows, 1, generator=make) * 1.3,
            off_policy=torch.rand(rows, time, generator=make) < 0.3,
            advantage=normal(rows, 1),
            turn=(torch.rand(rows, time, generator=make) < 0.4).long().cumsum(1),
            age=torch.randint(1, 5, (rows, time), generator=make),
        )

    @staticmethod
    def junk(tensor: Tensor) -> Tensor:
        """What may stand where nothing is trained: every odd number in turn, in `tensor`'s shape and type."""
        if not tensor.dtype.is_floating_point:
            return torch.ones_like(tensor)
        values = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e4, -1e4, 0.0, 1.0], dtype=tensor.dtype)
        return values.repeat(tensor.numel() // len(values) + 1)[: tensor.numel()].view(tensor.shape)

    def logps(self) -> PolicyLogps:
        return PolicyLogps(
            self.current,
            self.behavior,
            self.mask,
            self.proximal,
            self.reference,
            self.entropy,
            self.off_policy,
            self.sequence_ids,
            self.turn,
            self.age,
            self.head_current,
            self.head_behavior,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same change to every tensor."""
        names = [name for name in self.__dataclass_fields__ if getattr(self, name) is not None]
        return replace(self, **{name: change(getattr(self, name)) for name in names})

    def changed(self, **fields: Any) -> Batch:
        return replace(self, **fields)

    def rows(self, index: Tensor) -> Batch:
        return self.map(lambda tensor: tensor[index])


@dataclass(frozen=True)
class Run:
    loss: Tensor
    grad: Tensor
    entropy_grad: Tensor
    statistics: Metrics

    @property
    def metrics(self) -> dict[str, float]:
        return self.statistics.finalize()


class Laboratory:
    Batch = Batch
    names = NAMES

    @staticmethod
    def in_turn(name: str, cases: Sequence[Any]) -> Any:
        """One of several cases: the presets take turns with what is the same in each of them."""
        return cases[NAMES.index(name) % len(cases)]

    @staticmethod
    def objective(name: str, **overrides: Any) -> Objective:
        """`trimtab.objective`, with the names of `FORMS` too."""
        preset, keywords = FORMS.get(name, (name, {}))
        return objective(preset, **keywords, **overrides)

    @staticmethod
    def run(obj: Objective, batch: Batch, state: State | None = None) -> Run:
        """Loss and gradients of one call."""
        current = batch.current.clone().requires_grad_()
        entropy = batch.entropy.clone().requires_grad_()
        out = obj(batch.changed(current=current, entropy=entropy).logps(), batch.advantage, state=state)
        out.loss.backward()
        grads = [x.grad if x.grad is not None else torch.zeros_like(x) for x in (current, entropy)]
        assert current.grad is not None
        return Run(out.loss.detach(), *grads, out.metrics)

    @staticmethod
    def prepare(obj: Objective, batch: Batch) -> State:
        """`prepare` with exactly the tensors it declares to need."""
        absent = {name: None for name in ("current", "proximal") if name not in obj.prepare_needs}
        return obj.prepare(replace(batch.logps(), **absent), batch.advantage)

    @staticmethod
    def variants(name: str) -> list[Objective]:
        """The preset, also with everything that spans an update or adds a term; and its weight at another level."""
        extra: dict[str, Any] = {"kl": "unbiased", "kl_coef": 0.3, "entropy_coef": 0.2}
        result = [Laboratory.objective(name)]
        if result[0].rejects:
            extra["denominator"] = "kept"
        result.append(Laboratory.objective(name, **extra))
        weight = result[0].weight
        if weight is not None:
            level = Laboratory.in_turn(name, LEVELS)
            result.append(replace(result[0], weight=replace(weight, level=level, normalize=True)))
        return result

    @staticmethod
    def scale(obj: Objective, mask: Tensor) -> Tensor:
        """1/D of every token, written out again, for a batch that is the whole update."""
        lengths = mask.sum(1, keepdim=True).clamp(min=1).double()
        count = mask.shape[0]
        return {
            "token-mean": torch.ones_like(lengths) / mask.sum().clamp(min=1),
            "seq-mean-token-mean": 1 / (count * lengths),
            "seq-mean-token-sum": torch.ones_like(lengths) / count,
            "constant": torch.ones_like(lengths) / (count * (obj.aggregation.length_max or 1)),
            "trained-mean-token-sum": torch.ones_like(lengths) / mask.any(1).sum().clamp(min=1),
        }[obj.aggregation.kind].expand(mask.shape)


@pytest.fixture(scope="session")
def lab() -> Laboratory:
    return Laboratory()
