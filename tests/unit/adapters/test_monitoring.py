"""`monitor=` of the adapters: the monitor's figures and alarms, and the same loss and gradient bit for bit."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.adapter_calls import CALLS, WHOLE, areal_row, call_tis, nemo_rl_data, prime_rl_sequence
from tests.support.noisy_batch import batch as noisy_batch
from tests.support.peer_modules import install_nemo_rl
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.testing import assert_close

from trimtab.adapters import areal, nemo_rl, openrlhf, prime_rl, recording, skyrl, slime, tinker, verl_records
from trimtab.adapters.hooks import HOOKS, wrap
from trimtab.adapters.micro_batch import evaluate
from trimtab.errors import GuardStop, TrimtabError, TrimtabWarning
from trimtab.monitor import Monitor
from trimtab.objectives import PolicyLogps, objective

FIGURES = ("mismatch/k3", "mismatch/ess_token", "mean_ratio")
LOST = 4
"""Step from which the sampler does not get new weights."""
Called = tuple[Tensor, dict[str, Any]]


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """What NeMo-RL and slime import, a process without monitors, and the functions that its end would call."""
    install_nemo_rl(monkeypatch)
    monkeypatch.setattr(
        slime, "_score_function", lambda: lambda _, unconcat_tokens, **__: {"log_probs": unconcat_tokens}
    )
    recording._of_process.cache_clear()
    at_exit: list[Callable[[], Any]] = []
    exits = SimpleNamespace(register=at_exit.append, unregister=lambda _: None)
    monkeypatch.setattr(sys.modules[Monitor.__module__], "atexit", exits)
    return at_exit


def responses(step: int) -> dict[str, Any]:
    """Four responses; the sampler stays behind from step `LOST` on."""
    whole = noisy_batch(step, drift=0.0 if step < LOST else 1.5)
    return {name: value[:4] if isinstance(value, Tensor) else value for name, value in whole.items()}


def advantages(current: Tensor) -> Tensor:
    return torch.linspace(-1, 1, len(current), dtype=current.dtype)[:, None].expand(current.shape)


def call(trainer: str, one: dict[str, Any], current: Tensor, monitor: Any) -> Called:
    """Icepop in the adapter of a trainer. A loss is made at every call, as Ray makes copies of it."""
    if trainer == "slime-tis":
        return call_slime_tis(one, current, monitor)
    kinds = HOOKS[trainer].aggregations
    given = {"aggregation": "token-mean"} if kinds == ("token-mean",) else {}
    return CALLS[trainer](batch_of(one, current), current, "icepop", WHOLE, given, monitor=monitor)


def batch_of(one: dict[str, Any], current: Tensor) -> dict[str, Any]:
    batch = {"behavior": one["logp_rollout"], "proximal": current.detach(), "advantage": advantages(current)}
    return batch | {name: one[name] for name in ("mask", "step")}


def call_slime_tis(one: dict[str, Any], current: Tensor, monitor: Any) -> Called:
    args = Namespace(trimtab_objective="icepop", trimtab_monitor=monitor, use_tis=True)
    loss, _, metrics = call_tis(args, current.flatten(), current.detach(), one["logp_rollout"], one["mask"].int())
    return loss.sum(), {key: value.mean() for key, value in metrics.items()}


def update() -> None:
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()


@pytest.mark.parametrize("trainer", ["prime-rl", "skyrl", "nemo-rl", "slime", "slime-tis", "areal", "openrlhf"])
def test_the_figures_and_alarms_are_those_of_the_monitor(trainer: str, tmp_path: Path, peers: list[Any]) -> None:
    direct = Monitor(tmp_path / "direct", on_alarm=lambda _: None)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        for step in range(LOST + 3):
            one = responses(step)
            current = one["logp_train"].clone().requires_grad_()
            loss, metrics = call(trainer, one, current, str(tmp_path / "ours"))
            again = one["logp_train"].clone().requires_grad_()
            plain, _ = call(trainer, one, again, None)
            assert torch.equal(loss, plain)
            assert torch.equal(torch.autograd.grad(loss, current)[0], torch.autograd.grad(plain, again)[0])
            expected = direct.observe(**{key: one[key] for key in ("logp_train", "logp_rollout", "mask", "step")})
            for key in FIGURES if metrics else ():
                assert_close(float(metrics[f"trimtab/{key}"]), expected[key], rtol=1e-6, atol=0)
            update()
        peers[0]()  # The process ends.
    direct.close()
    ours, theirs = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()] for name in ("ours", "direct")
    )
    assert len(ours) == LOST + 3
    for key in FIGURES:
        assert [row[key] for row in ours] == pytest.approx([row[key] for row in theirs], rel=1e-6)
    alarms = [str(one.message) for one in raised if issubclass(one.category, TrimtabWarning)]
    assert any("undelivered" in text if trainer == "areal" else "k3-jump" in text for text in alarms)
    assert all(row["alarms"] == [] for row in ours[: LOST + 1])
    assert (tmp_path / "ours" / "sample.jsonl").stat().st_size > 0


@pytest.mark.parametrize("trainer", ["prime-rl", "skyrl", "nemo-rl", "slime", "slime-tis", "areal", "openrlhf"])
def test_the_environment_says_what_stops_the_training(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_STOP_ON", "length, ess")

    def train(steps: range) -> None:
        for step in steps:
            one = responses(step)
            call(trainer, one, one["logp_train"].clone().requires_grad_(), True)
            update()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(range(LOST + 5))
        with pytest.raises(GuardStop, match=f"step {LOST + 4}: ess: "):
            train(range(LOST + 5, LOST + 6))
    recording._of_process.cache_clear()
    monkeypatch.setenv("TRIMTAB_STOP_ON", "es")
    with pytest.raises(TrimtabError, match="'es' cannot be watched"):
        train(range(1))


def own_loss(current: Tensor) -> Tensor:
    """In place of a trainer's own loss."""
    return -(current.exp() * torch.linspace(1, 2, current.shape[1], dtype=current.dtype)).sum()


