"""Settings that only a trainer's own loss reads are refused by each adapter, with what replaces them."""

from __future__ import annotations

import dataclasses
import re
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support import adapter_calls
from tests.support.peer_modules import NEMO_RL_LOSS, install_nemo_rl

from trimtab.adapters import areal, nemo_rl, openrlhf, skyrl, slime
from trimtab.adapters.loss_settings import SETTINGS, LossSetting, LossSettings, chosen, refuse
from trimtab.adapters.trl_shared import check_settings
from trimtab.errors import TrimtabError
from trimtab.objectives import keywords_of, objective, objectives
from trimtab.objectives.keywords import PART_KEYS

ZEROS = torch.zeros(1, 2)


def section(settings: LossSettings, **changed: Any) -> SimpleNamespace:
    """A configuration with every setting of a table at its default, but for the changed ones (`a__b` for a.b)."""
    root = SimpleNamespace()
    for name, one in settings.items():
        *parents, last = name.split(".")
        here = root
        for parent in parents:
            here.__dict__.setdefault(parent, SimpleNamespace())
            here = getattr(here, parent)
        setattr(here, last, changed.get(name.replace(".", "__"), one.default))
    return root


def call_skyrl(config: SimpleNamespace) -> None:
    config.loss_reduction, config.max_seq_len = "sequence_mean", None
    skyrl.policy_loss("grpo")(ZEROS, ZEROS, ZEROS, config)


def call_slime(config: SimpleNamespace) -> None:
    args = Namespace(trimtab_objective={"name": "grpo", "kl_coef": 0.1}, calculate_per_token_loss=False, **vars(config))
    batch = {"ref_log_probs": [ZEROS[0]], "loss_masks": [ZEROS[0]]}
    slime._check_settings(slime._objective(args, ""), args, batch)


def call_tis(config: SimpleNamespace) -> None:
    one = [torch.zeros(2)]
    args = Namespace(trimtab_objective="token-tis", use_tis=True, **vars(config))
    adapter_calls.call_tis(args, torch.zeros(2), one, one, one)


def call_areal(config: SimpleNamespace) -> None:
    data = {"logprobs": ZEROS, "prox_logp": ZEROS, "advantages": ZEROS, "loss_mask": ZEROS}
    loss = areal.actor_loss("grpo", aggregation="token-mean")
    loss(ZEROS, ZEROS, data, current_version=1, use_decoupled_loss=True, **vars(config))


def call_nemo_rl(config: SimpleNamespace) -> None:
    nemo_rl.ObjectiveLoss("grpo", replaces=SimpleNamespace(**{**vars(NEMO_RL_LOSS), **vars(config)}))


def call_trl(config: SimpleNamespace) -> None:
    read = {"steps_per_generation": 1, "gradient_accumulation_steps": 1, "use_vllm": False, "beta": 0.0}
    values = {**{name: one.default for name, one in SETTINGS["TRL"].items()}, **read, "scale_rewards": "group"}
    kind = dataclasses.make_dataclass("Config", [(key, Any, value) for key, value in values.items()])
    check_settings(objective("grpo"), kind(**vars(config)), kind)


CALLS: dict[str, Callable[[SimpleNamespace], None]] = {
    "TRL": call_trl,
    "SKYRL": call_skyrl,
    "NEMO_RL": call_nemo_rl,
    "MILES": call_slime,
    "MILES_TIS": call_tis,
    "AREAL": call_areal,
}


