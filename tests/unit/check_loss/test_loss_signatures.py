"""Losses of other trainers are called as these call them, and equal the objective that they compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import trimtab
from trimtab.check_loss.probes import Update, of_objective, random_batch
from trimtab.check_loss.signatures import of_function
from trimtab.errors import TrimtabError


def assert_same(function: Any, name: str, *, arguments: Any = None, **keywords: Any) -> None:
    """Loss and gradient of a whole update, and of a micro-batch of another one."""
    loss, objective = of_function(function, arguments), of_objective(trimtab.objective(name, **keywords))
    update = Update(random_batch(1, 0.3), parts=2)
    part = {field: value[2:5] for field, value in update.batch.items()}
    for batch, whole in ((random_batch(0, 0.3), None), (part, update)):
        own, other = (one.read(batch, whole) for one in (loss, objective))
        assert own.loss == pytest.approx(other.loss, rel=1e-9)
        torch.testing.assert_close(own.gradient, other.gradient, rtol=1e-9, atol=1e-15)


def ppo(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    ratio = log_ratio.clamp(-20, 20).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def test_of_verl() -> None:
    def loss(
        old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, loss_agg_mode: str,
        config: Any, rollout_is_weights: Tensor | None,
    ) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
        assert response_mask.dtype == torch.float64
        assert advantages.shape == log_prob.shape
        assert (loss_agg_mode, rollout_is_weights, config.get("clip_ratio_c")) == ("token-mean", None, 7.0)
        losses = ppo(torch.where(response_mask > 0, log_prob - old_log_prob, 0.0), advantages)
        losses = torch.where(advantages < 0, torch.min(losses, -advantages * config.clip_ratio_c), losses)
        tokens = config.global_batch_info["batch_num_tokens"]
        return torch.where(response_mask > 0, losses, 0.0).sum() / tokens, {}

    arguments = {"config.clip_ratio_c": 7.0}
    assert_same(loss, "dapo", clip_high=0.2, clip_dual=7.0, arguments=arguments)


def test_of_slime_and_miles() -> None:
    def loss(args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Any) -> tuple[Tensor, dict[str, Tensor]]:
        logps, start = [], 0
        for tokens, total, size in zip(
            batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
        ):
            rows = logits[0, start + total - size - 1 : start + total - 1].log_softmax(-1)
            logps.append(rows.gather(-1, tokens[-size:, None])[:, 0])
            start += total
        assert args.eps_clip == 0.2
        masked = torch.cat(batch["loss_masks"]) > 0
        log_ratio = torch.where(masked, torch.cat(logps) - torch.cat(batch["log_probs"]), 0.0)
        return sum_of_sample_mean(ppo(log_ratio, torch.cat(batch["advantages"]))), {}

    assert_same(loss, "grpo")
    by_token = {"args.calculate_per_token_loss": True}
    assert_same(loss, "dapo", clip_high=0.2, arguments=by_token)


def test_of_prime_rl() -> None:
    def loss(inputs: Any) -> SimpleNamespace:
        log_ratio = torch.where(inputs.loss_mask, inputs.trainer_logprobs - inputs.inference_logprobs, 0.0)
        return SimpleNamespace(loss=torch.where(inputs.loss_mask, ppo(log_ratio, inputs.advantages), 0.0).sum())

    assert_same(loss, "token-bypass")


def test_advantages_of_one_dimension_and_a_mask_of_numbers() -> None:
    def loss(logps: Tensor, old_logps: Tensor, completion_mask: Tensor, advantages: Tensor, tokens: int) -> Tensor:
        log_ratio = torch.where(completion_mask > 0, logps - old_logps, 0.0)
        outside = 1 - completion_mask
        return (ppo(log_ratio, advantages.unsqueeze(1)) * (1 - outside)).sum() / tokens

    said = "completion_mask = mask (float64), advantages = advantage (batch,), tokens = tokens"
    assert of_function(loss).inputs.endswith(said)
    assert_same(loss, "dapo", clip_high=0.2)


class OfModule(torch.nn.Module):
    def forward(self, logps: Tensor, old_logps: Tensor, mask: Tensor, advantages: Tensor, tokens: int) -> Tensor:
        advantages *= 1  # written into
        return torch.where(mask, ppo(torch.where(mask, logps - old_logps, 0.0), advantages), 0.0).sum() / tokens


@pytest.mark.parametrize("loss", [OfModule, OfModule()])
def test_a_module_that_writes_into_its_inputs(loss: Any) -> None:
    assert_same(loss, "dapo", clip_high=0.2)


def test_parameters_with_other_names() -> None:
    def loss(x: Tensor, y: Tensor, mask: Tensor, adv: Tensor, eps: float, tokens: int) -> Tensor:
        ratio = torch.where(mask, x - y, 0.0).clamp(-20, 20).exp()
        return torch.where(mask, -torch.min(ratio * adv, ratio.clamp(1 - eps, 1 + eps) * adv), 0.0).sum() / tokens

    named = {"current": "x", "behavior": "y", "advantage": "adv"}
    assert_same(loss, "token-bypass", clip_low=0.1, clip_high=0.1, arguments={**named, "eps": 0.1})
    with pytest.raises(TrimtabError, match="the meaning of the parameter `eps` is not known: give a value"):
        of_function(loss, named)
    with pytest.raises(TrimtabError, match=r"epz=0.1: no parameter has that name \(did you mean 'eps'\?\)"):
        of_function(loss, {**named, "epz": 0.1})


def per_token(logps: Tensor, advantages: Tensor) -> Tensor:
    return logps * advantages


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda logps, mask: (logps * mask).sum(), "no parameter takes `advantage`"),
        (per_token, r"per_token cannot be called .* returned a tensor of shape \(3, 6\): reduce it"),
        (lambda logps, advantages: (logps * advantages).to(torch.float32).sum(), "float32, and is probed in float64"),
    ],
)
def test_what_cannot_be_checked_is_said(function: Any, message: str) -> None:
    with pytest.raises(TrimtabError, match=message):
        of_function(function)
