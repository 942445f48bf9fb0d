"""What differs from an objective is named with its figure; a right loss, written otherwise, is equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import trimtab
from trimtab.check_loss.bends import find_bends
from trimtab.check_loss.check import check
from trimtab.check_loss.signatures import of_function
from trimtab.testing import assert_loss


def grpo(
    logps: Tensor,
    old_logps: Tensor,
    mask: Tensor,
    advantages: Tensor,
    num_sequences: int,
    *,
    high: float = 1.2,
    scale: float = 1.0,
    late: int = 0,
    inside: Callable[[Tensor], Tensor] = lambda advantage: advantage,
    kl: Callable[[Tensor], Tensor] | None = None,
    ref_logps: Tensor | None = None,
) -> Tensor:
    """GRPO as it is usually written; the keywords plant a mistake."""
    ratio = torch.where(mask, logps - old_logps.roll(late, 1), 0.0).clamp(-20, 20).exp()
    advantages = inside(advantages)
    loss = -scale * torch.min(ratio * advantages, ratio.clamp(0.8, high) * advantages)
    if kl is not None and ref_logps is not None:
        loss = loss + 0.04 * kl(torch.where(mask, ref_logps - logps, 0.0))
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    return (torch.where(mask, loss, 0.0) / lengths).sum() / num_sequences


def found(loss: Callable[..., Any], name: str = "grpo", **keywords: Any) -> list[tuple[str, str]]:
    answer = check(of_function(loss), trimtab.objective(name, **keywords), spec=name)
    return [(one.kind, one.text) for one in answer.differences]


def planted(**changes: Any) -> Callable[..., Tensor]:
    def loss(
        logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor, advantages: Tensor, num_sequences: int
    ) -> Tensor:
        return grpo(logps, old_logps, mask, advantages, num_sequences, ref_logps=ref_logps, **changes)

    return loss


def test_a_right_loss_is_equal() -> None:
    assert_loss(grpo, "grpo")
    assert_loss(planted(high=1.28), trimtab.objective("grpo", clip_high=0.28))
    k3 = {"kl": lambda d: d.exp() - 1 - d}
    assert_loss(planted(**k3), "grpo", kl="k3", kl_coef=0.04)


@pytest.mark.parametrize(
    ("changes", "kind", "figures"),
    [
        ({"high": 1.28}, "clip", ["A > 0 above 1", "1.28", "1.2"]),
        ({"scale": 0.5}, "scale", ["0.5 times"]),
        ({"scale": -1.0}, "sign", ["rises with the advantage"]),
        ({"inside": torch.abs}, "sign", ["for A < 0"]),
        ({"late": 1}, "alignment", ["one too early or too late"]),
        ({"inside": lambda a: a / (a.abs().mean() + 1e-9)}, "normalized-advantage", ["give 1 times", "not 3"]),
        ({"kl": lambda d: d**2 / 2}, "kl", ["k2 with the coefficient 0.04", "none"]),
    ],
)
def test_a_mistake_is_named_first_with_its_figure(changes: dict[str, Any], kind: str, figures: list[str]) -> None:
    first = found(planted(**changes))[0]
    assert first[0] == kind
    assert [figure for figure in figures if figure not in first[1]] == []


def test_a_weight_with_gradient_is_named() -> None:
    def live(
        current: Tensor, proximal: Tensor, behavior: Tensor, mask: Tensor, advantage: Tensor, tokens: int
    ) -> Tensor:
        ratio = torch.where(mask, current - proximal, 0.0).clamp(-20, 20).exp()
        weight = torch.where(mask, current - behavior, 0.0).clamp(-20, 20).exp().clamp(max=2)
        loss = -weight * torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return torch.where(mask, loss, 0.0).sum() / tokens

    kinds = dict(found(live, "token-tis"))
    assert "2 times as large" in kinds["live-weight"]


def test_what_only_the_whole_update_knows() -> None:
    def of_micro_batch(logps: Tensor, old_logps: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        return grpo(logps, old_logps, mask, advantages, len(mask))

    [(kind, text)] = found(of_micro_batch)
    assert kind == "micro-batches"
    assert "1.67 to 2.5 times" in text  # of five responses, two and three

    def of_width(logps: Tensor, old_logps: Tensor, mask: Tensor, advantages: Tensor, num_sequences: int) -> Tensor:
        mean = grpo(logps, old_logps, mask, advantages * mask.sum(1, keepdim=True), num_sequences)
        return mean / mask.shape[1]

    kind, text = found(of_width)[0]
    assert (kind, "a mean over all positions, padding too, in grpo seq-mean-token-mean" in text) == (
        "denominator",
        True,
    )


def test_padding() -> None:
    def product(logps: Tensor, old_logps: Tensor, mask: Tensor, advantages: Tensor, num_sequences: int) -> Tensor:
        ratio = (logps - old_logps).clamp(-20, 20).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask
        return (loss.sum(1) / mask.sum(1).clamp(min=1)).sum() / num_sequences

    assert [kind for kind, _ in found(product)] == ["nan"]
    assert_loss(product, "grpo", ignore=["nan"])
    with pytest.raises(AssertionError, match="product is not grpo: 1 difference\n\n  nan  NaN in `current` at padding"):
        assert_loss(product, "grpo")


def test_a_difference_that_no_probe_is_made_for_is_found_on_random_batches() -> None:
    def odd(logps: Tensor, old_logps: Tensor, mask: Tensor, advantages: Tensor, num_sequences: int) -> Tensor:
        # Reads whether a response has two neighbors beyond 0.3 nats, as no probe does.
        far = (mask & ((logps - old_logps).detach().abs() > 0.3)).sum(1, keepdim=True) == 2
        return grpo(logps, old_logps, mask, torch.where(far, 0.0, advantages), num_sequences)

    assert [kind for kind, _ in found(odd)] == ["unexplained"]


def test_bends_behind_bends_and_the_exponents_between() -> None:
    def curve(x: Tensor) -> Tensor:
        ratio = x.exp()
        return torch.where(x > 1.0, 0.0, torch.where(x > 0.5, 2.0, ratio.clamp(max=1.5)))

    points = torch.cat([torch.tensor([1e-4]), 0.03 * torch.arange(1, 100)]).double()
    bends = find_bends(curve, points, curve(points))
    assert [bend.kind for bend in bends] == ["constant", "constant", "zero"]
    assert [bend.x for bend in bends] == pytest.approx([0.4054651, 0.5, 1.0], abs=1e-6)
    assert find_bends(torch.exp, -points, torch.exp(-points)) == ()
