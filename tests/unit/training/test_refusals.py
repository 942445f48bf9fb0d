"""Recipes that contradict themselves are refused before a model is loaded, in one line that says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.config import load_config
from trimtab.errors import TrimtabError
from trimtab.objectives.calibrate import from_section
from trimtab.training import refusals

LAG = {"max_lag": 2}


def check(name: str = "token-tis", keywords: dict[str, Any] | None = None, **trainer: Any) -> None:
    extra = {"length_max": 4} if name in ("dr-grpo", "luffy") else {}
    config = load_config({"objective": {"name": name, **extra, **(keywords or {})}, "trainer": trainer})
    refusals.check(config, from_section(config.objective.model_dump()))


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr-grpo", "gspo", "cispo"])
def test_an_objective_that_never_reads_the_behavior_policy_is_refused(name: str) -> None:
    with pytest.raises(TrimtabError, match=f"'{name}' tokens of older policies.*never reads.*token-tis"):
        check(name, **LAG)
    check(name, max_lag=0)


def test_a_kl_that_reads_the_behavior_policy_corrects_no_policy_term() -> None:
    with pytest.raises(TrimtabError, match=r"'grpo' tokens of older policies.*never reads"):
        check("grpo", {"kl": "unbiased", "kl_coef": 0.1}, **LAG)


@pytest.mark.parametrize(
    "name",
    ["token-tis", "seq-tis", "token-mis", "icepop", "geo-mask", "k3-mask", "opsm", "m2po", "token-bypass", "oapl"],
)
def test_objectives_that_correct_are_welcome(name: str) -> None:
    check(name, **LAG)


@pytest.mark.parametrize(
    ("trainer", "line"),
    [
        ({"in_flight": "discard"}, 'in_flight = "discard" has no effect.*max_lag above 0'),
        ({"in_flight": "continue", "max_lag": 0}, 'in_flight = "continue" has no effect'),
        (
            {"max_lag": 3, "minibatches": 2, "epochs": 2},
            "max_lag = 3 is less than the 4 updates.*to 4 or more, or to 0",
        ),
        ({"max_lag": 3, "dynamic_sampling": True, "oversample": 2.0}, "oversample has no effect"),
    ],
)
def test_settings_without_effect_are_refused(trainer: dict[str, Any], line: str) -> None:
    with pytest.raises(TrimtabError, match=line):
        check(**trainer)


def test_methods_that_make_their_own_lag_are_refused() -> None:
    with pytest.raises(TrimtabError, match=r"\[prefix\].*leave trainer.max_lag out"):
        check("soup", **LAG)


def test_several_behavior_policies_in_one_response_are_refused_where_one_is_needed() -> None:
    with pytest.raises(TrimtabError, match="'oapl' needs one behavior policy per response"):
        check("oapl", in_flight="continue", **LAG)
    check("oapl", in_flight="discard", **LAG)
