"""What the hooks of the trainers refuse, and what those without a file of their own return."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.peer_modules import NEMO_RL_LOSS, install_nemo_rl

from trimtab.adapters import areal, nemo_rl, openrlhf, prime_rl, skyrl, tinker
from trimtab.adapters.hooks import build, hook
from trimtab.adapters.verl_driver import refuse_bypass_mode
from trimtab.errors import TrimtabError
from trimtab.objectives import objective


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
    value, metrics = loss(filtered, data, *counts)
    assert metrics["trimtab/kl/mean"] == 0
    assert value.item() == pytest.approx(-1.0)  # Ratio 1, advantage 1, and no KL.
    (slope,) = torch.autograd.grad(value, unfiltered)
    assert slope.tolist() == [[0.0, 0.0]]
    for reference in (torch.zeros(1, 3), None):
        with pytest.raises(TrimtabError, match=r"computes no reference log-probs: set .*reference_policy_kl_penalty="):
            loss(current, data | {"reference_policy_logprobs": reference}, *counts)


def test_bypass_mode_of_verl_is_passed_on_for_its_own_losses() -> None:
    called = []
    bypass = functools.partial(refuse_bypass_mode, lambda batch, **_: called.append(batch))
    bypass("batch")
    bypass("other", policy_loss_config={"loss_mode": "vanilla"})
    assert called == ["batch", "other"]


def test_tinker_data_without_a_field_are_refused() -> None:
    some = SimpleNamespace(loss_fn_inputs={"logprobs": torch.zeros(2), "advantages": torch.zeros(2)})
    less = SimpleNamespace(loss_fn_inputs={"logprobs": torch.zeros(2)})
    with pytest.raises(TrimtabError, match="1 of 2 data have no 'advantages'"):
        tinker.custom_loss("ipo")([some, less], [torch.zeros(2), torch.zeros(2)])
    with pytest.raises(TrimtabError, match="no 'advantages' in loss_fn_inputs"):
        tinker.custom_loss("ipo")([less], [torch.zeros(2)])


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


def test_openrlhf_returns_the_numbers_that_it_logs() -> None:
    current = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss = openrlhf.ObjectivePolicyLoss("grpo", aggregation="token-mean", clip_low=0.2, clip_high=0.2)
    value, clipped, kl, mismatch = loss(
        current, torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2), torch.ones(1, 2), torch.tensor([[-1.5, -1.0]])
    )
    assert value.item() == pytest.approx(-(1 + 0.367879) / 2, abs=1e-5)
    assert (clipped.item(), kl.item()) == (0.0, 0.5)
    assert mismatch.item() == -0.25
    masked = torch.tensor([[-1.0, -2.0, float("nan")]])  # what is not trained may hold anything
    mask = torch.tensor([[1, 1, 0]])
    assert loss(masked, torch.tensor([[-1.0, -1.0, float("nan")]]), torch.ones(1, 3), mask)[2].item() == 0.5
