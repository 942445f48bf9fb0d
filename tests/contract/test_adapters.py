"""Every adapter gives the loss and gradient of the library: same batch, same preset, called as its trainer calls it.

TRL's, which is a trainer of its own, is compared in tests/e2e/test_trl_trainer.py.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.named_cases import in_one_test
from tests.support.peer_modules import NEMO_RL_LOSS, install_nemo_rl
from torch import Tensor
from torch.testing import assert_close

from trimtab.adapters import areal, nemo_rl, openrlhf, prime_rl, skyrl, slime, tinker, verl_loss
from trimtab.adapters.hooks import HOOKS, turns_of
from trimtab.errors import TrimtabError
from trimtab.objectives import Aggregation, Objective, PolicyLogps, objectives

OPTIONS: dict[str, dict[str, Any]] = {"dr-grpo": {"length_max": 6}, "luffy": {"length_max": 6}}
Trainer = Callable[[Any, Objective, Any], Tensor]


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


def lists(tensor: Tensor) -> list[Tensor]:
    """Responses of different lengths, cut from a padded batch."""
    return [row[: 4 + index % 3] for index, row in enumerate(tensor)]


def cut(mask: Tensor) -> Tensor:
    """The mask without what `lists` cuts off."""
    return torch.stack([row * (torch.arange(len(row)) < 4 + index % 3) for index, row in enumerate(mask)])


def run_prime_rl(objective: Objective, batch: Any, current: Tensor) -> Tensor:
    keywords = {"objective": objective.name, **OPTIONS.get(objective.name, {}), "aggregation": "token-mean"}
    keywords.pop("length_max", None)
    total = current.new_zeros(())
    for row in range(len(current)):
        inputs = SimpleNamespace(
            trainer_logprobs=current[row],
            inference_logprobs=batch.behavior[row],
            ref_logprobs=None,
            advantages=batch.advantage.expand(current.shape)[row],
            loss_mask=batch.mask[row],
            loss_weights=None,
        )
        total = total + prime_rl.loss(inputs, **keywords).loss
    return total / batch.mask.sum()


def run_skyrl(objective: Objective, batch: Any, current: Tensor) -> Tensor:
    """Advantages scaled as SkyRL does, a sum over two micro-batches."""
    reduction = skyrl.REDUCTIONS.get(objective.aggregation.kind, "token_mean")
    lengths = batch.mask.sum(1, keepdim=True)
    scale = {
        "token_mean": 1 / batch.mask.sum(),
        "sequence_mean": 1 / (len(current) * lengths),
        "seq_mean_token_sum_norm": torch.tensor(1 / (len(current) * 6)),
    }[reduction]
    advantage = (batch.advantage * scale).expand(current.shape)
    loss = skyrl.policy_loss(objective)
    total = current.new_zeros(())
    for part in (slice(0, 3), slice(3, None)):
        value, _ = loss(
            current[part],
            batch.proximal[part],
            advantage[part],
            config=SimpleNamespace(loss_reduction=reduction, max_seq_len=6, off_policy_correction=None),
            loss_mask=batch.mask[part].float(),
            rollout_logprobs=batch.behavior[part],
        )
        total = total + value
    return total


def run_nemo_rl(objective: Objective, batch: Any, current: Tensor) -> Tensor:
    def shifted(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor.expand(current.shape).float(), (1, 0))

    loss = nemo_rl.ObjectiveLoss(objective, replaces=NEMO_RL_LOSS)
    total = current.new_zeros(())
    summed: Counter[str] = Counter()
    counts = (torch.tensor(len(current)), batch.mask.sum())
    for part in (slice(0, 3), slice(3, None)):
        data = {
            "token_mask": shifted(batch.mask)[part],
            "sample_mask": torch.ones(len(current))[part],
            "advantages": shifted(batch.advantage)[part],
            "prev_logprobs": shifted(batch.proximal)[part],
            "generation_logprobs": shifted(batch.behavior)[part],
        }
        value, metrics = loss(current[part], data, *counts)
        assert metrics.keys() <= loss.metric_normalizations.keys()
        total = total + value
        summed.update(metrics)
    gap = (batch.behavior - batch.proximal).abs()[batch.mask]
    assert summed["token_mult_prob_error"] == pytest.approx(gap.exp().mean().item(), rel=1e-5)
    assert_close(summed["loss"], total.item(), rtol=1e-6, atol=1e-6)
    whole = objective(trained_policies("nemo-rl", batch, current), batch.advantage).metrics.finalize()
    assert_close(summed["trimtab/update/kl"], whole["update/kl"], rtol=1e-4, atol=1e-6)
    return total


def run_tinker(objective: Objective, batch: Any, current: Tensor) -> Tensor:
    advantage = lists(batch.advantage.expand(current.shape))
    columns = zip(lists(batch.behavior), advantage, lists(batch.mask), lists(batch.proximal), strict=True)
    data = [
        SimpleNamespace(
            loss_fn_inputs={"logprobs": logp, "advantages": value, "mask": mask.float(), "old_logprobs": old}
        )
        for logp, value, mask, old in columns
    ]
    return tinker.custom_loss(objective)(data, lists(current))[0]


def run_slime(objective: Objective, batch: Any, current: Tensor) -> Tensor:
    tokens = objective.aggregation.kind == "token-mean"
    keywords = {"name": objective.name, **OPTIONS.get(objective.name, {})}
    if objective.aggregation != built(objective.name).aggregation:
        keywords["aggregation"] = objective.aggregation.kind
        keywords.pop("length_max", None)
    args = Namespace(trimtab_objective=keywords, calculate_per_token_loss=tokens)
    scored = lists(current)
    lengths = [len(one) for one in scored]
    fields = {
        "response_lengths": lengths,
        "total_lengths": lengths,
        "unconcat_tokens": scored,
        "loss_masks": lists(batch.mask.int()),
        "advantages": lists(batch.advantage.expand(current.shape)),
        "log_probs": lists(batch.proximal),
        "rollout_log_probs": lists(batch.behavior),
    }
    loss, _ = slime.loss(args, fields, current, lambda flat: flat.sum())
    return loss / (cut(batch.mask).sum() if tokens else len(current))


def run_areal(objective: Objective, batch: Any, current: Tensor) -> Tensor:
    """Packed rows, as AReaL trains."""
    size = current.shape[1]
    data = {
        "logprobs": batch.behavior.reshape(-1),
        "prox_logp": batch.proximal.reshape(-1),
        "advantages": batch.advantage.expand(current.shape).reshape(-1),
        "loss_mask": batch.mask.reshape(-1).float(),
        "versions": (10 - batch.age).reshape(-1).roll(1),  # of the token itself, the rest is of the next one
        "cu_seqlens": torch.arange(0, current.numel() + 1, size),
    }
    loss = areal.actor_loss(objective)
    keywords = {"eps_clip": 0.2, "current_version": 9, "use_decoupled_loss": True}
    return loss(current.reshape(-1), torch.zeros(current.numel()), data, **keywords)


def run_openrlhf(objective: Objective, batch: Any, current: Tensor) -> Tensor:
    """Half of the micro-batches on each of two ranks, whose gradients are averaged."""
    loss = openrlhf.ObjectiveLoss(objective)
    total = current.new_zeros(())
    for part in (slice(0, 3), slice(3, None)):
        value, *_ = loss(
            current[part],
            batch.proximal[part],
            batch.advantage.expand(current.shape)[part],
            action_mask=batch.mask[part],
            rollout_log_probs=batch.behavior[part],
            dp_size=2,
            batch_num_tokens=float(batch.mask.sum()),
            global_batch_size=len(current),
        )
        total = total + value / 2
    return total


def run_verl(objective: Objective, batch: Any, current: Tensor) -> Tensor:
    """Half of the micro-batches on each of two ranks, whose gradients are averaged; log-probs carried as weights."""
    keywords = OPTIONS.get(objective.name, {}).copy()
    factor = keywords.pop("length_max", None)
    loss = verl_loss.PolicyLoss(objective.name)
    mode = verl_loss.MODES.get(objective.aggregation.kind, objective.aggregation.kind)
    counts = {"batch_num_tokens": int(batch.mask.sum()), "global_batch_size": len(current), "dp_size": 2}
    policy_loss = SimpleNamespace(trimtab=keywords)
    config = SimpleNamespace(global_batch_info=counts, loss_scale_factor=factor, policy_loss=policy_loss)
    total = current.new_zeros(())
    for part in (slice(0, 3), slice(3, None)):
        value, _ = loss(
            batch.proximal[part],
            current[part],
            batch.advantage.expand(current.shape)[part],
            batch.mask[part].float(),
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=batch.behavior[part],
        )
        total = total + value / 2
    return total


RUNS: dict[str, Trainer] = {
    "verl": run_verl,
    "prime-rl": run_prime_rl,
    "skyrl": run_skyrl,
    "nemo-rl": run_nemo_rl,
    "tinker": run_tinker,
    "slime": run_slime,
    "areal": run_areal,
    "openrlhf": run_openrlhf,
}


def built(name: str) -> Objective:
    from trimtab.objectives import objective

    return objective(name, **OPTIONS.get(name, {}))


def allowed(trainer: str, name: str) -> Objective:
    """The preset, with an aggregation that the trainer has."""
    plain, hook = built(name), HOOKS[trainer]
    if not hook.aggregations or plain.aggregation.kind in hook.aggregations:
        return plain
    return replace(plain, aggregation=Aggregation(hook.aggregations[0]))


def scored(_logits: Tensor, *, unconcat_tokens: list[Tensor], **_: Any) -> dict[str, list[Tensor]]:
    return {"log_probs": unconcat_tokens}


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the adapters import from NeMo-RL and slime: three enumerations, and the function that scores tokens."""
    install_nemo_rl(monkeypatch)
    monkeypatch.setattr(slime, "_score_function", lambda: scored)


