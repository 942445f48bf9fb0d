"""Deliberate differences. Each test shows what the peer does, what we do instead, and that the difference is the whole
of it: where a setting of ours gives the peer's number, it is reproduced. docs/reference-frameworks.md has the table."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.named_cases import in_one_test

import trimtab
from trimtab import Band, Divergence, Weight
from trimtab.objectives import KL, Aggregation, Clipped, Objective, Ratio

ASYMMETRIC = (0.99, 1.001)


def test_docs_list_exactly_these_differences():
    here = set(re.findall(r"^def (test_\w+)", Path(__file__).read_text(), re.MULTILINE))
    page = (Path(__file__).parents[2] / "docs/reference-frameworks.md").read_text()
    listed = re.findall(r"`(test_\w+)` \|$", page, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert here - {"test_docs_list_exactly_these_differences"} == set(listed)


# verl: rejection


@pytest.mark.parametrize(("option", "level"), [("token_k1", "token"), ("seq_mean_k1", "geometric")])
def test_verl_bounds_the_inverse_ratio(verl, load, option, level):
    """Rows with every ratio at 0.9995, 1.0005, 0.995, 1.005 under [0.99, 1.001].

    verl compares -log rho with the logs of its bounds, so it keeps rho in [1/1.001, 1/0.99]: 0.995 goes, 1.005 stays.
    """
    given = load("bounds")
    theirs = verl.tensor(f"rejection/asymmetric/{option}", "bounds", "keep")
    assert theirs.all(dim=1).tolist() == [True, True, False, True]
    ours = given.correct(Band(level, *ASYMMETRIC)).keep
    assert ours.all(dim=1).tolist() == [True, True, True, False]
    inverted = given.correct(Band(level, 1 / ASYMMETRIC[1], 1 / ASYMMETRIC[0])).keep
    assert torch.equal(inverted, theirs)


GEOMETRIC = (Band("geometric", 1 / 1.05, 1.05),)


@in_one_test("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@in_one_test("batch", ["heavy", "ragged"])
def test_verl_drops_rejected_tokens_from_the_denominator(verl, load, close64, aggregation, batch):
    """verl rejects by overwriting the response mask, so rejecting more makes the step of what is left larger."""
    given = load(batch)
    base = replace(trimtab.objective("grpo", clip_dual=3.0), masks=GEOMETRIC)
    case = f"loss/rejected/{aggregation}"
    kept, gradient = given.run(replace(base, aggregation=Aggregation(aggregation, denominator="kept")))
    close64(kept, verl.scalar(case, batch, "loss"))
    close64(gradient, verl.tensor(case, batch, "gradient"))
    _, original = given.run(replace(base, aggregation=Aggregation(aggregation)))
    assert original.norm() < 0.99 * gradient.norm()


def test_verl_returns_nan_when_everything_is_rejected(verl, load):
    """Its token-mean divides by the tokens left, and its sequence means by the sequences left: 0 / 0."""
    given = load("heavy")
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        assert math.isnan(verl.scalar(f"loss/all-rejected/{aggregation}", "heavy", "loss"))
        objective = replace(
            trimtab.objective("grpo"),
            masks=(Band("geometric", 1 / 1.0001, 1.0001),),
            aggregation=Aggregation(aggregation, denominator="kept"),
        )
        loss, gradient = given.run(objective)
        assert loss == 0.0
        assert gradient.count_nonzero() == 0
        assert objective(given.logps(), given.advantage).metrics.finalize()["batch/empty"] == 1.0


# verl: empty rows, ESS


@in_one_test("aggregation", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_verl_leaves_empty_rows_out_of_the_sequence_count(verl, load, close64, aggregation):
    """Four rows, one without a trained token: verl divides by 3 (unless told the global batch size), we by 4."""
    objective = replace(trimtab.objective("grpo", clip_dual=3.0), aggregation=Aggregation(aggregation))
    loss, gradient = load("empty").run(objective)
    close64(loss * 4 / 3, verl.scalar(f"loss/vanilla/{aggregation}", "empty", "loss"))
    close64(gradient * 4 / 3, verl.tensor(f"loss/vanilla/{aggregation}", "empty", "gradient"))


def test_verl_counts_empty_rows_as_perfect_matches_in_its_metrics(verl, load, close64):
    """A row without a trained token has ratio 1 to verl: chi2 and the perplexity ratio are pulled toward agreement."""
    given = load("empty")
    ours = trimtab.mismatch(given.proximal, given.behavior, given.mask).finalize()
    assert ours["sequences"] == 3
    close64(ours["chi2_seq"] * 3 / 4, verl.scalar("metrics", "empty", "chi2_seq"))
    close64((3 * ours["ppl_ratio"] + 1) / 4, verl.scalar("metrics", "empty", "ppl_ratio"))


@in_one_test("case", ["token-2", "token-1.2"])
def test_verl_measures_ess_after_truncation(verl, load, close64, case):
    """Truncation removes exactly the weights that make an effective sample size small."""
    given = load("heavy")
    weight = Weight("token", "truncate", max=float(case.removeprefix("token-")))
    corrected = given.correct(weight=weight)
    bounded = corrected.weight[given.mask]
    theirs = verl.scalar(f"weights/{case}", "heavy", "rollout_is_eff_sample_size")
    close64(bounded.sum().square() / (bounded.numel() * bounded.square().sum()), theirs)
    assert corrected.metrics.finalize()["ess_token"] < theirs


def test_verl_divides_by_zero_when_no_weight_is_left(verl, load):
    raised = [name for name in ("mild", "heavy", "ragged") if verl.raised("weights/sequence-icepop-0.5-2", name)]
    assert raised == ["heavy"]
    given = load("heavy")
    corrected = given.correct(weight=Weight("sequence", "mask", 0.5, 2.0))
    assert corrected.weight.count_nonzero() == 0
    assert corrected.metrics.finalize()["reject/tokens"] == 1.0
    assert 0 < corrected.metrics.finalize()["ess_seq"] < 1


# verl: losses


def test_verl_clips_doubly_unless_the_bound_is_out_of_reach(verl, load, close64):
    """`clip_ratio_c` is 3 by default and cannot be switched off; our `clip_dual` is off unless set."""
    given = load("heavy")
    theirs = verl.scalar("loss/vanilla/token-mean", "heavy", "loss")
    close64(given.run(trimtab.objective("dapo", clip_high=0.2, clip_dual=3.0))[0], theirs)
    assert given.run(trimtab.objective("dapo", clip_high=0.2))[0] > 1.01 * theirs


def test_verl_aggregates_gspo_over_tokens(verl, load, close64):
    """Under its actor's default `loss_agg_mode` a long response weighs more; the paper averages over sequences."""
    given = load("ragged")
    theirs = verl.scalar("loss/gspo/token-mean", "ragged", "loss")
    close64(given.run(trimtab.objective("gspo", aggregation="token-mean"))[0], theirs)
    assert given.run(trimtab.objective("gspo"))[0] != pytest.approx(theirs, rel=0.05)


