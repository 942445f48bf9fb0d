"""Every adapter gives the loss and gradient of the library: same batch, same preset, called as its trainer calls it.

TRL's, which is a trainer of its own, is compared in tests/e2e/test_trl_trainer.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.adapter_calls import CALLS, HALVES, WHOLE, lists
from tests.support.named_cases import in_one_test
from tests.support.peer_modules import NEMO_RL_LOSS, install_nemo_rl
from torch import Tensor
from torch.testing import assert_close

from trimtab.adapters import nemo_rl, slime
from trimtab.adapters.hooks import HOOKS
from trimtab.adapters.micro_batch import turns_of
from trimtab.errors import TrimtabError
from trimtab.objectives import PolicyLogps, objective, objectives

OPTIONS: dict[str, dict[str, Any]] = {"dr-grpo": {"length_max": 6}, "luffy": {"length_max": 6}}


def float32(lab: Any, seed: int) -> Any:
    """A batch in which every response has a trained token, as the trainers drop others; in float32."""
    batch = lab.Batch.random(seed)
    mask = batch.mask.clone()
    mask[:, 0] = True
    # From responses that no rule rejects to responses that most do.
    nearer = torch.logspace(-4, 0, len(mask), dtype=torch.float64)[:, None]
    policies = {
        name: batch.current + nearer * (getattr(batch, name) - batch.current) for name in ("behavior", "proximal")
    } | {"current": batch.current}
    # Log-probs are below 0; verl tells them from weights by that.
    highest = torch.stack(list(policies.values())).max()
    policies = {name: values - highest for name, values in policies.items()}
    single = batch.changed(**policies).map(lambda tensor: tensor.float() if tensor.dtype == torch.float64 else tensor)
    return single.changed(mask=mask, turn=turns_of(mask))


def cut(mask: Tensor) -> Tensor:
    """The mask without what `lists` cuts off."""
    return torch.stack([row * (torch.arange(len(row)) < 4 + index % 3) for index, row in enumerate(mask)])


def allowed(trainer: str, name: str) -> dict[str, Any]:
    """Keywords of the preset, with an aggregation that the trainer has."""
    keywords, kinds = OPTIONS.get(name, {}), HOOKS[trainer].aggregations
    if name == "oapl" or not kinds or objective(name, **keywords).aggregation.kind in kinds:
        return keywords
    return {"aggregation": kinds[0]}


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the adapters import from NeMo-RL and slime: three enumerations, and the function that scores tokens."""
    install_nemo_rl(monkeypatch)
    scored = lambda _, unconcat_tokens, **__: {"log_probs": unconcat_tokens}  # noqa: E731
    monkeypatch.setattr(slime, "_score_function", lambda: scored)


def trained_policies(trainer: str, batch: Any, current: Tensor) -> PolicyLogps:
    """The log-probs as the trainer passes them to a loss."""
    logps = replace(batch.logps(), current=current)
    if trainer == "prime-rl":  # One update a batch.
        logps = replace(logps, proximal=current.detach())
    if trainer in ("slime", "tinker"):
        logps = replace(logps, mask=cut(batch.mask), turn=turns_of(cut(batch.mask)))
    return logps


@pytest.mark.parametrize("trainer", CALLS)
@in_one_test("preset", objectives())
def test_an_adapter_gives_the_loss_of_the_library(lab: Any, trainer: str, preset: str) -> None:
    keywords, batch = allowed(trainer, preset), float32(lab, seed=3)
    built, current = objective(preset, **keywords), batch.current.clone().requires_grad_()
    fields = {name: getattr(batch, name) for name in ("behavior", "proximal", "mask", "advantage", "age")}
    call = functools.partial(CALLS[trainer], fields | {"cut": lists}, current, preset, HALVES, keywords)
    if trainer == "tinker":  # one call is one update
        call = functools.partial(CALLS[trainer], fields | {"cut": lists}, current, preset, WHOLE, keywords)
    if HOOKS[trainer].refusal(built) is not None:
        with pytest.raises(TrimtabError):
            call()
        return
    loss, metrics = call()
    (grad,) = torch.autograd.grad(loss, current)
    again = batch.current.clone().requires_grad_()
    expected = built(trained_policies(trainer, batch, again), batch.advantage)
    (expected_grad,) = torch.autograd.grad(expected.loss, again)
    assert_close(loss, expected.loss, rtol=2e-6, atol=2e-7)
    assert_close(grad, expected_grad, rtol=2e-5, atol=2e-7)
    assert grad.abs().max() > 0
    if trainer == "nemo-rl":
        gap = (batch.behavior - batch.proximal).abs()[batch.mask]
        assert metrics["token_mult_prob_error"] == pytest.approx(gap.exp().mean().item(), rel=1e-5)
        assert_close(metrics["loss"], loss.item(), rtol=1e-6, atol=1e-6)
        assert_close(metrics["trimtab/update/kl"], expected.metrics.finalize()["update/kl"], rtol=1e-4, atol=1e-6)


def test_nemo_rl_without_log_probs_at_the_start_of_the_update(lab: Any) -> None:
    """`force_on_policy_ratio` fills `prev_logprobs` with zeros, and the ratio is 1."""
    batch, grpo = float32(lab, seed=3), objective("grpo")
    zeros = batch.changed(proximal=torch.zeros_like(batch.current))
    expected = grpo(replace(batch.logps(), proximal=batch.current.detach()), batch.advantage).loss
    loss = nemo_rl.ObjectiveLoss(grpo, replaces=NEMO_RL_LOSS)
    data = {"token_mask": zeros.mask.float(), "advantages": zeros.advantage.expand(zeros.current.shape)}
    data |= {"prev_logprobs": zeros.proximal, "generation_logprobs": zeros.behavior}
    shifted = {name: torch.nn.functional.pad(value, (1, 0)) for name, value in data.items()}
    count = torch.tensor(len(zeros.current))
    value, _ = loss(zeros.current, {**shifted, "sample_mask": torch.ones(len(zeros.current))}, count, zeros.mask.sum())
    assert_close(value, expected, rtol=2e-6, atol=2e-7)
