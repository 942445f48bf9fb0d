"""Where Trimtab and Miles agree: `compute_mis_weights`, built-in corrections, clipped loss, GSPO, OPSM, KL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tests.support.named_cases import in_one_test

import trimtab
from trimtab import Band, Veto, Weight
from trimtab.objectives import KL, Clipped, Objective, Ratio

GEO = Band("geometric", 0.99, 1.001)

MIS: dict[str, tuple[Weight, tuple[Any, ...]]] = {
    "token-truncate-2": (Weight("token", "truncate", max=2.0), ()),
    "token-clip-0.5-2": (Weight("token", "clip", 0.5, 2.0), ()),
    "token-clip-0.9-1.2-normalized": (Weight("token", "clip", 0.9, 1.2, normalize=True), ()),
    "token-mask-0.9-1.2": (Weight("token", "mask", 0.9, 1.2), ()),
    "sequence-truncate-2": (Weight("sequence", "truncate", max=2.0), ()),
    "sequence-truncate-2-normalized": (Weight("sequence", "truncate", max=2.0, normalize=True), ()),
    "sequence-mask-0.5-3": (Weight("sequence", "mask", 0.5, 3.0), ()),
    "geometric-clip-0.99-1.01": (Weight("geometric", "clip", 0.99, 1.01), ()),
    "token-clip-geometric-band-veto": (Weight("token", "clip", 0.5, 2.0), (GEO, Veto(1e-4))),
    "token-truncate-token-band-veto": (Weight("token", "truncate", max=2.0), (Band("token", 0.8, 1.1), Veto(1e-4))),
    "token-truncate-sequence-band": (Weight("token", "truncate", max=2.0), (Band("sequence", 0.5, 3.0),)),
}
BUILT_IN = {"tis-0.5-2": Weight("token", "clip", 0.5, 2.0), "icepop-0.5-2": Weight("token", "mask", 0.5, 2.0)}

LOSSES: dict[str, Objective] = {
    "loss/clipped": trimtab.objective("dapo"),
    "loss/clipped-dual-3": trimtab.objective("dapo", clip_dual=3.0),
    "loss/mis": replace(
        trimtab.objective("geo-mask-token-tis", clip_high=0.28), masks=MIS["token-clip-geometric-band-veto"][1]
    ),
}

OTHER = {"gspo-kl", "opsm/behavior", "kl/k1", "kl/k2", "kl/k3", "kl/unbiased"}
DIFFERENT = {"mis/geometric-clip-normalized", "opsm/proximal", "ess"}


def test_no_frozen_case_is_left_out(miles):
    tested = {f"mis/{case}" for case in MIS} | {f"built-in/{case}" for case in BUILT_IN} | set(LOSSES)
    assert miles.cases == tested | OTHER | DIFFERENT


@in_one_test("case", MIS)
def test_weight_and_mask(miles, given, close, case):
    """Miles' mask mode leaves rejected weights as they are and zeroes its mask: the products are what both train on."""
    weight, masks = MIS[case]
    corrected = given.correct(*masks, weight=weight)
    keep = miles.tensor(f"mis/{case}", given.name, "keep")
    assert torch.equal(corrected.keep, keep)
    close(corrected.weight * corrected.keep, miles.tensor(f"mis/{case}", given.name, "weights") * keep)


def test_asymmetric_geometric_band_bounds_the_ratio(miles, load):
    """0.995 stays and 1.005 goes under [0.99, 1.001]: Miles and we bound the ratio itself."""
    corrected = load("bounds").correct(GEO)
    assert corrected.keep.all(dim=1).tolist() == [True, True, True, False]
    assert torch.equal(corrected.keep, miles.tensor("mis/token-clip-geometric-band-veto", "bounds", "keep"))


@in_one_test("case", BUILT_IN)
def test_built_in_corrections(miles, given, close, case):
    close(given.correct(weight=BUILT_IN[case]).weight, miles.tensor(f"built-in/{case}", given.name, "weights"))


@in_one_test("case", LOSSES)
def test_loss_and_gradient(miles, given, case):
    """`loss/mis` rejects sequences and divides by the original count, as our default does."""
    given.compare(LOSSES[case], miles, case, torch.float32)


@in_one_test("kind", ["k1", "k2", "k3", "unbiased"])
def test_kl_and_gradient(miles, given, kind):
    """Miles was given pi_old as what its unbiased KL weighs against: the sampler, with --use-rollout-logprobs."""
    objective = Objective("kl alone", Ratio(), Clipped(), kl=KL(kind, 1.0))
    sampler = given.proximal if kind == "unbiased" else given.behavior
    zeros = torch.zeros_like(given.advantage)
    given.compare(objective, miles, f"kl/{kind}", torch.float32, advantage=zeros, behavior=sampler)


def test_gspo_ratio(miles, given, close):
    theirs = (-miles.tensor("gspo-kl", given.name, "kl")).exp()
    ratio = trimtab.correct(given.current, given.proximal, given.mask, weight=Weight("geometric", max=1e9)).weight
    close(ratio, torch.where(given.mask, theirs, 0.0))


def test_off_policy_sequence_mask_against_the_sampler(miles, given):
    corrected = given.correct(trimtab.OPSM(0.01), current=given.current, advantage=given.advantage)
    assert torch.equal(corrected.keep, miles.tensor("opsm/behavior", given.name, "keep") & given.mask)


def test_token_means_of_the_mismatch(miles, given, close):
    statistics = trimtab.mismatch(given.proximal, given.behavior, given.mask).finalize()
    for mine, theirs in {"k1": "kl", "k3": "k3_kl"}.items():
        per_token = miles.tensor("mis/token-truncate-2", given.name, theirs)
        close(statistics[mine], per_token[given.mask].mean())
    per_sequence = {
        key: miles.tensor("mis/token-truncate-2", given.name, key)[:, 0] for key in ("ppl_ratio", "chi2_seq")
    }
    close(statistics["ppl_ratio"], per_sequence["ppl_ratio"].mean())
    close(statistics["chi2_seq"], per_sequence["chi2_seq"].mean())
