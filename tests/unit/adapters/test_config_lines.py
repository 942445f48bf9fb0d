"""Configuration lines are valid where they are read, and name what they leave out and what leaves out nothing."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from typing import Any

import yaml
from tests.support.named_cases import in_one_test

import trimtab
from trimtab.adapters.config_lines import lines, lines_for
from trimtab.adapters.config_lines.adapter_lines import written
from trimtab.adapters.hooks import HOOKS
from trimtab.objectives import objective, objectives
from trimtab.objectives.lookup import from_section

EXACTLY = "# exactly this loss, with Trimtab's adapter (docs/adapters.md):"


def overrides(text: str) -> dict[str, str]:
    """The overrides of a command line, by key, as a shell passes them on."""
    return dict(word.split("=", 1) for word in shlex.split(text, comments=True))


def options(text: str) -> dict[str, Any]:
    call = ast.parse(text).body[0]
    return {word.arg: ast.literal_eval(word.value) for word in call.value.keywords if word.arg}


@in_one_test("preset", objectives())
def test_lines_are_valid_in_every_framework(preset: str) -> None:
    """What they mean in verl and TRL: tests/e2e/test_printed_lines.py."""
    result = lines(preset, {})
    assert list(result) == ["trimtab", "verl", "trl", "miles"]
    assert from_section(tomllib.loads(result["trimtab"])["objective"]) == trimtab.objective(preset)
    keys = overrides(result["verl"])
    assert all(re.fullmatch(r"\+?(algorithm|actor_rollout_ref)\.[\w.]+", key) for key in keys)
    ast.parse(result["trl"])
    miles = [line for line in result["miles"].splitlines() if not line.startswith(("--", "# "))]
    assert isinstance(yaml.safe_load("\n".join(miles) or "{}"), dict)
    assert not miles or any(line.startswith("--custom-config-path ") for line in result["miles"].splitlines())
    for name in ("verl", "TRL", "Miles"):
        text = result[name.lower()]
        own = not text.startswith((f"# {name}'s own losses lack {preset}: ", f"# {name} cannot train {preset}, "))
        assert own or text.count("\n") or preset in ("oapl", "luffy")


def test_the_kl_term_of_an_objective_is_left_out_and_said_so() -> None:
    plain, with_kl = lines("grpo", {}), lines("grpo", {"kl_coef": 0.1})
    for key, name in (("verl", "verl"), ("trl", "TRL"), ("miles", "Miles")):
        changed = with_kl[key].partition(f"\n{EXACTLY}")[0]
        assert changed == f"{plain[key]}\n# differs: kl_coef and entropy_coef are left out: set {name}'s own"
    assert with_kl["trimtab"] == '[objective]\nname = "grpo"\nkl_coef = 0.1'


def test_the_adapter_is_named_where_the_trainer_s_own_loss_differs_and_only_there() -> None:
    tis, mask = (lines_for("verl", name, {"weight_max": 1.5}) for name in ("token-tis", "geo-mask-token-tis"))
    assert EXACTLY not in tis
    assert mask.partition(EXACTLY)[2].splitlines()[1:] == [
        "# actor_rollout_ref.actor.policy_loss.loss_mode=trimtab-geo-mask-token-tis",
        "# +actor_rollout_ref.actor.policy_loss.trimtab.weight_max=1.5",
    ]


def test_what_a_trainer_lacks_is_its_adapter_s_or_the_nearest_preset_s_with_the_reason() -> None:
    """M2PO needs statistics of the whole update, which TRL's adapter has."""
    trl = lines_for("trl", "m2po", {"tau": 0.1}).splitlines()
    assert trl[-1] == 'trimtab.adapters.trl.GRPOTrainer(..., objective=trimtab.objective("m2po", tau=0.1))'
    cannot, nearest, *rest = lines_for("verl", "m2po", {"tau": 0.1}).splitlines()
    assert cannot.startswith(
        "# verl cannot train m2po, with Trimtab's adapter or without it: it needs statistics of the"
    )
    assert nearest.startswith("# differs: nearest is token-bypass; ")
    assert rest == lines_for("verl", "token-bypass", {}).splitlines()
    assert overrides("\n".join(rest))["algorithm.rollout_correction.bypass_mode"] == "True"
    for trainer in ("verl", "trl", "miles", "prime-rl"):
        assert lines_for(trainer, "oapl", {}).count("\n") == 0
    alp = lines_for("trl", "token-alp", {}).splitlines()
    assert alp[-1] == 'trimtab.adapters.trl.GRPOTrainer(..., objective=trimtab.objective("token-alp-bypass"))'
    assert '("token-bypass", clip_high=0.28)' in lines_for("trl", "soup", {})