def test_verl_clips_cispo_from_both_sides(verl, load, close64):
    """verl reuses PPO's 0.2 on both sides; CISPO has no floor, and a ceiling in units of the ratio (5)."""
    given = load("heavy")
    theirs = verl.scalar("loss/cispo", "heavy", "loss")
    ratio = torch.where(given.mask, (given.current - given.proximal).exp(), 0.0)
    two_sided = torch.where(given.mask, -ratio.clamp(0.8, 1.2) * given.advantage * given.current, 0.0)
    close64(two_sided.sum() / given.mask.sum(), theirs)
    assert given.run(trimtab.objective("cispo"))[0] != pytest.approx(theirs, rel=0.05)


def test_verl_caps_k3_at_ten(verl, load, close64):
    """A policy 4 nats from the reference has k3 = e^4 - 5 = 49.6; capped, its gradient is gone when needed most."""
    given = load("empty")
    assert verl.scalar("kl/k3-far", "empty", "loss") == pytest.approx(10.0)
    assert verl.tensor("kl/k3-far", "empty", "gradient").count_nonzero() == 0
    objective = Objective("kl alone", Ratio(), Clipped(), kl=KL("k3", 1.0))
    loss, gradient = given.run(objective, advantage=torch.zeros(4, 1).double(), reference=given.current + 4.0)
    close64(loss, math.exp(4.0) - 5.0)
    assert (gradient[given.mask] < 0).all()


