"""The noise of ALP that is printed below its loss."""

from __future__ import annotations

import torch
from torch import nn
from torch.testing import assert_close

from trimtab.objectives.alp_noise import perturb


def test_every_layer_gets_its_own_normal_noise_of_its_own_size() -> None:
    layers = nn.ModuleList([nn.Identity(), nn.Identity()])
    log_sigma = torch.tensor([0.1, 0.01], dtype=torch.float64).log().requires_grad_()
    hidden = torch.full((64, 64), 3.0, dtype=torch.float64)

    def noise(seed: int) -> list[torch.Tensor]:
        handles = perturb(layers, log_sigma, seed)
        found = [layer(hidden) - hidden for layer in layers]
        assert_close(layers[0](hidden) - hidden, found[0], msg="a recomputed forward draws the same")
        for handle in handles:
            handle.remove()
        assert layers[0](hidden) is hidden
        return found

    first, second = noise(0)
    for found, sigma in ((first, 0.1), (second, 0.01)):
        assert abs(found.std() / sigma - 1) < 0.05
        assert abs(found.mean()) < 0.05 * sigma
    draws = [value / value.std() for seed in (0, 1) for value in noise(seed)]
    correlations = torch.corrcoef(torch.stack([draw.flatten() for draw in draws]))
    assert (correlations - torch.eye(4)).abs().max() < 0.1, "layers and updates are independent"
    # The gradient of ln sigma is sigma times the sum of noise and gradient: here the noise itself.
    (first * 2).sum().backward()
    assert_close(log_sigma.grad, torch.stack([2 * first.detach().sum(), torch.zeros(()).double()]))