def record_prime_rl(monkeypatch: pytest.MonkeyPatch, one: dict[str, Any], current: Tensor, folder: str) -> Called:
    """prime-rl builds its loss from the section of its configuration, whose values are the keywords."""
    config = SimpleNamespace(DefaultLossConfig=dict, IPOLossConfig=None)
    monkeypatch.setitem(sys.modules, "prime_rl.configs.trainer", config)

    def setup(options: dict[str, float]) -> Callable[[Any], Any]:
        metrics = {"kl_tau": torch.tensor(options["kl_tau"])}
        return lambda given: SimpleNamespace(loss=own_loss(given.trainer_logprobs[None]), metrics=metrics)

    monkeypatch.setitem(sys.modules, "prime_rl.trainer.rl.loss", SimpleNamespace(setup_rl_loss_fn=setup))
    weights = torch.full_like(current[0], 0.5)  # prime-rl's own loss knows what they mean.
    rows = [prime_rl_sequence(batch_of(one, current), current, row, weights) for row in range(len(current))]
    results = [prime_rl.loss(row, monitor=folder, kl_tau=0.25) for row in rows]
    assert results[0].metrics["kl_tau"].item() == 0.25
    return torch.stack([result.loss for result in results]).sum(), dict(results[-1].metrics)


def record_openrlhf(monkeypatch: pytest.MonkeyPatch, one: dict[str, Any], current: Tensor, folder: str) -> Called:
    class PolicyLoss(torch.nn.Module):
        def __init__(self, clip_eps_low: float) -> None:
            super().__init__()
            assert clip_eps_low == 0.1

        def forward(self, log_probs: Tensor, *given: Any, dp_size: int = 1) -> tuple[Tensor, ...]:
            assert (len(given), dp_size) == (4, 2)
            return own_loss(log_probs), torch.zeros(()), torch.zeros(()), None

    modules = {name: SimpleNamespace(PolicyLoss=PolicyLoss) for name in openrlhf.MODULES}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    openrlhf.install(monitor=folder)
    loss = modules["openrlhf.trainer.ray.ppo_actor"].PolicyLoss(clip_eps_low=0.1)
    rows = (advantages(current), one["mask"])
    return loss(current, current.detach(), *rows, rollout_log_probs=one["logp_rollout"], dp_size=2)[0], {}


def record_areal(monkeypatch: pytest.MonkeyPatch, one: dict[str, Any], current: Tensor, folder: str) -> Called:
    """A packed row, as AReaL passes it; `eps_clip` is of its own loss."""

    def grpo_loss_fn(logprobs: Tensor, entropy: Tensor, input_data: Any, eps_clip: float, **_: Any) -> Tensor:
        assert (eps_clip, entropy.item(), input_data["logprobs"].ndim) == (0.2, 0.0, 1)
        return own_loss(logprobs.view(current.shape))

    actor = SimpleNamespace(grpo_loss_fn=grpo_loss_fn)
    monkeypatch.setitem(sys.modules, areal.MODULE, actor)
    monkeypatch.setitem(sys.modules, "areal.utils.environ", SimpleNamespace(is_single_controller=lambda: False))
    areal.install(monitor=folder)
    data, options = areal_row(batch_of(one, current), current)
    return actor.grpo_loss_fn(current.flatten(), torch.zeros(()), data, **options), {}


