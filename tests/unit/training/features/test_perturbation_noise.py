"""Noise on a shared prompt: one draw for a group, or one for each response."""

from __future__ import annotations

import pytest
import torch
from tests.support.trajectories import trajectory

from trimtab.config import load_config
from trimtab.models import laboratory
from trimtab.models.logprobs import score
from trimtab.training.batching import to_tensors
from trimtab.training.features.feature import ForwardPass
from trimtab.training.features.perturbation_feature import PerturbationFeature


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
