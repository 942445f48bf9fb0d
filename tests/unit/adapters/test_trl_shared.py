"""Options of TRL's own loss are refused with what replaces them here."""

from __future__ import annotations

import dataclasses

import pytest

from trimtab.adapters.trl_shared import check_settings
from trimtab.errors import TrimtabError
from trimtab.objectives import objective


@dataclasses.dataclass
class Config:
    """The options of `GRPOConfig` that `check_settings` reads, with TRL's defaults."""

    epsilon: float = 0.2
    delta: float | None = None
    top_entropy_quantile: float = 1.0
    sapo_temperature_pos: float = 1.0
    steps_per_generation: int = 1
    gradient_accumulation_steps: int = 1
    use_vllm: bool = False
    beta: float = 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.1}, "reads this, leave it out. In the objective: epsilon is clip_low and"),
        ({"delta": 4.0, "sapo_temperature_pos": 2.0}, "delta is clip_dual; sapo_temperature_pos is tau_positive, of"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile has no equivalent"),
    ],
)
def test_a_refused_option_names_its_replacement(options: dict[str, float], message: str) -> None:
    with pytest.raises(TrimtabError) as refused:
        check_settings(objective("grpo"), Config(**options), Config)
    assert message in str(refused.value)
