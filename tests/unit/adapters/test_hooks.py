"""What the adapters refuse, and the small functions that they share."""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.adapter_calls import CALLS, WHOLE
from tests.support.peer_modules import NEMO_RL_LOSS, install_nemo_rl

import trimtab
from trimtab.adapters import areal, nemo_rl, openrlhf, prime_rl, skyrl, slime, tinker, verl_driver
from trimtab.adapters.dump import Dump, rows
from trimtab.adapters.hooks import (
    HOOKS,
    averaged,
    build,
    counted_state,
    dropped_shares,
    hook,
    per_response,
    prefixed_metrics,
    turns_of,
    usable_tokens,
)
from trimtab.adapters.verl_loss import PolicyLoss
from trimtab.errors import TrimtabError, TrimtabWarning
from trimtab.objectives import PolicyLogps, correct, objective, objectives


@pytest.mark.parametrize(
    ("trainer", "name", "keywords", "reason"),
    [
        ("verl", "m2po", {}, "statistics of the whole update"),
        ("prime-rl", "seq-mis", {"denominator": "kept"}, "statistics of the whole update"),
        ("prime-rl", "icepop", {}, "'seq-mean-token-mean', and this trainer's denominators give 'token-mean'"),
        ("trl", "a3po", {}, "it reads age"),
        ("trl", "luffy", {"length_max": 5}, "it reads off_policy .the tokens of external traces."),
        ("skyrl", "grpo", {"kl_coef": 0.1}, "the trainer's own KL and entropy terms"),
        ("verl", "score-centering", {}, "it reads head_behavior"),
        ("tinker", "oapl", {}, "OAPL's regression"),
    ],
)
def test_a_hook_refuses_what_it_cannot_carry(trainer: str, name: str, keywords: dict[str, float], reason: str) -> None:
    with pytest.raises(TrimtabError, match=f"cannot train {name}: .*{reason}"):
        build(trainer, name, keywords)


def test_an_unknown_trainer_and_keywords_beside_an_objective_are_refused() -> None:
    with pytest.raises(TrimtabError, match=r"unknown trainer 'veryl'.*verl"):
        hook("veryl")
    with pytest.raises(TrimtabError, match="clip_low: keywords belong to a name"):
        build("verl", objective("grpo"), {"clip_low": 0.1})


def test_runs_of_the_mask_are_turns() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0, 1], [1, 0, 1, 1, 1, 1, 0, 0]]).bool()
    assert turns_of(mask).tolist() == [[0, 0, 0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 1, 1, 1]]


NAN, CERTAIN, UNSURE = math.nan, math.log(0.995), math.log(0.9)
HOLES = torch.tensor([[-1.0, NAN, -2.0], [-1.0, NAN, -2.0], [-9999.0, -1.0, 0.0], [NAN, -1.0, -1.0]])
HOLES_TRAINER = torch.tensor([[-1.0, CERTAIN, -2.0], [-1.0, UNSURE, -2.0], [NAN, -1.0, 0.0], [UNSURE, -1.0, -1.0]])
HOLES_MASK = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 1, 1]]).bool()


def test_a_token_without_a_log_prob_is_left_out_alone_only_where_the_trainer_is_certain_of_it() -> None:
    kept = usable_tokens(HOLES_MASK, HOLES, HOLES_TRAINER)
    assert kept.tolist() == [[True, False, True], [False] * 3, [False] * 3, [False, True, True]]
    # Of 4 responses 2, of 10 trained tokens 1 + 3 + 2.
    assert dropped_shares(HOLES_MASK, kept) == {"unscored": 0.5, "unscored_tokens": pytest.approx(0.6)}
    nothing = torch.zeros(2, 0, dtype=torch.bool)
    assert dropped_shares(nothing, nothing) == {"unscored": 0.0, "unscored_tokens": 0.0}


