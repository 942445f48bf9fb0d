"""Where Trimtab and verl agree: weights, rejection, mismatch metrics, losses with gradients, KL, advantages.

Every frozen case of verl is either here or a deliberate difference (test_differences.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tests.support.named_cases import in_one_test

import trimtab
from trimtab import Band, Divergence, Weight
from trimtab.objectives import KL, Aggregation, Clipped, Objective, Ratio, Reinforce

METRICS = {
    "k1": "kl",
    "k3": "k3_kl",
    "chi2_token": "chi2_token",
    "chi2_seq": "chi2_seq",
    "ppl_ratio": "ppl_ratio",
    "ppl_train": "training_ppl",
}

WEIGHTS = {
    "token-2": Weight("token", "truncate", max=2.0),
    "token-1.2": Weight("token", "truncate", max=1.2),
    "token-1.2-normalized": Weight("token", "truncate", max=1.2, normalize=True),
    "sequence-2": Weight("sequence", "truncate", max=2.0),
    "sequence-10": Weight("sequence", "truncate", max=10.0),
    "sequence-2-normalized": Weight("sequence", "truncate", max=2.0, normalize=True),
    "token-icepop-0.5-5": Weight("token", "mask", 0.5, 5.0),
    "token-icepop-0.9-1.2": Weight("token", "mask", 0.9, 1.2),
    "sequence-icepop-0.5-2": Weight("sequence", "mask", 0.5, 2.0),
}

# Reciprocal bounds: the same for a ratio and its inverse, so that verl's sign does not show.
RULES: dict[str, tuple[Any, ...]] = {
    "token_k1": (Band("token", 1 / 1.2, 1.2),),
    "token_k2": (Divergence("k2", "token", 0.01),),
    "token_k3": (Divergence("k3", "token", 0.01),),
    "seq_sum_k1": (Band("sequence", 0.5, 2.0),),
    "seq_sum_k2": (Divergence("k2", "sum", 0.1),),
    "seq_sum_k3": (Divergence("k3", "sum", 0.1),),
    "seq_mean_k1": (Band("geometric", 1 / 1.01, 1.01),),
    "seq_mean_k2": (Divergence("k2", "mean", 0.01),),
    "seq_mean_k3": (Divergence("k3", "mean", 0.01),),
    "seq_max_k2": (Divergence("k2", "max", 0.05),),
    "seq_max_k3": (Divergence("k3", "max", 0.05),),
    "token_k1,seq_mean_k3": (Band("token", 0.5, 2.0), Divergence("k3", "mean", 0.02)),
}

PPO = trimtab.objective("token-tis", clip_dual=3.0)  # verl's dual clip cannot be switched off
PLAIN = replace(PPO, weight=None)

LOSSES: dict[str, Objective] = {
    "loss/vanilla/token-mean": PLAIN,
    "loss/vanilla/seq-mean-token-mean": replace(PLAIN, aggregation=Aggregation("seq-mean-token-mean")),
    "loss/vanilla/seq-mean-token-sum": replace(PLAIN, aggregation=Aggregation("seq-mean-token-sum")),
    "loss/vanilla/clip-0.1-0.28-dual-3": trimtab.objective("dapo", clip_low=0.1, clip_dual=3.0),
    "loss/vanilla/dual-1.1": trimtab.objective("dapo", clip_high=0.05, clip_dual=1.1),
    "loss/weighted/token-2": PPO,
    "loss/weighted/token-1.2-normalized": replace(PPO, weight=WEIGHTS["token-1.2-normalized"]),
    "loss/weighted/sequence-2": trimtab.objective("seq-tis", clip_dual=3.0),
    "loss/weighted/sequence-2-normalized": trimtab.objective("seq-tis", clip_dual=3.0, normalize=True),
    "loss/weighted/token-icepop-0.9-1.2": trimtab.objective(
        "icepop", weight_min=0.9, weight_max=1.2, clip_dual=3.0, aggregation="token-mean"
    ),
    "loss/gspo": trimtab.objective("gspo"),
    "loss/cispo/ceiling-1.1": trimtab.objective("cispo", ceiling=1.1),
    "loss/bypass/ppo": trimtab.objective("token-bypass", clip_dual=10.0),
    "loss/dppo_tv/0.15": trimtab.objective("dppo"),
    "loss/dppo_tv/0.02": trimtab.objective("dppo", divergence_max=0.02),
    "loss/dppo_kl/0.05": trimtab.objective("dppo-kl"),
    "loss/dppo_kl/0.002": trimtab.objective("dppo-kl", divergence_max=0.002),
    "loss/sapo/0.2": trimtab.objective("sapo"),
    "loss/geo_mean/0.4": trimtab.objective("gmpo"),
    "loss/geo_mean/0.05": trimtab.objective("gmpo", clip_low=0.05, clip_high=0.05),
}

ELSEWHERE = {
    "metrics",
    "kl/k1",
    "kl/k2",
    "kl/k3",
    "advantage/grpo",
    "advantage/dr-grpo",
    "advantage/rloo",
    "advantage/optimal-token/single/zero-tail",
    "advantage/optimal-token/multi/zero-tail",
    "loss/vanilla/seq-mean-token-sum-norm",
    "loss/bypass/reinforce-token-2",
}
DIFFERENT = {
    "rejection/asymmetric/token_k1",
    "rejection/asymmetric/seq_mean_k1",
    "loss/rejected/token-mean",
    "loss/rejected/seq-mean-token-mean",
    "loss/rejected/seq-mean-token-sum",
    "loss/all-rejected/token-mean",
    "loss/all-rejected/seq-mean-token-mean",
    "loss/all-rejected/seq-mean-token-sum",
    "loss/gspo/token-mean",
    "loss/cispo",
    "kl/k3-far",
    "advantage/grpo-alone",
    "advantage/optimal-token/single/own-tail",
    "advantage/optimal-token/multi/own-tail",
}


def test_no_frozen_case_is_left_out(verl):
    tested = {f"weights/{case}" for case in WEIGHTS} | {f"rejection/{case}" for case in RULES} | set(LOSSES)
    assert verl.cases == tested | ELSEWHERE | DIFFERENT


def test_mismatch_metrics(verl, given, close):
    ours = trimtab.mismatch(given.proximal, given.behavior, given.mask).finalize()
    for mine, theirs in METRICS.items():
        close(ours[mine], verl.scalar("metrics", given.name, theirs))


@in_one_test("case", WEIGHTS)
def test_weights(verl, given, close, case):
    corrected = given.correct(weight=WEIGHTS[case])
    assert corrected.weight.requires_grad is False
    if verl.raised(f"weights/{case}", given.name):  # no weight is left, and verl's ESS divides by it
        assert corrected.weight.count_nonzero() == 0
        return
    close(corrected.weight, verl.tensor(f"weights/{case}", given.name, "weights"))


@in_one_test("case", ["token-2", "token-1.2"])
def test_weight_metrics(verl, given, close, case):
    result = given.correct(weight=WEIGHTS[case]).metrics.finalize()
    close(result["weight/mean"], verl.scalar(f"weights/{case}", given.name, "rollout_is_mean"))
    close(result["weight/changed"], verl.scalar(f"weights/{case}", given.name, "rollout_is_ratio_fraction_high"))


@in_one_test("option", RULES)
def test_rejection(verl, given, close, option):
    corrected = given.correct(*RULES[option])
    case = f"rejection/{option}"
    assert torch.equal(corrected.keep, verl.tensor(case, given.name, "keep"))
    result = corrected.metrics.finalize()
    close(result["reject/tokens"], verl.scalar(case, given.name, "rollout_rs_masked_fraction"))
    for rule, name in zip(RULES[option], option.split(","), strict=True):
        close(result[f"reject/{rule.rule}"], verl.scalar(case, given.name, f"rollout_rs_{name}_masked_fraction"))


def test_sequence_rejection_fraction(verl, given, close):
    result = given.correct(*RULES["seq_mean_k3"]).metrics.finalize()
    theirs = verl.scalar("rejection/seq_mean_k3", given.name, "rollout_rs_seq_mean_k3_seq_masked_fraction")
    close(result["reject/sequences"], theirs)


@in_one_test("case", LOSSES)
def test_loss_and_gradient(verl, given, case):
    given.compare(LOSSES[case], verl, case)


def test_constant_denominator_is_sequences_times_horizon(verl, given):
    horizon = given.mask.shape[1]
    objective = trimtab.objective("dr-grpo", clip_dual=3.0, length_max=horizon)
    given.compare(objective, verl, "loss/vanilla/seq-mean-token-sum-norm")


def test_bypass_reinforce_is_a_capped_reinforce_over_the_behavior_policy(verl, given):
    objective = Objective("reinforce", Ratio("token", "behavior"), Reinforce(ceiling=2.0))
    given.compare(objective, verl, "loss/bypass/reinforce-token-2")


@in_one_test("kind", ["k1", "k2", "k3"])
def test_kl_and_gradient(verl, given, kind):
    objective = Objective("kl alone", Ratio(), Clipped(), kl=KL(kind, 1.0))
    given.compare(objective, verl, f"kl/{kind}", advantage=torch.zeros_like(given.advantage))


@in_one_test("kind", ["grpo", "dr-grpo", "rloo"])
def test_advantages(verl, given, close, kind):
    ours = trimtab.advantages(kind, given.rewards, given.groups)
    close(ours, verl.tensor(f"advantage/{kind}", given.name, "advantages"))


@in_one_test("turns", ["single", "multi"])
def test_optimal_token_baseline(verl, given, close, turns):
    """With `handle_zero_tail`, verl's default: a baseline of 0 where one response of the group is left.

    Its function for one turn counts columns, so that it is compared where the mask has no holes.
    """
    if (given.name, turns) == ("ragged", "single"):
        return
    theirs = verl.tensor(f"advantage/optimal-token/{turns}/zero-tail", given.name, "advantages")
    close(given.token_advantages(), theirs)


def test_optimal_token_baseline_with_an_empty_row_and_a_group_of_one(verl, load, close64):
    ours = load("empty").token_advantages(torch.tensor([0, 0, 0, 1]))
    for turns in ("single", "multi"):
        close64(ours, verl.tensor(f"advantage/optimal-token/{turns}/zero-tail", "empty", "advantages"))