def test_a_ratio_to_the_sampler_is_never_written_as_that_to_the_proximal_policy() -> None:
    for preset, rule in (("dppo", "dppo_tv"), ("dppo-kl", "dppo_kl")):
        of_verl = overrides(lines_for("verl", preset, {}))
        assert of_verl["actor_rollout_ref.actor.policy_loss.loss_mode"] == rule
        assert of_verl["actor_rollout_ref.actor.clip_ratio_c"] == "20", "verl's own default is 3"
        assert not [key for key in of_verl if "rollout_rs" in key]
    for preset in objectives():
        text = lines_for("trl", preset, {})
        if objective(preset).ratio.over == "behavior" and preset != "vespo":
            assert "\nGRPOConfig(" not in f"\n{text}", preset
        assert "=inf" not in "".join(lines(preset, {}).values()), preset
    for trainer in ("verl", "trl"):
        assert "centers nothing" in lines_for(trainer, "score-centering", {})


def test_infinite_and_small_bounds_are_numbers_where_they_are_read() -> None:
    """Python has no `inf`; YAML writes infinity as `.inf`, and reads `1e-05`, which has no dot, as text."""
    infinity = float("inf")
    for preset, key in (("token-tis", "weight_max"), ("dapo", "clip_high")):
        assert '=float("inf"),' in lines_for("trl", preset, {key: infinity})
    bands = {"keep_max": infinity, "weight_min": 1e-5, "weight_max": infinity}
    mis = yaml.safe_load(lines_for("miles", "geo-mask-token-tis", bands).partition("# mis.yaml")[2])
    assert [mis[key] for key in ("rs_upper_bound", "tis_lower_bound", "tis_upper_bound")] == [infinity, 1e-5, infinity]
    for trainer, preset, bound in (("miles", "ipo", {"divergence_max": 1e-5}), ("slime", "gspo", {"clip_low": 3e-5})):
        settings = yaml.safe_load(lines_for(trainer, preset, bound).partition("# trimtab.yaml\n")[2])
        assert settings == {"trimtab_objective": {"name": preset, **bound}}


def test_the_words_of_the_mismatch_corrections() -> None:
    tis = lines("token-tis", {"weight_max": 1.5})
    correction = "algorithm.rollout_correction"
    verl = overrides(tis["verl"])
    assert (verl[f"{correction}.rollout_is"], verl[f"{correction}.rollout_is_threshold"]) == ("token", "1.5")
    assert options(tis["trl"])["vllm_importance_sampling_mode"] == "token_truncate"
    assert options(tis["trl"])["vllm_importance_sampling_clip_max"] == 1.5
    assert "--use-tis\n--tis-clip 1.5\n--tis-clip-low 0" in tis["miles"]
    assert "calibrate = true" in tis["trimtab"]

    icepop = lines("icepop", {"weight_min": 0.5, "weight_max": 5.0})
    # Quoted: unquoted, Hydra and YAML read 0.5_5 as the number 0.55.
    assert overrides(icepop["verl"])[f"{correction}.rollout_is_threshold"] == '"0.5_5"'
    assert options(icepop["trl"])["vllm_importance_sampling_clip_min"] == 0.5
    assert "icepop_function\n--tis-clip 5\n--tis-clip-low 0.5" in icepop["miles"]


def test_verl_gets_the_reciprocals_of_a_geometric_band() -> None:
    findings = {"keep_min": 0.8, "keep_max": 1.25, "weight_min": 0.5, "weight_max": 2.0}
    result = lines("geo-mask-token-tis", findings)
    verl = overrides(result["verl"])
    assert verl["algorithm.rollout_correction.rollout_rs"] == "seq_mean_k1"
    assert verl["algorithm.rollout_correction.rollout_rs_threshold"] == '"0.8_1.25"'
    lopsided = overrides(lines("geo-mask", {"keep_min": 0.99, "keep_max": 1.001})["verl"])
    assert lopsided["algorithm.rollout_correction.rollout_rs_threshold"] == '"0.999001_1.0101"'
    mis = yaml.safe_load(result["miles"].partition("# mis.yaml")[2])
    weight = {"use_tis": True, "tis_level": "token", "tis_mode": "clip", "tis_batch_normalize": False}
    weight |= {"tis_lower_bound": 0.5, "tis_upper_bound": 2.0}
    mask = {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.8, "rs_upper_bound": 1.25}
    assert mis == weight | mask | {"rs_veto_threshold": None}
    assert "no mask that keeps where 0.8 ≤ ρ_geo ≤ 1.25" in result["trl"]