def test_corrections_count_tokens_without_a_log_prob_apart_from_rejected_ones() -> None:
    """geo-mask has no weight that could become NaN: it would reject such responses."""
    fields = {"old_log_probs": HOLES_TRAINER, "rollout_log_probs": HOLES, "response_mask": HOLES_MASK.long()}
    add = verl_driver.wrap_correction({"geo-mask": PolicyLoss("geo-mask")}, lambda *_: None)  # type: ignore[arg-type]
    batch, metrics = add(SimpleNamespace(batch=fields), {"rollout_is": "trimtab-geo-mask"})
    assert batch.batch["rollout_is_weights"].tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0], [0, 1, 1]]
    assert metrics["rollout_corr/trimtab/unscored"] == 0.5
    assert metrics["rollout_corr/trimtab/unscored_tokens"] == pytest.approx(0.6)
    assert metrics["rollout_corr/trimtab/reject/tokens"] == 0
    loss, _, values = slime.tis(
        Namespace(trimtab_objective="token-tis", use_tis=True),
        pg_loss=torch.ones(6),
        train_log_probs=list(HOLES_TRAINER[:2]),
        rollout_log_probs=list(HOLES[:2]),
        loss_masks=[torch.ones(3)] * 2,
        response_lengths=[3, 3],
    )
    assert loss.tolist() == [1, 0, 1, 0, 0, 0]
    assert values["trimtab/unscored_tokens"].tolist() == [0, 1, 0, 1, 1, 1]
    assert values["trimtab/reject/tokens"].tolist() == [0] * 6


