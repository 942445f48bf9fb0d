"""Without a name, a loss is found among presets and compositions of parts, with its bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import trimtab
from trimtab.check_loss.check import check
from trimtab.check_loss.probes import of_objective
from trimtab.check_loss.signatures import of_function
from trimtab.objectives.ratio import Ratio
from trimtab.objectives.surrogates import Reinforce


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("icepop", {"weight_min": 0.4, "weight_max": 3.5, "clip_high": 0.28}),
        ("trm", {"k2_max": 0.06, "k3_max": 0.0012}),
        ("dr-grpo", {"length_max": 512, "kl_coef": 0.01}),
    ],
)
def test_a_preset_is_found_with_its_bounds(name: str, keywords: dict[str, Any]) -> None:
    answer = check(of_objective(trimtab.objective(name, **keywords)))
    assert answer.equal
    settings = dict(answer.nearest[0].settings)
    assert settings == {"name": name, **keywords}
    assert trimtab.objective(**settings) == trimtab.objective(name, **keywords)


def test_a_composition_is_found_where_no_preset_is_it() -> None:
    def cispo_of_responses(current: Tensor, proximal: Tensor, mask: Tensor, advantage: Tensor, tokens: int) -> Tensor:
        log_ratio = torch.where(mask, current - proximal, 0.0).detach()
        mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        weight = mean.clamp(-20, 20).exp().clamp(max=4.0)
        return torch.where(mask, -weight * advantage * current, 0.0).sum() / tokens

    answer = check(of_function(cispo_of_responses))
    assert answer.equal
    rebuilt = trimtab.objective(**dict(answer.nearest[0].settings))
    assert (rebuilt.ratio, rebuilt.surrogate) == (Ratio("geometric", "proximal"), Reinforce(4.0))
    assert answer.nearest[0].lines == [
        'name = "composed"',
        'ratio = {level = "geometric", over = "proximal"}',
        'surrogate = {kind = "reinforce", ceiling = 4}',
    ]


def test_what_no_probe_can_tell_apart_is_said() -> None:
    answer = check(of_objective(trimtab.objective("seq-alp")))
    assert answer.equal
    assert answer.others == "the same loss: seq-alp"