@in_one_test("trainer", [*HOOKS, "trimtab"])
def test_every_trainer_has_lines_for_what_its_hook_carries(trainer: str) -> None:
    text = lines_for(trainer, "geo-mask-token-tis", {"weight_max": 1.5})
    assert "1.5" in text
    assert "cannot train" not in text
    assert "# differs: prime-rl divides by token-mean" in lines_for("prime-rl", "icepop", {})
    kwargs = tomllib.loads(lines_for("prime-rl", "icepop", {"normalize": False}))["trainer"]["loss"]["kwargs"]
    assert kwargs == {"objective": "icepop", "normalize": False, "aggregation": "token-mean"}
    parts = {"mask": [{"kind": "k3", "reduce": "mean", "max": 0.1}]}
    settings = yaml.safe_load(lines_for("slime", "grpo", parts).partition("# trimtab.yaml\n")[2])
    assert settings == {"trimtab_objective": {"name": "grpo", **parts}}


def test_values_are_written_in_each_language() -> None:
    value = {"a": [1, float("inf"), True], "b": "x y", "c": "token-mean"}
    assert ast.literal_eval(written({"a": [1, True, None], "b": "x"}, "python")) == {"a": [1, True, None], "b": "x"}
    assert written(float("inf"), "python") == 'float("inf")'
    assert yaml.safe_load(written(value, "yaml")) == value
    assert tomllib.loads(f"v = {written(value, 'toml')}")["v"] == value
    assert written(value, "hydra") == '{a:[1, inf, True], b:"x y", c:token-mean}'


def test_parts_of_every_level_have_their_own_words() -> None:
    """Names and bounds follow the level and the reduction of a part, not those of the presets that use it."""
    correction = "algorithm.rollout_correction"

    def of(trainer: str, **parts: Any) -> str:
        return lines_for(trainer, "reinforce" if trainer == "verl" else "grpo", parts)

    for level, verl in (("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")):
        mask = [{"kind": "band", "level": level, "min": 0.5, "max": 2.0}]
        assert overrides(of("verl", mask=mask))[f"{correction}.rollout_rs"] == verl
        text = of("miles", mask=mask, weight={"level": level})
        assert yaml.safe_load(text.partition("# mis.yaml")[2])["rs_level"] == level
    for reduce, verl in (("token", "token_k3"), ("mean", "seq_mean_k3"), ("max", "seq_max_k3"), ("sum", "seq_sum_k3")):
        mask = [{"kind": "k3", "reduce": reduce, "max": 0.1}]
        assert overrides(of("verl", mask=mask))[f"{correction}.rollout_rs"] == verl
    lacks = "no mask that keeps where mean_t tv(π_old/μ) ≤ 0.1"
    assert lacks in of("verl", mask=[{"kind": "tv", "reduce": "mean", "max": 0.1}])
    for trainer in ("verl", "trl", "miles"):
        assert "no weight sg[min(w_t, 2)], w = π/μ" in of(trainer, weight={"over": "current"})
    assert "off_policy_mask_threshold=0.1" in of("trl", mask=[{"kind": "opsm", "delta": 0.1}])
    assert "no mask that keeps where not (A > 0" in of("trl", mask=[{"kind": "opsm", "delta": 0.1, "sign": "positive"}])
    assert "rs_veto_threshold: 0.001" in of("miles", mask=[{"kind": "veto", "min": 1e-3}], weight={})
    # verl reads a lower bound of 0 as none: the smallest number it accepts stands for it.
    for low, shown in ((0.0, 1e-06), (0.5, 0.5)):
        weight = {"level": "sequence", "bound": "mask", "min": low, "max": 2.0}
        assert overrides(of("verl", weight=weight))[f"{correction}.rollout_is_threshold"] == f'"{shown:g}_2"'
    # Miles has flags for a token weight that is not normalized, and its helper for all others.
    for level, normalize in (("token", False), ("token", True), ("sequence", False)):
        text = of("miles", weight={"level": level, "normalize": normalize})
        assert ("# mis.yaml" in text) == (normalize or level != "token")
    assert overrides(lines_for("verl", "cispo", {}))["actor_rollout_ref.actor.clip_ratio_high"] == "4"


def test_bypass_says_what_differs_in_the_surrogate() -> None:
    parts = {"ratio": {"over": "behavior", "level": "geometric"}, "surrogate": {"kind": "clipped", "dual": 3.0}}
    assert "# differs: verl's gspo has no dual clip" in lines_for("verl", "composed", parts)