def test_verl_gives_a_group_of_one_its_raw_reward(verl, load):
    """Nothing to compare with is no signal: we give 0, verl the reward itself (mean 0, std 1)."""
    given = load("empty")
    ours = trimtab.advantages("grpo", given.rewards, torch.tensor([0, 0, 0, 1]))
    theirs = verl.tensor("advantage/grpo-alone", "empty", "advantages")
    assert theirs[3].item() == pytest.approx(given.rewards[3].item(), abs=1e-5)
    assert given.rewards[3] != 0
    assert ours[3].item() == 0.0
    torch.testing.assert_close(ours[:3], theirs[:3], rtol=1e-6, atol=1e-6)


@in_one_test("turns", ["single", "multi"])
def test_verl_can_center_the_last_response_by_itself(verl, load, close64, turns):
    """Where one response of a group is left, `handle_zero_tail=False` takes that response's own return as baseline:
    its advantage is 0 there. With the default it is the return itself, and so it is with us."""
    for name in ("mild",) if turns == "single" else ("mild", "ragged"):
        given = load(name)
        theirs = verl.tensor(f"advantage/optimal-token/{turns}/own-tail", name, "advantages")
        ours = given.token_advantages()
        place = torch.where(given.mask, given.mask.cumsum(1), 0)
        lengths = given.mask.sum(1).view(-1, 4)
        second = lengths.sort(dim=1).values[:, -2:-1].expand(-1, 4).reshape(-1, 1)
        tail = place > second
        assert tail.any()
        assert torch.equal(ours[tail], given.rewards[:, None].expand_as(ours)[tail])
        assert theirs[tail].abs().max() < 1e-6 < ours[tail].abs().max()
        close64(torch.where(tail, 0.0, ours), torch.where(tail, 0.0, theirs))


# TRL


def test_trl_adds_1e4_to_the_standard_deviation(trl, load, close64):
    """1e-6 is the common choice (verl); both use n - 1."""
    for name in ("mild", "ragged"):
        given = load(name)
        theirs = trl.tensor("advantage/group", name, "advantages")
        ours = trimtab.advantages("grpo", given.rewards, given.groups)
        std = given.rewards.view(-1, 4).std(dim=1).repeat_interleave(4)[:, None]
        close64(ours * (std + 1e-6) / (std + 1e-4), theirs)
        assert (ours - theirs).abs().max() > 1e-5


def test_trl_delta_also_caps_rising_tokens(trl, load, close64):
    """delta = 1.1 < 1 + epsilon_high caps min(r, delta) for A > 0 too; a dual clip acts on A < 0 only.

    From delta >= 1 + epsilon_high on both are the same (test_trl.py, delta-1.5).
    """
    given = load("heavy")
    theirs = trl.scalar("loss/delta-1.1", "heavy", "loss")
    ratio = torch.where(given.mask, (given.current - given.proximal).exp(), 1.0)
    term = torch.minimum(ratio.clamp(max=1.1) * given.advantage, ratio.clamp(0.8, 1.2) * given.advantage)
    lengths = given.mask.sum(dim=1, keepdim=True)
    close64(-(torch.where(given.mask, term, 0.0) / lengths).sum() / len(lengths), theirs)
    assert given.run(trimtab.objective("grpo", clip_dual=1.1))[0] != pytest.approx(theirs, rel=1e-3)


