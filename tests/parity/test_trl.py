"""Where Trimtab and TRL's `GRPOTrainer` agree: loss types, delta, KL, off-policy mask, sampling correction."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.support.named_cases import in_one_test

import trimtab
from trimtab import OPSM, Weight
from trimtab.objectives import Objective

IMPORTANCE = {
    "token_truncate-2": Weight("token", "truncate", max=2.0),
    "token_truncate-0.9-1.2": Weight("token", "clip", 0.9, 1.2),
    "token_mask-0.5-2": Weight("token", "mask", 0.5, 2.0),
    "sequence_truncate-3": Weight("sequence", "truncate", max=3.0),
    "sequence_mask-3": Weight("sequence", "mask", 0.0, 3.0),
}

LOSSES: dict[str, Objective] = {
    "grpo": trimtab.objective("grpo"),
    "grpo-0.1-0.28": trimtab.objective("grpo", clip_low=0.1, clip_high=0.28),
    "bnpo": trimtab.objective("dapo", clip_high=0.2),
    "dapo": trimtab.objective("dapo"),
    "cispo": trimtab.objective("cispo"),
    "cispo-1.1": trimtab.objective("cispo", ceiling=1.1),
    "delta-1.5": trimtab.objective("grpo", clip_dual=1.5),
    "gspo": trimtab.objective("gspo"),
    "kl": trimtab.objective("dapo", clip_high=0.2, kl_coef=0.04),
    "kl-corrected": trimtab.objective("dapo", clip_high=0.2, kl="unbiased", kl_coef=0.04),
    "opsm-0.05": trimtab.objective("opsm"),
    "sapo": trimtab.objective("sapo"),
    "sapo-0.7-1.3": trimtab.objective("sapo", tau_positive=0.7, tau_negative=1.3),
    # TRL's product is over π_old; the sampler's mismatch enters it as a weight per token.
    "vespo": trimtab.objective("vespo", ratio={"level": "sequence"}),
    "entropy": trimtab.objective("dapo", clip_high=0.2, entropy_coef=0.01),
    "importance/token_truncate-2": trimtab.objective("token-tis"),
    "importance/token_truncate-0.9-1.2": replace(
        trimtab.objective("token-tis"), weight=IMPORTANCE["token_truncate-0.9-1.2"]
    ),
    "importance/token_mask-0.5-2": trimtab.objective("icepop", weight_max=2.0, aggregation="token-mean"),
    "importance/sequence_truncate-3": trimtab.objective("seq-tis", weight_max=3.0),
    "importance/sequence_mask-3": trimtab.objective("seq-mis", weight_max=3.0),
}

DIFFERENT = {"loss/delta-1.1", "loss/entropy-grpo", "advantage/group", "importance/unscored"}


def test_no_frozen_case_is_left_out(trl):
    tested = {f"loss/{case}" for case in LOSSES} | {f"importance/{case}" for case in IMPORTANCE}
    tested |= {"loss/dr_grpo", "advantage/none"} | {f"off_policy_mask/{delta}" for delta in (0.01, 0.05, 0.1)}
    assert trl.cases == tested | DIFFERENT


def sampler(case: str, given) -> dict[str, torch.Tensor]:
    """TRL weighs its corrected KL with pi/pi_old: ours is the same where pi_old is what was sampled from."""
    return {"behavior": given.proximal} if case == "kl-corrected" else {}


@in_one_test("case", LOSSES)
def test_loss_and_gradient(trl, given, case):
    given.compare(LOSSES[case], trl, f"loss/{case}", **sampler(case, given))


def test_dr_grpo_divides_by_sequences_times_the_length_limit(trl, given):
    given.compare(trimtab.objective("dr-grpo", length_max=given.mask.shape[1]), trl, "loss/dr_grpo")


@in_one_test("case", ["grpo", "dapo", "dr_grpo"])
def test_rows_without_a_trained_token_count_as_sequences(trl, load, case):
    given = load("empty")
    objective = LOSSES.get(case) or trimtab.objective("dr-grpo", length_max=given.mask.shape[1])
    given.compare(objective, trl, f"loss/{case}")


@in_one_test("case", ["grpo", "dapo"])
def test_clip_fractions(trl, given, close, case):
    result = LOSSES[case](given.logps(), given.advantage).metrics.finalize()
    close(result["clip/low"], trl.scalar(f"loss/{case}", given.name, "clip_ratio/low_mean"))
    close(result["clip/high"], trl.scalar(f"loss/{case}", given.name, "clip_ratio/high_mean"))


def test_kl_and_entropy_means(trl, given, close):
    for case in ("kl", "kl-corrected"):
        result = LOSSES[case](given.logps(**sampler(case, given)), given.advantage).metrics.finalize()
        close(result["kl/mean"], trl.scalar(f"loss/{case}", given.name, "kl"))
    close(result["entropy/mean"], trl.scalar("loss/kl", given.name, "entropy"))


@in_one_test("case", IMPORTANCE)
def test_importance_ratio(trl, given, close, case):
    corrected = given.correct(weight=IMPORTANCE[case])
    close(corrected.weight, trl.tensor(f"importance/{case}", given.name, "ratio"))


@in_one_test("delta", [0.01, 0.05, 0.1])
def test_off_policy_sequence_mask(trl, given, delta):
    corrected = given.correct(OPSM(delta), current=given.current, advantage=given.advantage)
    theirs = trl.tensor(f"off_policy_mask/{delta}", given.name, "keep")
    assert torch.equal(corrected.keep, theirs & given.mask)


def test_centred_advantages(trl, given, close):
    ours = trimtab.advantages("dr-grpo", given.rewards, given.groups)
    close(ours, trl.tensor("advantage/none", given.name, "advantages"))