@pytest.mark.parametrize("trainer", CALLS)
def test_a_token_that_the_sampler_did_not_score_is_left_out_and_counted(
    trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it were not trained; without this, one NaN makes the whole loss NaN."""
    install_nemo_rl(monkeypatch)
    monkeypatch.setattr(slime, "_log_probs", lambda _args, _batch, logits: list(logits))
    old = torch.tensor([[-0.8, -0.7, -1.9], [-1.2, CERTAIN, -1.1]])
    mask, behavior = torch.ones(2, 3).bool(), torch.full((2, 3), -1.0)
    without, holes = mask.clone(), behavior.clone()
    without[1, 1], holes[1, 1] = False, NAN

    def loss(trained: torch.Tensor, sampled: torch.Tensor) -> tuple[float, dict[str, Any]]:
        batch = {"behavior": sampled, "proximal": old, "mask": trained, "advantage": torch.tensor([[1.0], [-2.0]])}
        current = (old - 0.001).requires_grad_()
        value, metrics = CALLS[trainer](batch, current, "token-tis", WHOLE, {})
        # These two divide by the tokens that are left, the others by the trainer's own count.
        return value.item() * (1 if trainer in ("tinker", "areal") else int(trained.sum())), metrics

    value, metrics = loss(mask, holes)
    assert value == pytest.approx(loss(without, behavior)[0], rel=1e-6)
    assert value != pytest.approx(loss(mask, behavior)[0], rel=1e-2)
    counted = [float(value) for name, value in metrics.items() if name.endswith("trimtab/unscored_tokens")]
    assert counted == (
        [] if trainer in ("openrlhf", "areal") else [pytest.approx(1 / 3 if trainer == "prime-rl" else 1 / 6)]
    )


def test_a_fraction_as_count_is_divided_by() -> None:
    """OpenRLHF averages the counts of an update over its steps of accumulation."""
    current = torch.zeros(1, 1, requires_grad=True)
    logps = PolicyLogps(current=current, behavior=None, mask=torch.ones(1, 1).bool(), proximal=torch.zeros(1, 1))
    for kind in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        state = counted_state(0.25, 0.25, like=current)
        assert objective("grpo", aggregation=kind)(logps, torch.ones(1, 1), state=state).loss.item() == -4.0


def test_one_advantage_a_response_where_the_objective_judges_responses() -> None:
    advantage = torch.tensor([[9.0, 0.5, 0.5], [1.0, 1.0, 2.0]])
    first = torch.tensor([[False, True, True], [True, True, False]])
    assert per_response(objective("gspo"), advantage, first).tolist() == [[0.5], [1.0]]
    assert per_response(objective("grpo"), advantage, first) is advantage
    with pytest.raises(TrimtabError, match="gspo needs one advantage a response"):
        per_response(objective("gspo"), advantage, torch.ones(2, 3).bool())
    empty = torch.zeros(2, 0)
    assert per_response(objective("gspo"), empty, empty.bool()).tolist() == [[0.0], [0.0]]


def test_a_foreign_log_gets_no_positions_and_no_means_over_nothing() -> None:
    values = {"clip/low": 0.5, "clip/tenth/1": 0.5, "kl/mean": float("nan")}
    assert prefixed_metrics(values) == {"trimtab/clip/low": 0.5}


def test_every_micro_batch_of_a_trainer_that_averages_gets_the_same_metrics() -> None:
    """Trainers reduce key by key over processes: a key less is a process that waits for ever."""
    built, one = objective("icepop"), torch.zeros(2, 3)
    logged = []
    for mask in (torch.ones(2, 3).bool(), torch.zeros(2, 3).bool()):
        logps = PolicyLogps(current=one, behavior=one, mask=mask, proximal=one)
        logged.append(averaged(built(logps, torch.ones(2, 1)).metrics.finalize()))
    assert logged[0].keys() == logged[1].keys() >= {"trimtab/clip/low", "trimtab/weight/mean", "trimtab/reject/tokens"}
    assert (logged[0]["trimtab/weight/mean"], logged[1]["trimtab/weight/mean"]) == (1.0, 0.0)


def test_each_share_of_a_loss_is_logged_where_a_trainer_averages() -> None:
    ones = torch.ones(2, 3)
    logps = PolicyLogps(-ones, -2 * ones, ones.bool(), proximal=-2 * ones, reference=-ones)
    for name, keywords, key in (
        ("dapo", {"clip_dual": 3.0}, "clip/dual"),
        ("grpo", {"kl_coef": 0.1}, "kl/mean"),
        ("drpo", {}, "clip/turned"),
    ):
        assert f"trimtab/{key}" in averaged(objective(name, **keywords)(logps, ones).metrics.finalize())


@pytest.mark.parametrize("running", ["miles", "slime"])
def test_the_trainer_is_the_one_that_runs_where_both_are_installed(
    running: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("miles", "slime"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert slime._trainer() == "miles"
    for module in slime.SCORING[running].split("."):
        path = module if module == running else f"{path}.{module}"
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    sys.modules[path].get_log_probs_and_entropy = running  # type: ignore[attr-defined]
    assert (slime._trainer(), slime._score_function()) == (running, running)


def test_skyrl_must_reduce_as_the_objective_does() -> None:
    loss, zeros = skyrl.policy_loss("icepop"), torch.zeros(1, 2)
    plain: dict[str, Any] = {"off_policy_correction": None, "max_seq_len": None}
    with pytest.raises(TrimtabError, match="loss_reduction is 'token_mean': set it to 'sequence_mean'"):
        loss(zeros, zeros, zeros, SimpleNamespace(**plain, loss_reduction="token_mean"), rollout_logprobs=zeros)
    with pytest.raises(TrimtabError, match="reads the sampler's log-probs"):
        loss(zeros, zeros, zeros, SimpleNamespace(**plain, loss_reduction="sequence_mean"))
    constant = skyrl.policy_loss("dr-grpo", length_max=100)
    config = SimpleNamespace(loss_reduction="seq_mean_token_sum_norm", max_seq_len=120, off_policy_correction=None)
    with pytest.raises(TrimtabError, match=r"divides by length_max = 100, and SkyRL by .*max_seq_len = 120"):
        constant(zeros, zeros, zeros, config)
    off = SimpleNamespace(tis_ratio_type=None, sequence_mask_metric=None)
    config = SimpleNamespace(loss_reduction="sequence_mean", off_policy_correction=off)
    assert loss(zeros, zeros, zeros, config, rollout_logprobs=zeros)[0].item() == 0
    off.sequence_mask_metric = "geometric"
    with pytest.raises(TrimtabError, match="sequence_mask_metric: only SkyRL's own loss reads this"):
        loss(zeros, zeros, zeros, config, rollout_logprobs=zeros)


def test_areal_must_pass_the_policies_that_the_objective_reads() -> None:
    one = torch.zeros(1, 3)
    data = {"logprobs": one, "advantages": one, "loss_mask": torch.tensor([[1.0, 1.0, 0.0]])}
    tis = areal.actor_loss("token-tis")
    with pytest.raises(TrimtabError, match=r"one policy for both of them: set actor\.use_decoupled_loss=true"):
        tis(one, one, data | {"prox_logp": one}, current_version=3)
    with pytest.raises(TrimtabError, match=r"AReaL computes none: set actor\.prox_logp_method=recompute"):
        tis(one, one, data, use_decoupled_loss=True)
    aged = functools.partial(areal.actor_loss("a3po"), one, one, current_version=3, use_decoupled_loss=True)
    assert aged(data | {"versions": torch.tensor([[-1, 2, 2]])}).item() == 0
    with pytest.raises(TrimtabError, match="trained tokens have no version"):
        aged(data | {"versions": torch.tensor([[2, 2, -1]])})
    with pytest.raises(TrimtabError, match="distillation from a teacher"):
        packed("grpo", [1.0] * 8, teacher_logp=torch.zeros(8))


def packed(name: str, advantages: list[float], **fields: Any) -> torch.Tensor:
    """AReaL's loss of two responses of four tokens in one row."""
    make = torch.Generator().manual_seed(0)
    current = (-torch.rand(8, generator=make)).requires_grad_()
    old = current.detach() + 0.3 * torch.randn(8, generator=make)
    data: dict[str, Any] = {"logprobs": old, "prox_logp": old, "loss_mask": torch.ones(8), "versions": torch.zeros(8)}
    data |= {"advantages": torch.tensor(advantages), "cu_seqlens": torch.tensor([0, 4, 8]), **fields}
    loss = areal.actor_loss(name, aggregation="token-mean")
    return loss(current, torch.zeros(8), data, current_version=1, use_decoupled_loss=True)


def test_areal_s_advantages_must_not_differ_within_a_response_that_is_judged_whole() -> None:
    """Also in a packed row, where two responses differ."""
    assert packed("gspo", [1.0] * 4 + [-1.0] * 4).requires_grad
    for name in ("gspo", "opsm"):
        with pytest.raises(TrimtabError, match=rf"{name} needs one advantage a response.*set actor\.kl_ctl=0"):
            packed(name, [1.0, 1.0, -1.0, -1.0] * 2)
    assert packed("token-tis", [1.0, 1.0, -1.0, -1.0] * 2).requires_grad


def test_areal_s_packed_row_without_borders_is_refused_where_sequences_are_read() -> None:
    """Tree training passes none. What is not refused must have the loss of the same row with borders."""
    advantages, refused = [1.0] * 4 + [-1.0] * 4, set()
    for name in set(objectives()) - {"dr-grpo", "luffy", "oapl"}:
        if HOOKS["areal"].refusal(objective(name, aggregation="token-mean")) is None:
            try:
                without = packed(name, advantages, cu_seqlens=None).item()
            except TrimtabError as error:
                refused |= {name} if "reads whole sequences, and AReaL passes no borders" in str(error) else set()
            else:
                assert without == pytest.approx(packed(name, advantages).item(), rel=1e-6), name
    assert {"gspo", "seq-tis", "turn-tis", "geo-mask", "ctpo", "gmpo", "opsm"} <= refused
    assert not {"grpo", "token-tis", "icepop", "a3po"} & refused


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """A module in place of one of a trainer that has no package for this machine."""
    module = ModuleType(name)
    vars(module).update(members)
    parts = name.split(".")
    for size in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:size]), ModuleType(".".join(parts[:size])))
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_areal_s_loss_is_not_installed_where_nothing_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a script only starts the processes that train; those know the number of processes."""
    actor = stand_in(monkeypatch, "areal.trainer.ppo.actor", grpo_loss_fn=None)
    environ = stand_in(monkeypatch, "areal.utils.environ", is_single_controller=lambda: True)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(TrimtabError, match=r"this process only starts those that train.*docs/adapters\.md"):
        areal.install("a3po")
    assert actor.grpo_loss_fn is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    areal.install("a3po")
    assert actor.grpo_loss_fn.__qualname__.startswith("actor_loss")
    actor.grpo_loss_fn = None
    monkeypatch.delenv("WORLD_SIZE")
    environ.is_single_controller = lambda: False
    areal.install("a3po")
    assert actor.grpo_loss_fn is not None


def test_a_trainer_that_is_not_installed_is_named() -> None:
    for trainer, call in {
        "AReaL": lambda: areal.install("a3po"),
        "OpenRLHF": lambda: openrlhf.install("icepop"),
        "SkyRL": lambda: skyrl.register("icepop"),
        "NeMo-RL": lambda: nemo_rl.ObjectiveLoss("icepop", replaces=NEMO_RL_LOSS),
    }.items():
        with pytest.raises(TrimtabError, match=f"{trainer} cannot be used here: .* which is not installed"):
            call()


def test_nemo_rl_reads_whether_the_policy_is_compared_with_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it, NeMo-RL adds the log-probs without top-k and top-p, which are compared with the reference."""
    install_nemo_rl(monkeypatch)
    fused = SimpleNamespace(use_fused_linear_logprobs=True, reference_policy_kl_penalty=0.01)
    plain = nemo_rl.ObjectiveLoss("grpo", replaces=NEMO_RL_LOSS)
    loss = nemo_rl.ObjectiveLoss("grpo", kl_coef=0.1, replaces=fused)
    assert (plain.reference_policy_kl_penalty, loss.reference_policy_kl_penalty) == (0, 0.1)
    assert (plain.use_fused_linear_logprobs, loss.use_fused_linear_logprobs) == (False, True)
    current = torch.tensor([[-1.0, -2.0]])
    names = ("token_mask", "advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    data = {"sample_mask": torch.ones(1), **{name: torch.ones(1, 3) for name in names}}
    counts = (torch.tensor(1), torch.tensor(2))
    assert loss(current, data, *counts)[0].isfinite()
    # Of a filtered policy, the one without filter is compared with the reference.
    unfiltered = torch.ones(1, 2, requires_grad=True)
    filtered = torch.tensor([[1.5, 2.5]], requires_grad=True)
    data |= {"curr_logprobs_unfiltered": unfiltered, "prev_logprobs": torch.tensor([[0.0, 1.5, 2.5]])}
    value, _ = loss(filtered, data, *counts)
    assert value.item() == pytest.approx(-1.0)  # Ratio 1, advantage 1, and no KL.
    (slope,) = torch.autograd.grad(value, unfiltered)
    assert slope.tolist() == [[0.0, 0.0]]
    for reference in (torch.zeros(1, 3), None):
        with pytest.raises(TrimtabError, match=r"computes no reference log-probs: set .*reference_policy_kl_penalty="):
            loss(current, data | {"reference_policy_logprobs": reference}, *counts)


def test_tinker_data_without_a_field_are_refused() -> None:
    some = SimpleNamespace(loss_fn_inputs={"logprobs": torch.zeros(2), "advantages": torch.zeros(2)})
    less = SimpleNamespace(loss_fn_inputs={"logprobs": torch.zeros(2)})
    with pytest.raises(TrimtabError, match="1 of 2 data have no 'advantages'"):
        tinker.custom_loss("ipo")([some, less], [torch.zeros(2), torch.zeros(2)])
    with pytest.raises(TrimtabError, match="no 'advantages' in loss_fn_inputs"):
        tinker.custom_loss("ipo")([less], [torch.zeros(2)])


def tis(
    name: str | dict[str, object], lengths: tuple[int, ...] = (3, 2), *, use_tis: bool = True
) -> tuple[torch.Tensor, list, dict]:
    train = [torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -1.0])]
    rollout = [torch.tensor([-1.0, -3.0, 2.0]), torch.tensor([-1.5, -1.0])]
    return slime.tis(
        Namespace(trimtab_objective=name, use_tis=use_tis),
        pg_loss=torch.ones(5),
        train_log_probs=train,
        rollout_log_probs=rollout,
        loss_masks=[torch.tensor([1, 1, 1]), torch.tensor([1, 0])],
        response_lengths=lengths,
        total_lengths=[7, 6],
    )