def record_nemo_rl(_: pytest.MonkeyPatch, one: dict[str, Any], current: Tensor, folder: str) -> Called:
    class Own:
        input_type = "logprob"

        def __init__(self) -> None:
            self.metric_normalizations = {"kl": "tokens"}

        def __call__(self, next_token_logprobs: Tensor, data: Any, **counts: Any) -> tuple[Tensor, dict[str, float]]:
            assert counts.keys() == {"global_valid_seqs", "global_valid_toks"}
            return own_loss(next_token_logprobs), {"kl": float("prev_logprobs" in data)}

    loss = copy.deepcopy(nemo_rl.RecordedLoss(Own(), monitor=folder))  # As Ray sends it to the workers.
    assert (loss.input_type, loss.metric_normalizations["kl"]) == ("logprob", "tokens")
    assert "trimtab/mean_ratio" in loss.metric_normalizations
    counts = {"global_valid_seqs": torch.tensor(len(current)), "global_valid_toks": one["mask"].sum()}
    value, metrics = loss(next_token_logprobs=current, data=nemo_rl_data(batch_of(one, current), current), **counts)
    assert metrics["kl"] == 1
    return value, metrics


def record_slime(_: pytest.MonkeyPatch, one: dict[str, Any], current: Tensor, folder: str) -> Called:
    given = -(current.exp() * torch.linspace(1, 2, current.shape[1], dtype=current.dtype)).flatten()
    masks = list(one["mask"].int())
    args = Namespace(trimtab_monitor=folder, use_tis=False)
    loss, kept, metrics = call_tis(args, given, current.detach(), one["logp_rollout"], masks)
    assert loss is given
    assert all(map(torch.equal, kept, masks))
    return loss.sum(), {key: value.mean() for key, value in metrics.items()}


RECORDS = {
    "prime-rl": record_prime_rl,
    "openrlhf": record_openrlhf,
    "areal": record_areal,
    "nemo-rl": record_nemo_rl,
    "slime": record_slime,
}