def test_trl_averages_entropy_over_tokens_whatever_the_loss(trl, load, close64):
    """Ours uses one aggregation for policy, KL and entropy, so that their balance does not depend on lengths."""
    given = load("ragged")
    bonus = 0.01 * torch.where(given.mask, given.entropy, 0.0).sum() / given.mask.sum()
    policy, _ = given.run(trimtab.objective("grpo"))
    close64(policy - bonus, trl.scalar("loss/entropy-grpo", "ragged", "loss"))
    with_entropy, _ = given.run(trimtab.objective("grpo", entropy_coef=0.01))
    assert with_entropy != pytest.approx(trl.scalar("loss/entropy-grpo", "ragged", "loss"), rel=1e-3)


@in_one_test("peer", ["trl", "miles"])
def test_peers_weigh_the_unbiased_kl_against_the_proximal_policy(request, peer, load):
    """TRL and Miles take q = pi/pi_old. Its samples are the sampler's: only pi/mu gives grad KL(pi||pi_ref)."""
    frozen, given = request.getfixturevalue(peer), load("ragged")
    case, key, shared = {"trl": ("loss/kl-corrected", "kl", 0.04), "miles": ("kl/unbiased", "loss", 1.0)}[peer]
    theirs = frozen.scalar(case, "ragged", key)
    objective = trimtab.objective("dapo", clip_high=0.2, kl="unbiased", kl_coef=shared)
    ours = objective(given.logps(), given.advantage).metrics.finalize()["kl/mean"]
    assert ours != pytest.approx(theirs, rel=1e-3)
    as_they_do = given.logps(behavior=given.proximal)
    result = objective(as_they_do, given.advantage).metrics.finalize()["kl/mean"]
    assert result == pytest.approx(theirs, rel=1e-5)  # Miles rounds to float32


def test_trl_trains_tokens_the_sampler_did_not_score(trl, load):
    """A NaN from the sampler becomes ratio 1 in TRL. To us it is bad data: the row is named, and the loss is NaN."""
    assert trl.tensor("importance/unscored", "mild", "ratio")[0, 0].item() == 1.0
    given = load("mild")
    behavior = given.behavior.clone()
    behavior[0, 0] = torch.nan
    good = trimtab.corrections.finite_rows(given.mask, behavior, given.proximal)
    assert good[:, 0].tolist() == [False] + [True] * 7
    loss = trimtab.objective("token-tis")(given.logps(behavior=behavior), given.advantage).loss
    assert loss.isnan()


def test_dr_grpo_advantages_come_with_the_method(load):
    """In TRL and verl the constant denominator and the undivided advantage are two settings; the preset has both."""
    objective = trimtab.objective("dr-grpo")
    assert objective.advantage == "dr-grpo"
    assert objective.aggregation.kind == "constant"
    given = load("mild")
    centred = trimtab.advantages(objective.advantage, given.rewards, given.groups)
    assert centred.view(-1, 4).sum(dim=1).abs().max() < 1e-12


# Miles


def test_miles_refuses_to_normalize_geometric_weights(miles, load, close64):
    """Its blog recommends it, its code raises. A geometric weight is one number a sequence: average over sequences."""
    assert miles.raised("mis/geometric-clip-normalized", "mild") == "ValueError: Unsupported tis_level: geometric"
    given = load("mild")
    plain = given.correct(weight=Weight("geometric", "clip", 0.99, 1.01)).weight
    normal = given.correct(weight=Weight("geometric", "clip", 0.99, 1.01, normalize=True)).weight
    close64(miles.tensor("mis/geometric-clip-0.99-1.01", "mild", "weights"), plain)
    close64(normal, plain / plain[:, 0].mean())
    close64(normal[:, 0].mean(), 1.0)


def test_miles_judges_opsm_by_the_recomputed_policy(miles, load):
    """DeepSeek-V3.2 compares with what the inference engine returned; against pi_old the mismatch is invisible."""
    changed = 0
    for name in ("mild", "heavy", "ragged"):
        given = load(name)
        ours = given.correct(trimtab.OPSM(0.01), current=given.current, advantage=given.advantage).keep
        changed += int((ours != (miles.tensor("opsm/proximal", name, "keep") & given.mask)).any(dim=1).sum())
        against_proximal = trimtab.correct(
            given.proximal,
            given.proximal,
            given.mask,
            masks=[trimtab.OPSM(0.01)],
            current=given.current,
            advantage=given.advantage,
        )
        assert torch.equal(against_proximal.keep, miles.tensor("opsm/proximal", name, "keep") & given.mask)
    assert changed > 0