@pytest.mark.parametrize(("table", "name"), [(table, name) for table in CALLS for name in SETTINGS[table]])
def test_each_setting_is_refused_where_it_is_not_the_default(
    table: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nemo_rl(monkeypatch)
    settings, call = SETTINGS[table], CALLS[table]
    call(section(settings))
    default = settings[name].default
    other = "other" if default is None or isinstance(default, str) else not default if default in (0, 1) else 0.123
    with pytest.raises(TrimtabError, match=rf"{re.escape(name)}: only .*'s own loss reads this, leave it out\. In "):
        call(section(settings, **{name.replace(".", "__"): other}))


def test_openrlhf_refuses_when_the_actor_builds_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(
        clip_eps_low: Any = 0.2,
        clip_eps_high: Any = 0.2,
        dual_clip: Any = None,
        policy_loss_type: Any = "ppo",
        vllm_is_truncated_threshold: Any = None,
        vllm_is_correction_type: Any = "tis",
    ) -> None: ...

    modules = {name: SimpleNamespace(PolicyLoss=own) for name in openrlhf.MODULES}
    monkeypatch.setattr(openrlhf, "peer_module", lambda _, name: modules[name])
    openrlhf.install("grpo")
    build: Any = modules[openrlhf.MODULES[-1]].PolicyLoss
    plain = {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "dual_clip": None, "policy_loss_type": "ppo"}
    plain["vllm_is_truncated_threshold"] = None
    assert isinstance(build(**plain, vllm_is_correction_type="tis"), openrlhf.ObjectivePolicyLoss)
    with pytest.raises(TrimtabError, match=r"vllm_is_truncated_threshold: only OpenRLHF's own loss"):
        build(**{**plain, "vllm_is_truncated_threshold": [0.9, 1.1]})
    with pytest.raises(TrimtabError, match=r"clip_eps_high: only OpenRLHF's own .*In install: clip_eps_high is clip_h"):
        build(**{**plain, "clip_eps_high": 0.28})
    with pytest.raises(TrimtabError, match="clip_eps_high: only OpenRLHF's own"):
        build(0.2, 0.28)


def test_settings_of_another_loss_other_advantages_or_without_effect_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_nemo_rl(monkeypatch)
    with pytest.raises(TrimtabError, match="reference_policy_kl_penalty has no effect: grpo has kl_coef = 0"):
        call_nemo_rl(SimpleNamespace(reference_policy_kl_penalty=0.01))
    batch = {"loss_masks": []}
    args = Namespace(trimtab_objective="grpo", calculate_per_token_loss=False, advantage_estimator="gspo")
    with pytest.raises(TrimtabError, match="--advantage-estimator gspo names a loss, which this one replaces"):
        slime._check_settings(slime._objective(args, ""), args, batch)
    mean = {"name": "dr-grpo", "aggregation": "token-mean"}
    args = Namespace(trimtab_objective=mean, calculate_per_token_loss=True, grpo_std_normalization=True)
    with pytest.raises(TrimtabError, match="without the standard deviation: set --disable-grpo-std-normalization"):
        slime._check_settings(slime._objective(args, ""), args, batch)
    config = SimpleNamespace(loss_reduction="token_mean", max_seq_len=None, grpo_norm_by_std=True)
    with pytest.raises(TrimtabError, match=r"without the standard deviation: set trainer\.algorithm\.grpo_norm_by_std"):
        skyrl.policy_loss("dr-grpo", aggregation="token-mean")(ZEROS, ZEROS, ZEROS, config)


def test_what_replaces_a_setting_exists() -> None:
    keywords = (
        {keyword for name in objectives() for keyword in keywords_of(name)} | set(PART_KEYS) | {"KEYWORD", "NAME"}
    )
    known = keywords | set(objectives())
    for table, settings in SETTINGS.items():
        for name, one in settings.items():
            words = set(re.findall(r"[a-z0-9_-]+", one.instead))
            assert not one.instead or words & known or "trimtab" in words, (table, name)
            named = {word for word in words if "_" in word and not word.startswith(("clip_ratio", "_"))}
            assert named <= keywords, (table, name)
            assert one.keyword in {"", *keywords}


def test_a_setting_that_a_configuration_lacks_is_at_its_default() -> None:
    table = {"a.b": LossSetting(1), "c": LossSetting(None, "clip_low")}
    for nothing in (None, SimpleNamespace(), {}, {"a": None}, SimpleNamespace(a={"b": 1}, c=None)):
        assert chosen(table, nothing) == {}
    assert chosen(table, {"a": SimpleNamespace(b=2), "c": 3}) == {"a.b": 2, "c": 3}
    assert chosen(table, {"a": {"b": None}}) == {"a.b": None}
    with pytest.raises(TrimtabError, match=r"a\.b, c: only X's own loss reads this, .*: a\.b has no equivalent; c is"):
        refuse("X", table, ["a.b", "c"])