def test_slime_multiplies_weights_and_rejection_into_its_loss() -> None:
    loss, masks, metrics = tis({"name": "token-tis", "weight_max": 2.0})
    # Ratios 1, e^2 and e^-3; e^0.5, and an untrained token.
    torch.testing.assert_close(loss, torch.tensor([1.0, 2.0, 0.049787, 1.648721, 0.0]))
    assert [mask.tolist() for mask in masks] == [[1, 1, 1], [1, 0]]
    loss, _, metrics = tis({"name": "icepop", "weight_min": 0.5, "weight_max": 5.0})
    torch.testing.assert_close(loss, torch.tensor([1.0, 0.0, 0.0, 1.648721, 0.0]))
    assert metrics["trimtab/reject/tokens"].tolist() == [0, 1, 1, 0, 0]


def test_slime_only_measures_without_its_option() -> None:
    """`--get-mismatch-metrics` asks for the metrics alone."""
    loss, _, metrics = tis("token-tis", use_tis=False)
    assert loss.tolist() == [1.0] * 5
    assert metrics["trimtab/weight/mean"][3].item() == pytest.approx(1.648721)


WITH_KL = {"name": "grpo", "kl_coef": 0.1}


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("grpo", {"kl_loss_coef": 0.1}, "--kl-loss-coef has no effect"),
        ("grpo", {"use_kl_loss": True}, "--use-kl-loss has no effect"),
        ("grpo", {"entropy_coef": 0.01}, "--entropy-coef has no effect"),
        ("grpo", {"use_tis": True}, "--use-tis has no effect"),
        ("grpo", {"use_opsm": True}, "--use-opsm has no effect"),
        (
            "grpo",
            {"custom_pg_loss_reducer_function_path": "a.b"},
            "--custom-pg-loss-reducer-function-path has no effect",
        ),
        (WITH_KL, {"use_kl_loss": True, "kl_loss_coef": 0.0}, "no reference log-probs are passed: set --use-kl-loss"),
        ("icepop", {"use_rollout_logprobs": True}, "--use-rollout-logprobs leaves them out: turn it off"),
        ("grpo", {}, "a rollout of several samples counts once"),
    ],
)
def test_slime_s_loss_refuses_settings_under_which_it_would_be_another(name: Any, options: Any, line: str) -> None:
    one = [torch.zeros(2)]
    batch = {
        "response_lengths": [2],
        "loss_masks": [torch.ones(2)],
        "log_probs": one,
        "rollout_mask_sums": torch.tensor([5.0]),
    }
    args = Namespace(trimtab_objective=name, calculate_per_token_loss=False, **options)
    with pytest.raises(TrimtabError, match=line):
        slime.loss(args, batch, torch.zeros(1), torch.sum)