def trained_policies(trainer: str, batch: Any, current: Tensor) -> PolicyLogps:
    """The log-probs as the trainer passes them to a loss."""
    logps = replace(batch.logps(), current=current)
    if trainer == "prime-rl":  # One update a batch.
        logps = replace(logps, proximal=current.detach())
    if trainer in ("slime", "tinker"):
        logps = replace(logps, mask=cut(batch.mask), turn=turns_of(cut(batch.mask)))
    return logps


@pytest.mark.parametrize("trainer", RUNS)
@in_one_test("preset", objectives())
def test_an_adapter_gives_the_loss_of_the_library(lab: Any, trainer: str, preset: str) -> None:
    objective = allowed(trainer, preset)
    reason = HOOKS[trainer].refusal(objective)
    batch = float32(lab, seed=3)
    current = batch.current.clone().requires_grad_()
    if reason is not None:
        with pytest.raises(TrimtabError):
            RUNS[trainer](objective, batch, current)
        return
    loss = RUNS[trainer](objective, batch, current)
    (grad,) = torch.autograd.grad(loss, current)
    again = batch.current.clone().requires_grad_()
    expected = objective(trained_policies(trainer, batch, again), batch.advantage).loss
    (expected_grad,) = torch.autograd.grad(expected, again)
    assert_close(loss, expected, rtol=2e-6, atol=2e-7)
    assert_close(grad, expected_grad, rtol=2e-5, atol=2e-7)
    assert grad.abs().max() > 0


def test_nemo_rl_without_log_probs_at_the_start_of_the_update(lab: Any) -> None:
    """`force_on_policy_ratio` fills `prev_logprobs` with zeros, and the ratio is 1."""
    batch, objective = float32(lab, seed=3), built("grpo")
    zeros = batch.changed(proximal=torch.zeros_like(batch.current))
    expected = objective(replace(batch.logps(), proximal=batch.current.detach()), batch.advantage).loss
    loss = nemo_rl.ObjectiveLoss(objective, replaces=NEMO_RL_LOSS)
    data = {"token_mask": zeros.mask.float(), "advantages": zeros.advantage.expand(zeros.current.shape)}
    data |= {"prev_logprobs": zeros.proximal, "generation_logprobs": zeros.behavior}
    shifted = {name: torch.nn.functional.pad(value, (1, 0)) for name, value in data.items()}
    count = torch.tensor(len(zeros.current))
    value, _ = loss(zeros.current, {**shifted, "sample_mask": torch.ones(len(zeros.current))}, count, zeros.mask.sum())
    assert_close(value, expected, rtol=2e-6, atol=2e-7)
