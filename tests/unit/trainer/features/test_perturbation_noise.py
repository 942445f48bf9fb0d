"""Noise on a shared prompt: one draw for a group, or one for each response; what is reported of its size."""

from __future__ import annotations

import pytest
import torch
from tests.support.trajectories import trajectory

from trimtab.trainer.config import load_config
from trimtab.trainer.features.feature import ForwardPass, StepRecord
from trimtab.trainer.features.perturbation_feature import PerturbationFeature
from trimtab.trainer.models import laboratory
from trimtab.trainer.models.logprobs import score
from trimtab.trainer.packing import to_tensors
from trimtab.trainer.rollout.responses import RolloutStats
from trimtab.trainer.step_statistics import StepStatistics


@torch.no_grad()
@pytest.mark.parametrize("per_response", [False, True])
def test_two_responses_see_one_noisy_prompt_or_two(per_response: bool) -> None:
    """The first token of a response follows from the prompt alone: its log-prob shows the noise there."""
    model, _ = laboratory.build(0)
    rows = [trajectory(0, [9, 10, 11], prompt=[5, 6, 7, 8])] * 2
    micro = to_tensors(rows, [0, 1], 0, torch.device("cpu"), share_prompts=not per_response)
    feature = PerturbationFeature(load_config("token-alp", ["perturbation.std=0.1"]), model)
    with feature.forward(ForwardPass(micro, "train")) as options:
        noisy = score(model, micro.tokens, **options).logp
    plain = score(model, micro.tokens).logp
    assert (noisy - plain).abs().min() > 1e-4
    first, second = noisy[:, 0].tolist()
    assert (first != second) == per_response
    assert noisy[0, 1] != noisy[1, 1]


@pytest.mark.parametrize(("std", "mean"), [("0.1", 0.11), ("[0.1, 0.3]", 0.18)])
def test_the_drift_of_sigma_and_the_gradient_of_its_logarithm_are_reported(std: str, mean: float) -> None:
    """Two layers: gradients (3, 4) and (0, 2) in two updates, sigmas times 1.5 and 0.7 ((.15 + .21) / .4 is .9)."""
    model, _ = laboratory.build(0)
    feature = PerturbationFeature(load_config("token-alp", [f"perturbation.std={std}"]), model)
    (log_sigma,) = feature.perturbation.parameters()
    assert log_sigma.shape == (2,)
    record = StepRecord(3, 0, [], RolloutStats(), StepStatistics())
    before = feature.end_step(record)
    assert before["perturbation/sigma_drift"] == pytest.approx(0.0, abs=1e-6)
    assert "perturbation/grad_norm" not in before  # no update was made
    for gradient in ([3.0, 4.0], [0.0, 2.0]):
        log_sigma.grad = torch.tensor(gradient)
        feature.end_backward()
    with torch.no_grad():
        log_sigma += torch.tensor([1.5, 0.7]).log()
    after = feature.end_step(record)
    assert after["perturbation/grad_norm"] == pytest.approx(3.5)
    assert after["perturbation/sigma_mean"] == pytest.approx(mean)
    assert after["perturbation/sigma_drift"] == pytest.approx(0.1 if std == "0.1" else -0.1, abs=1e-6)