@pytest.mark.parametrize("given", [{"weight_max": 3}, ["icepop"], 3, {"name": ["icepop"]}])
def test_slime_s_objective_is_a_name_or_a_table(given: Any) -> None:
    with pytest.raises(TrimtabError, match="give the name of an objective"):
        tis(given)


def test_prime_rl_s_keywords_may_be_tables_and_token_weights_are_refused() -> None:
    one = torch.zeros(3)
    fields = {"trainer_logprobs": one, "inference_logprobs": one, "ref_logprobs": None, "advantages": one}
    inputs = SimpleNamespace(**fields, loss_mask=torch.ones(3).bool(), loss_weights=None)
    weight = {"bound": "truncate", "max": 2.0}
    assert prime_rl.loss(inputs, objective="reinforce", aggregation="token-mean", weight=weight).loss.item() == 0
    with pytest.raises(TrimtabError, match=r"divergence_max = \[1, 2\] has the wrong type"):
        prime_rl.loss(inputs, objective="ipo", divergence_max=[1, 2])
    with pytest.raises(TrimtabError, match="give the name of an objective"):
        prime_rl.loss(inputs, objective=["ipo"])  # type: ignore[arg-type]
    inputs.loss_weights = torch.tensor([1.0, 0.5, 1.0])
    with pytest.raises(TrimtabError, match="rl_weights other than 1"):
        prime_rl.loss(inputs, objective="ipo")


