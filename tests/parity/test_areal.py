"""Where Trimtab and AReaL agree: A-3PO, for tokens of age 1 and more. Age 0 is a deliberate difference."""

from __future__ import annotations

import torch
from tests.support.named_cases import in_one_test
from torch import Tensor

import trimtab

AGES = {"age-1": 1, "age-2": 2, "age-7": 7}
CASES = (*AGES, "mixed")
A3PO = trimtab.objective("a3po")


def ages_of(case: str, mask: Tensor) -> Tensor:
    """The ages of a frozen case, as in tools/parity/from_areal.py."""
    columns = torch.arange(mask.shape[1]).expand(mask.shape)
    return 1 + columns % 4 if case == "mixed" else torch.full_like(columns, AGES[case])


def test_no_frozen_case_is_left_out(areal):
    assert areal.cases == {*CASES, "fresh", "unweighted"}  # the last two: test_differences.py


@in_one_test("case", CASES)
def test_gradient(areal, given, close, case):
    _, gradient = given.run(A3PO, age=ages_of(case, given.mask))
    close(gradient, areal.tensor(case, given.name, "gradient"))


def test_the_loss_at_age_one(areal, given, close):
    close(given.run(A3PO, age=ages_of("age-1", given.mask))[0], areal.scalar("age-1", given.name, "loss"))


@in_one_test("case", CASES)
def test_losses_differ_by_the_constants_of_clipped_tokens(areal, given, close, case):
    """Outside the band with edge (1 +- .2)^d ours is that edge times A, AReaL's w^((d-1)/d) (1 +- .2) A: without
    gradient both."""
    age = ages_of(case, given.mask)
    log = torch.where(given.mask, given.current - given.behavior, 0.0)
    low, high = (age * torch.tensor(bound, dtype=given.dtype).log() for bound in (0.8, 1.2))
    below, above = (given.advantage < 0) & (log < low), (given.advantage > 0) & (log > high)
    edge = torch.where(below, low, high)
    theirs = (log * (age - 1) / age).exp() * (edge / age).exp()
    gap = torch.where(given.mask & (below | above), (edge.exp() - theirs) * given.advantage, 0.0)
    assert gap.count_nonzero() > 0 or case in ("age-1", "age-7") or given.name == "mild"
    loss, _ = given.run(A3PO, age=age)
    close(loss + (gap.sum() / given.mask.sum()).item(), areal.scalar(case, given.name, "loss"))