@pytest.mark.parametrize("trainer", RECORDS)
def test_without_an_objective_the_loss_is_the_trainer_s_own(
    trainer: str, tmp_path: Path, peers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prime_rl._own.cache_clear()
    direct, k3 = Monitor(on_alarm=lambda _: None), []
    for step in range(3):
        one = responses(step)
        current = one["logp_train"].clone().requires_grad_()
        again = one["logp_train"].clone().requires_grad_()
        loss, metrics = RECORDS[trainer](monkeypatch, one, current, str(tmp_path))
        expected = own_loss(again)
        assert_close(loss, expected, rtol=1e-12, atol=0)  # Sums over rows are in another order.
        assert torch.equal(torch.autograd.grad(loss, current)[0], torch.autograd.grad(expected, again)[0])
        figures = direct.observe(**{key: one[key] for key in ("logp_train", "logp_rollout", "mask", "step")})
        k3.append(figures["mismatch/k3"])
        for key in FIGURES if metrics else ():
            assert_close(float(metrics[f"trimtab/{key}"]), figures[key], rtol=1e-6, atol=0)
        update()
    peers[0]()  # The process ends.
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [row["mismatch/k3"] for row in rows] == pytest.approx(k3, rel=1e-6)
    assert [row.get("age") for row in rows] == [0.0 if trainer == "areal" else None] * 3


def test_no_loss_is_chosen_for_the_user() -> None:
    """Where the trainer's own loss cannot be wrapped, and where it would be replaced, an objective is named."""
    calls: dict[str, Callable[[], Any]] = {
        "SkyRL": lambda: skyrl.register(monitor=True),
        "tinker": lambda: tinker.custom_loss(dump="logps"),
        "NeMo-RL": lambda: nemo_rl.ObjectiveLoss(replaces=None),
        "OpenRLHF": lambda: openrlhf.ObjectivePolicyLoss(None),  # type: ignore[arg-type]
        "AReaL": lambda: areal.actor_loss(None),
    }
    for trainer, call in calls.items():
        with pytest.raises(TrimtabError, match=f"{trainer}: no objective is given, and this function would replace"):
            call()
    args = Namespace(trimtab_monitor=True, use_tis=True)
    with pytest.raises(TrimtabError, match="would leave the trainer's own correction out: set --get-mismatch-metrics"):
        call_tis(args, torch.ones(1), [], [], [])
    with pytest.raises(TrimtabError, match="needs trimtab_objective"):
        slime.loss(args, {}, torch.ones(1), torch.sum)


def test_each_call_of_tinker_is_a_step() -> None:
    names: list[str] = []
    monitor, direct = (Monitor(on_alarm=lambda alarm: names.append(alarm.name)) for _ in range(2))
    loss, plain = tinker.custom_loss("icepop", monitor=monitor), tinker.custom_loss("icepop")
    hooks = len(_global_optimizer_post_hooks)
    for step in range(LOST + 3):
        one = responses(step)
        rows = advantages(one["logp_train"])
        columns = zip(one["logp_rollout"], rows, one["mask"].double(), strict=True)
        data = [
            SimpleNamespace(loss_fn_inputs=dict(zip(("logprobs", "advantages", "mask"), column, strict=True)))
            for column in columns
        ]
        value, metrics = loss(data, list(one["logp_train"]))
        assert torch.equal(value, plain(data, list(one["logp_train"]))[0])
        expected = direct.observe(**{key: one[key] for key in ("logp_train", "logp_rollout", "mask", "step")})
        assert {key: metrics[f"trimtab/{key}"] for key in FIGURES} == {key: expected[key] for key in FIGURES}
    assert names.count("k3-jump") == 2  # That of `direct` too.
    tinker.custom_loss("icepop", monitor=monitor)
    assert len(_global_optimizer_post_hooks) == hooks


def test_the_driver_of_verl_shows_a_batch_a_step(tmp_path: Path) -> None:
    """The function that is wrapped changes the mask: the monitor sees the batch before."""

    def original(shown: Any, _config: Any) -> tuple[Any, dict[str, float]]:
        shown.batch["response_mask"] = torch.zeros_like(shown.batch["response_mask"])
        return shown, {"rollout_corr/kl": 0.5}

    add, direct = wrap(original, verl_records.Watch(str(tmp_path)).observe), Monitor()
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        for step in range(LOST + 3):
            one = responses(step)
            fields = {"old_log_probs": one["logp_train"], "rollout_log_probs": one["logp_rollout"]}
            fields |= {"response_mask": one["mask"].long(), "token_level_scores": one["reward"][:, None]}
            names = one["group"].numpy().astype(str).astype(object)
            _, metrics = add(SimpleNamespace(batch=fields, non_tensor_batch={"uid": names}), {})
            given = {key: one[key] for key in ("logp_train", "logp_rollout", "mask", "step", "reward")}
            expected = direct.observe(**given)
            assert metrics["rollout_corr/kl"] == 0.5
            for key in (*FIGURES, "reward/mean"):
                assert metrics[f"rollout_corr/trimtab/{key}"] == expected[key]
    assert any("k3-jump" in str(one.message) for one in raised)


def test_micro_batches_until_an_optimizer_steps_are_one_update() -> None:
    one = responses(0)
    config = SimpleNamespace(loss_reduction="sequence_mean", off_policy_correction=None)
    loss = skyrl.policy_loss("icepop", monitor=True)

    def shown(part: slice) -> dict[str, float]:
        train, rollout, mask = (one[name][part] for name in ("logp_train", "logp_rollout", "mask"))
        return loss(train, train, advantages(train), config, mask, rollout)[1]

    shown(slice(0, 2))
    whole = Monitor().observe(**one)
    assert shown(slice(2, None))["trimtab/mismatch/k3"] == pytest.approx(whole["mismatch/k3"], rel=1e-9)
    update()
    alone = Monitor().observe(
        **{name: value[:2] if isinstance(value, Tensor) else value for name, value in one.items()}
    )
    assert shown(slice(0, 2))["trimtab/mismatch/k3"] == pytest.approx(alone["mismatch/k3"], rel=1e-9)


def test_what_cannot_be_watched_is_refused() -> None:
    one = responses(0)
    train, mask = one["logp_train"], one["mask"]
    watched = recording.Observations(Monitor())
    with pytest.raises(TrimtabError, match="passes no log-probs of the sampler"):
        evaluate(objective("reinforce"), PolicyLogps(train, None, mask), advantages(train), monitor=watched)
    with pytest.raises(TrimtabError, match="give True or a folder"):
        recording.observations(Monitor())  # type: ignore[arg-type]
    with pytest.raises(TrimtabError, match="monitor=5: give True, a folder, or"):
        recording.open_monitor(5, merge_ranks=False)  # type: ignore[arg-type]