def test_slime_refuses_what_its_hook_does_not_pass() -> None:
    with pytest.raises(TrimtabError, match="grpo has no weight and no mask"):
        tis("grpo")
    with pytest.raises(TrimtabError, match="opsm reads advantage and current, which this hook does not pass: use loss"):
        tis("opsm")
    with pytest.raises(TrimtabError, match="context parallelism"):
        tis("token-tis", lengths=(4, 2))
    with pytest.raises(TrimtabError, match="needs trimtab_objective in the file"):
        slime.tis(
            Namespace(),
            pg_loss=torch.ones(1),
            train_log_probs=[],
            rollout_log_probs=[],
            loss_masks=[],
            response_lengths=[],
        )


def test_openrlhf_returns_the_numbers_that_it_logs() -> None:
    current = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss = openrlhf.ObjectiveLoss("grpo", aggregation="token-mean", clip_low=0.2, clip_high=0.2)
    value, clipped, kl, mismatch = loss(
        current, torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2), torch.ones(1, 2), torch.tensor([[-1.5, -1.0]])
    )
    assert value.item() == pytest.approx(-(1 + 0.367879) / 2, abs=1e-5)
    assert (clipped.item(), kl.item()) == (0.0, 0.5)
    assert mismatch is not None
    assert mismatch.item() == -0.25


