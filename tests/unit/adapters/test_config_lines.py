"""Configuration lines name what they leave out."""

from __future__ import annotations

from trimtab.adapters.config_lines import lines


def test_the_kl_term_of_an_objective_is_left_out_and_said_so() -> None:
    plain, with_kl = lines("grpo", {}), lines("grpo", {"kl_coef": 0.1})
    for key, name in (("verl", "verl"), ("trl", "TRL"), ("miles", "Miles")):
        assert with_kl[key] == f"{plain[key]}\n# kl_coef and entropy_coef are left out: set {name}'s own"
    assert with_kl["trimtab"] == '[objective]\nname = "grpo"\nkl_coef = 0.1'