def test_miles_averages_ess_over_samples(miles, load, close64):
    """A mean of per-sample ESS hides one bad sample, and that of a single token is always 1; ours is of the batch."""
    given = load("ragged")
    parts = [
        trimtab.mismatch(given.current[i : i + 1], given.proximal[i : i + 1], given.mask[i : i + 1]).finalize()
        for i in range(len(given.mask))
    ]
    tokens = sum(part["tokens"] for part in parts)
    theirs = miles.scalar("ess", "ragged", "ess")
    close64(sum(part["ess_token"] * part["tokens"] for part in parts) / tokens, theirs)
    whole = trimtab.mismatch(given.current, given.proximal, given.mask).finalize()["ess_token"]
    assert whole < theirs


def test_miles_averages_chi2_over_sequences(miles, load, close64):
    """Its token chi2 is a mean per sample, then over samples: a short response weighs as much as a long one."""
    given = load("ragged")
    per_sequence = miles.tensor("mis/token-truncate-2", "ragged", "chi2_token")[:, 0]
    lengths = given.mask.sum(dim=1)
    ours = trimtab.mismatch(given.proximal, given.behavior, given.mask).finalize()["chi2_token"]
    close64((per_sequence * lengths).sum() / lengths.sum(), ours)
    assert per_sequence.mean().item() != pytest.approx(ours, rel=0.02)


def test_trust_region_masks_name_the_policy_they_compare(verl, load):
    """TRM's paper compares the current policy with the sampler; verl and our `k3-mask` compare pi_old with it."""
    given = load("ragged")
    proximal = given.correct(Divergence("k3", "mean", 0.01)).keep
    assert torch.equal(proximal, verl.tensor("rejection/seq_mean_k3", "ragged", "keep"))
    current = trimtab.correct(given.current, given.behavior, given.mask, masks=[Divergence("k3", "mean", 0.01)]).keep
    assert not torch.equal(current, proximal)
    assert trimtab.objective("k3-mask").masks == (Divergence("k3", "mean", 0.01),)


# AReaL


def test_areal_clips_tokens_of_the_current_policy(areal, load, close64):
    """At age 0 the text of A-3PO gives the proximal policy no weight on the sampler: the ratio to it is 1 and nothing
    is clipped, as with us. AReaL's code takes the sampler for the proximal policy, as at age 1."""
    for name in ("mild", "heavy", "ragged"):
        given = load(name)
        theirs = areal.tensor("fresh", name, "gradient")
        _, ours = given.run(trimtab.objective("a3po"), age=torch.zeros_like(given.mask, dtype=torch.long))
        _, older = given.run(trimtab.objective("a3po"), age=torch.ones_like(given.mask, dtype=torch.long))
        _, unclipped = given.run(trimtab.objective("token-bypass", clip_low=1.0, clip_high=1e6))
        close64(older, theirs)
        close64(ours, unclipped)
        assert (ours - theirs).abs().max() > 0 or name == "mild"


def test_areal_weighs_by_proximal_over_behavior_only_when_told(areal, load, close64):
    """Without `rejection_sampling` its decoupled loss lacks the weight w^((d-1)/d): tokens of age 2 and more are then
    trained by w^(1/d), not by the ratio to the policy that sampled them."""
    for name in ("mild", "heavy", "ragged"):
        given = load(name)
        age = 1 + torch.arange(given.mask.shape[1]).expand(given.mask.shape) % 4
        _, ours = given.run(trimtab.objective("a3po"), age=age)
        theirs = areal.tensor("unweighted", name, "gradient")
        log = torch.where(given.mask, given.current - given.behavior, 0.0)
        close64(ours / (log * (age - 1) / age).exp(), theirs)
        close64(ours[:, ::4], theirs[:, ::4])  # age 1
        assert (ours - theirs).abs().max() > 0.01 * theirs.abs().max()