@pytest.mark.parametrize("trainer", ["skyrl", "openrlhf", "tinker"])
def test_the_log_probs_of_every_call_are_diagnosed(trainer: str, tmp_path: Path) -> None:
    make = torch.Generator().manual_seed(0)
    behavior = -torch.rand(30, 6, generator=make) - 0.1
    old = behavior + 0.05 * torch.randn(30, 6, generator=make)
    mask = torch.arange(6) < torch.randint(2, 7, (30,), generator=make)[:, None]
    advantage, folder = torch.randn(30, 1, generator=make).expand(30, 6), str(tmp_path / "logps")
    batch = {"behavior": behavior, "proximal": old, "mask": mask, "advantage": advantage}
    CALLS[trainer](batch, (old + 0.2).requires_grad_(), "icepop", (slice(0, 10), slice(10, 30)), {}, dump=folder)
    assert sorted(path.name for path in (tmp_path / "logps").iterdir()) == [
        "call_000001_rank_0.jsonl",
        "call_000002_rank_0.jsonl",
    ]
    size = trimtab.diagnose(folder).measured.size
    expected = correct(old, behavior, mask).metrics.finalize()
    assert size.mismatch["k3"] == pytest.approx(expected["k3"], rel=1e-4)
    assert size.mismatch["tokens"] == mask.sum()


