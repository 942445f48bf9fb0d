"""Configuration lines name what they leave out, and the adapter that leaves out nothing."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.adapters.config_lines import lines

EXACTLY = "# exactly this loss, with Trimtab's adapter (docs/adapters.md)"


def test_the_kl_term_of_an_objective_is_left_out_and_said_so() -> None:
    plain, with_kl = lines("grpo", {}), lines("grpo", {"kl_coef": 0.1})
    for key, name in (("verl", "verl"), ("trl", "TRL"), ("miles", "Miles")):
        own, changed = (text[key].partition(f"\n{EXACTLY}")[0] for text in (plain, with_kl))
        assert changed == f"{own}\n# kl_coef and entropy_coef are left out: set {name}'s own"
    assert with_kl["trimtab"] == '[objective]\nname = "grpo"\nkl_coef = 0.1'


@pytest.mark.parametrize(
    ("preset", "overrides", "trl", "verl"),
    [
        ("token-tis", {}, 'objective("token-tis")', "loss_mode=trimtab-token-tis"),
        (
            "icepop",
            {"weight_max": 1.5},
            'objective("icepop", weight_max=1.5)',
            "loss_mode=trimtab-mine, and",
        ),
        ("m2po", {}, 'objective("m2po")', None),  # it has statistics of the whole update, which verl's hook lacks
        ("soup", {}, None, None),
    ],
)
def test_the_adapter_that_has_exactly_this_loss_is_named(
    preset: str, overrides: dict[str, Any], trl: str | None, verl: str | None
) -> None:
    for key, named in (("trl", trl), ("verl", verl)):
        text = lines(preset, overrides)[key]
        if named is None:
            assert EXACTLY not in text
        else:
            assert f"{EXACTLY}:\n" in text
            assert named in text.splitlines()[-1]
