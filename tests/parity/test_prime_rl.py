"""Where Trimtab and prime-rl agree: its `ipo` loss and its DPPO, without the squared log-ratio that both add."""

from __future__ import annotations

from tests.support.named_cases import in_one_test

import trimtab
from trimtab.objectives import Objective

SURROGATE = {"kind": "unclipped"}  # prime-rl does not cap the ratio

LOSSES: dict[str, Objective] = {
    "ipo-0.3": trimtab.objective("ipo"),
    "ipo-0.05": trimtab.objective("ipo", divergence_max=0.05),
    "default-0.2": trimtab.objective("dppo", divergence_max=0.2, surrogate=SURROGATE),
    "default-0.05": trimtab.objective("dppo", divergence_max=0.05, surrogate=SURROGATE),
}


def test_no_frozen_case_is_left_out(prime_rl):
    assert prime_rl.cases == set(LOSSES)


@in_one_test("case", LOSSES)
def test_loss_and_gradient(prime_rl, given, case):
    given.compare(LOSSES[case], prime_rl, case)
