"""Where Trimtab agrees with newer files of TRL and Miles: FlashREINFORCE and score centering."""

from __future__ import annotations

import torch
from tests.parity.conftest import Given, Peer
from tests.support.named_cases import in_one_test
from torch import Tensor

import trimtab
from trimtab.objectives import Objective

THRESHOLDS = (0.003, 0.02)
CENTERED: dict[str, Objective] = {
    "none": trimtab.objective("composed", surrogate={"kind": "log-prob"}, centering=True),
    "tis-2": trimtab.objective("score-centering", ceiling=2.0),
}


def test_no_frozen_case_is_left_out(newer):
    flash = {f"{peer}/flash-{delta:g}" for peer in ("miles", "trl") for delta in THRESHOLDS}
    assert newer.cases == flash | {f"miles/centering-{case}" for case in CENTERED}


@in_one_test("delta", THRESHOLDS)
def test_flash_reinforce(newer, given, close, close32, delta):
    """Miles computes its weights in float32; TRL all in float64."""
    loss, gradient = given.run(trimtab.objective("flash-reinforce", divergence_max=delta))
    for peer, compare in (("trl", close), ("miles", close32)):
        compare(loss, newer.scalar(f"{peer}/flash-{delta:g}", given.name, "loss"))
        compare(gradient, newer.tensor(f"{peer}/flash-{delta:g}", given.name, "gradient"))


@in_one_test("case", CENTERED)
def test_score_centering(newer, given, close, case):
    loss, gradient, head_gradient = centered(newer, given, case)
    name = f"miles/centering-{case}"
    close(loss, newer.scalar(name, given.name, "loss"))
    close(gradient, newer.tensor(name, given.name, "gradient"))
    close(head_gradient, newer.tensor(name, given.name, "head_gradient"))


def centered(newer: Peer, given: Given, case: str) -> tuple[float, Tensor, Tensor]:
    """The loss, and its gradients in the log-probs of the sampled tokens and of the head."""
    name = f"miles/centering-{case}"
    head, behavior = (newer.tensor(name, given.name, key).to(given.dtype) for key in ("head_current", "head_behavior"))
    current, head = given.current.requires_grad_(), head.requires_grad_()
    logps = given.logps(current, head_current=head, head_behavior=behavior)
    loss = CENTERED[case](logps, given.advantage).loss
    return loss.item(), *torch.autograd.grad(loss, [current, head])
