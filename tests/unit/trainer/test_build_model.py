"""LoRA adapters are a function of the run's seed, whatever was drawn before."""

from __future__ import annotations

import torch

from trimtab.trainer.build_model import prepare_model
from trimtab.trainer.config import load_config
from trimtab.trainer.models import laboratory


def adapters(seed: int) -> torch.Tensor:
    config = load_config("laboratory", ["model.lora.rank=2", f"seed={seed}"])
    model = prepare_model(laboratory.build(0)[0], config)
    return torch.cat([weight.flatten() for name, weight in model.named_parameters() if ".lora_A." in name])


def test_equal_seeds_give_equal_adapters() -> None:
    first = adapters(0)
    state = torch.get_rng_state()
    assert torch.equal(first, adapters(0))
    assert not torch.equal(first, adapters(1))
    assert torch.equal(state, torch.get_rng_state())