def test_a_new_run_is_written_beside_an_earlier_one_and_a_resumed_one_into_its_own(tmp_path: Path) -> None:
    def steps(dump: Dump, *numbers: int, rank: int = 0) -> list[str]:
        return [str(dump.write(step, [{"run": "x"}], rank=rank).relative_to(tmp_path).parent) for step in numbers]

    folder = tmp_path / "logps"
    assert steps(Dump(folder), 1, 2, 3, 4, 5) == ["logps"] * 5
    second = Dump(folder)
    with pytest.warns(TrimtabWarning, match=r"logps holds log-probs of an earlier run: .* are written to .*logps_2"):
        assert steps(second, 1) == ["logps_2"]
    assert steps(second, 2) == ["logps_2"]
    assert steps(Dump(folder), 6, 7) == ["logps", "logps"]  # of the run that ended at 5, not of that at 2
    assert steps(Dump(folder), 3) == ["logps_2"]
    with pytest.warns(TrimtabWarning, match="logps_3"):  # `train()` a second time
        assert steps(second, 1) == ["logps_3"]
    assert {path.name: len(list(path.iterdir())) for path in tmp_path.iterdir()} == {
        "logps": 7,
        "logps_2": 3,
        "logps_3": 1,
    }


def test_ranks_write_into_the_same_folder_whoever_is_first(tmp_path: Path) -> None:
    def write(rank: int, step: int, dump: Dump) -> str:
        return dump.write(step, [], rank=rank).parent.name

    one, two = Dump(tmp_path / "logps"), Dump(tmp_path / "logps")
    assert [write(0, 1, one), write(0, 2, one), write(1, 1, two), write(1, 2, two)] == ["logps"] * 4
    for path in (tmp_path / "logps").iterdir():  # as if another process had written them
        os.utime(path, (0, 0))
    assert write(2, 1, Dump(tmp_path / "logps")) == "logps_2"  # there were two ranks before
    with pytest.warns(TrimtabWarning, match="logps_2"):
        assert write(0, 1, Dump(tmp_path / "logps")) == "logps_2"
    assert write(2, 3, Dump(tmp_path / "logps")) == "logps"


def test_calls_of_a_second_loss_are_another_run(tmp_path: Path) -> None:
    logps = PolicyLogps(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2) > 0, proximal=torch.zeros(1, 2))
    first, second = Dump(tmp_path / "logps"), Dump(tmp_path / "logps")
    paths = [first.write_call(logps, torch.ones(1, 2)) for _ in range(2)]
    with pytest.warns(TrimtabWarning, match="logps_2"):
        paths.append(second.write_call(logps, torch.ones(1, 2)))
    paths += [dump.write_call(logps, torch.ones(1, 2)) for dump in (first, second)]
    assert [f"{path.parent.name} {path.name[:11]}" for path in paths] == [
        "logps call_000001",
        "logps call_000002",
        "logps_2 call_000001",
        "logps call_000003",
        "logps_2 call_000002",
    ]


@pytest.mark.parametrize("folder", [True, "", 3])
def test_a_dump_that_is_no_folder_is_named(folder: Any) -> None:
    with pytest.raises(TrimtabError, match=rf"^dump={folder!r} is not a folder: give one, such as dump=\"logps\"$"):
        Dump(folder)


def test_columns_of_tokens_are_cut_and_what_is_not_finite_becomes_null() -> None:
    values, advantage = torch.tensor([[NAN, 2.0, 9.0], [3.0, 9.0, 9.0]]), torch.tensor([0.5, -0.5])
    responses = {"reward": [0.5, math.inf], "advantage": advantage, "absent": None}
    assert list(rows(torch.tensor([2, 1]), {"entropy": values}, responses)) == [
        {"entropy": [None, 2.0], "reward": 0.5, "advantage": 0.5},
        {"entropy": [3.0], "reward": None, "advantage": -0.5},
    ]


def test_a_large_batch_is_written_in_a_second(tmp_path: Path) -> None:
    """64 responses of 8,000 tokens, which took 7 seconds with a tensor for each number."""
    values, mask = -torch.rand(64, 8000), torch.ones(64, 8000).bool()
    logps = PolicyLogps(current=values, behavior=values, proximal=values, mask=mask)
    started = time.process_time()
    Dump(tmp_path).write_call(logps, torch.ones(64, 1).expand(64, 8000))
    assert time.process_time() - started < 3


def test_a_dump_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrimtabError, match="log-probs cannot be written"):
        Dump(tmp_path / "file" / "logps").write(1, [])
