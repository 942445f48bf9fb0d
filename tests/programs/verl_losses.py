"""verl's own functions with Trimtab's losses, on CPUs; the environment must have verl.

    python tests/programs/verl_losses.py PART     (a function of this file)

Prints a JSON object as its last line.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

HARMLESS = {
    *("loss_agg_mode", "loss_scale_factor", "global_batch_info", "loss_mode", "rollout_is"),  # the adapter reads them
    *("policy_loss", "rollout_correction"),  # sections, of which each key is listed
    # Those of losses that were not chosen.
    *("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta"),
    *("entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type"),  # verl's own terms beside the policy loss
}
"""Settings that verl's losses read and that stay beside a loss of Trimtab."""


def batch(rows: int = 8, time: int = 12) -> dict[str, Tensor]:
    """Responses of different lengths with holes; policies that are apart enough for every clip and bound."""
    make = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    rollout = -normal(rows, time).abs() - 0.05
    old = rollout + 0.3 * normal(rows, time)
    length = torch.randint(4, time + 1, (rows,), generator=make)
    length[0] = time  # verl pads to the longest response.
    inside = torch.arange(time) < length[:, None]
    return {
        "rollout_log_probs": rollout,
        "old_log_probs": old,
        "log_prob": old + 0.25 * normal(rows, time),
        "advantages": normal(rows, 1).expand(rows, time).clone(),
        "response_mask": inside & ((torch.rand(rows, time, generator=make) < 0.8) | (torch.arange(time) == 0)),
        "length": length,
    }


def proto(**fields: Any) -> Any:
    """verl's batch of the driver, with some fields changed, added, or left out (None)."""
    from verl import DataProto

    values = {key: value for key, value in batch().items() if key != "length"}
    values |= {"response_mask": values["response_mask"].long(), **fields}
    return DataProto.from_single_dict({key: value for key, value in values.items() if value is not None})


def correct(data: Any, config: Any) -> tuple[Any, dict[str, Any]]:
    """verl's function of the driver, by the name that the trainers import."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    return compute_rollout_correction_and_add_to_batch(data, OmegaConf.create(config))


def nearer() -> dict[str, Tensor]:
    """The same batch, from responses that no mask rejects to responses that most do."""
    data = batch()
    scale, old = torch.logspace(-4, 0, len(data["length"]))[:, None], data["old_log_probs"]
    return data | {name: old + scale * (data[name] - old) for name in ("rollout_log_probs", "log_prob")}


def run(
    mode: str,
    parts: int = 1,
    *,
    keywords: dict[str, Any] | None = None,
    carried: Tensor | None = None,
    data: dict[str, Tensor] | None = None,
    **options: Any,
) -> tuple[float, Tensor, dict]:
    """The loss and gradient of `ppo_loss`, verl's loss of an actor, over micro-batches on two ranks.

    keywords: of the objective, as under `policy_loss.trimtab`.
    """
    from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, PolicyLossConfig

    given = {} if keywords is None else {"trimtab": keywords}
    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=4,
        use_kl_loss=False,
        engine=FSDPEngineConfig(),
        policy_loss=PolicyLossConfig(loss_mode=mode, **given),
        **options,
    )
    return run_config(config, parts, carried=carried, data=data)


def run_config(
    config: Any, parts: int = 1, *, carried: Tensor | None = None, data: dict[str, Tensor] | None = None, ranks: int = 2
) -> tuple[float, Tensor, dict]:
    """The same with verl's configuration of an actor."""
    from verl.utils import tensordict_utils
    from verl.workers.utils.losses import ppo_loss

    data = batch() if data is None else data
    rows, time = data["log_prob"].shape
    leaf = data["log_prob"].clone().requires_grad_()
    object.__setattr__(config, "global_batch_info", {})
    loss, metrics = torch.zeros(()), {}
    for index in torch.arange(rows).chunk(parts):
        jagged = [row.item() for row in data["length"][index]]

        def nested(values: Tensor, index: Tensor = index, jagged: list[int] = jagged) -> Tensor:
            return torch.nested.as_nested_tensor(
                [values[row, :size] for row, size in zip(index, jagged, strict=True)], layout=torch.jagged
            )

        # One token of prompt; position t predicts token t + 1.
        scored = [torch.cat([leaf[row, :size], torch.zeros(1)]) for row, size in zip(index, jagged, strict=True)]
        fields = {
            "prompts": torch.nested.as_nested_tensor([torch.zeros(1).long() for _ in index], layout=torch.jagged),
            "responses": nested(torch.zeros(rows, time).long()),
            "response_mask": nested(data["response_mask"].long()),
            "old_log_probs": nested(data["old_log_probs"]),
            "advantages": nested(data["advantages"]),
        }
        if carried is not None:
            fields["rollout_is_weights"] = nested(carried)
        counts = {"dp_size": ranks, "batch_num_tokens": int(data["response_mask"].sum()), "global_batch_size": rows}
        table = tensordict_utils.get_tensordict(fields, counts)
        value, metrics = ppo_loss(config, {"log_probs": torch.cat(scored)}, table)
        loss = loss + value
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient, metrics


def difference(ours: tuple[float, Tensor, dict], theirs: tuple[float, Tensor, dict]) -> dict[str, float]:
    scale = theirs[1].abs().max().item()
    return {
        "loss": abs(ours[0] - theirs[0]),
        "gradient": (ours[1] - theirs[1]).abs().max().item() / scale,
        "scale": scale,
    }


def parity() -> dict[str, dict[str, float]]:
    """verl's vanilla loss (clip 0.2, dual clip 3) against `grpo` with its numbers, on one to three micro-batches."""
    cases = {"token-mean": 1, "token-mean, 2 micro-batches": 2, "token-mean, 3": 3}
    cases |= {"seq-mean-token-mean": 1, "seq-mean-token-mean, 2": 2, "seq-mean-token-sum-norm, 2": 2}
    result = {}
    for case, parts in cases.items():
        mode = case.partition(",")[0]
        keywords = {"aggregation": mode.replace("seq-mean-token-sum-norm", "constant"), "clip_dual": 3.0}
        options: dict[str, Any] = {"loss_agg_mode": mode, "loss_scale_factor": 12 if "norm" in mode else None}
        ours = run("trimtab-grpo", parts, keywords=keywords, **options)
        result[case] = difference(ours, run("vanilla", parts, **options))
    narrow = {"aggregation": "token-mean", "clip_low": 0.1}
    result["planted"] = difference(run("trimtab-grpo", keywords=narrow), run("vanilla"))
    return result


def bounds() -> dict[str, Any]:
    """verl's bounds under a loss of Trimtab: taken over, so that its vanilla loss comes out, or refused."""
    same: dict[str, dict[str, Any]] = {
        "low, high": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28},
        "high, dual": {"clip_ratio_high": 5.0, "clip_ratio_c": 10.0},
        "null": {"clip_ratio_low": None, "clip_ratio": 0.1},
    }
    result: dict[str, Any] = {}
    for case, options in same.items():
        ours = run(
            "trimtab-dapo", keywords={"clip_high": 0.2} if case == "null" else {}, **{"clip_ratio_c": 4.0, **options}
        )
        result[case] = difference(ours, run("vanilla", **{"clip_ratio_c": 4.0, **options}))
    sapo = {"tau_pos": 0.7, "tau_neg": 1.3, "loss_agg_mode": "seq-mean-token-mean"}
    result["sapo"] = difference(run("trimtab-sapo", **sapo), run("sapo", **sapo))
    data = batch()
    losses = [
        run("trimtab-grpo", keywords={"aggregation": "token-mean"}, clip_ratio_high=high)[0]
        for high in (0.21, 0.28, 5.0)
    ]
    result["losses"] = losses
    result["refused"] = [
        refusal(run, "trimtab-dapo", keywords={"clip_low": 0.3}, clip_ratio_low=0.1),
        refusal(run, "trimtab-dapo", clip_ratio=0.1),
        refusal(run, "trimtab-cispo", clip_ratio_high=4.0),
        refusal(run, "trimtab-dapo", tau_pos=2.0),
        refusal(run, "trimtab-dppo", clip_ratio_low=0.15, carried=data["rollout_log_probs"]),
        refusal(run, "trimtab-dapo", keywords={"clip_lo": 0.3}),
        refusal(run, "trimtab-dapo", keywords={"name": "icepop"}),
    ]
    return result


def own() -> dict[str, Any]:
    """verl's own losses, corrections and configuration, to the last bit: with the plugin and without it."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo import core_algos
    from verl.utils.config import validate_config

    weights, result = batch()["rollout_log_probs"].exp(), {}
    for mode in sorted(name for name in core_algos.POLICY_LOSS_REGISTRY if not name.startswith("trimtab-")):
        for name, carried in (("", None), (", weighted", weights)):
            aggregation = "seq-mean-token-mean" if mode == "gspo" else "token-mean"
            try:
                loss, gradient, metrics = run(mode, 2, carried=carried, loss_agg_mode=aggregation)
            except Exception as error:  # Some of verl's losses need more of its configuration, or no weights.
                result[mode + name] = f"{type(error).__name__}: {error}"
            else:
                result[mode + name] = [loss, gradient.tolist(), sorted(metrics)]
    for config in ({"rollout_is": "token", "rollout_is_threshold": 2.0}, {"rollout_is": "sequence"}, {}):
        rejecting = {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.2, "rollout_is_threshold": 2.0, **config}
        data, metrics = correct(proto(), rejecting)
        numbers = {key: value for key, value in metrics.items() if "trimtab" not in key}
        tensors = {key: value.tolist() for key, value in sorted(data.batch.items())}
        result[f"driver, {config}"] = [tensors, numbers, sorted(data.batch.keys()), torch.rand(()).item()]
    rollout = {"calculate_log_probs": True}
    actor = {"policy_loss": {"loss_mode": "vanilla"}, "loss_agg_mode": "token-mean"}
    config = OmegaConf.create(
        {
            "algorithm": {"rollout_correction": {"rollout_is": None, "bypass_mode": False}},
            "actor_rollout_ref": {"rollout": rollout, "actor": actor},
            "trainer": {"rollout_data_dir": "rollouts"},
        }
    )
    try:
        validate_config(config, False, False)
    except Exception as error:  # verl's own check reads much more.
        result["check"] = f"{type(error).__name__}: {error}"
    return result | {"configuration": OmegaConf.to_container(config)}


BASE = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.name=hf",
)


def composed(overrides: Sequence[str]) -> Any:
    """verl's whole configuration, composed by Hydra from its own files and a command line, after verl's check."""
    from hydra import compose, initialize_config_dir
    from verl.utils.config import validate_config

    folder = Path(sys.modules["verl"].__file__ or "").parent / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        config = compose("ppo_trainer", overrides=[*BASE, *overrides])
    with contextlib.redirect_stdout(sys.stderr):
        validate_config(config, False, False)
    return config


def actor_of(config: Any) -> Any:
    """The section of the actor as a worker converts it."""
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    kind = type(actor.policy_loss)
    # As processes find it that are sent one.
    assert getattr(importlib.import_module(kind.__module__), kind.__qualname__) is kind
    return actor


def hydra() -> dict[str, Any] | str:
    """Keywords of an objective, from the command line through verl's configuration to the loss."""
    if importlib.util.find_spec("hydra") is None:
        return "no hydra"
    loss, key = "actor_rollout_ref.actor.policy_loss.loss_mode", "+actor_rollout_ref.actor.policy_loss.trimtab"
    correction = "algorithm.rollout_correction"
    data = batch()

    def ran(*overrides: str) -> tuple[float, Tensor, dict]:
        config = actor_of(composed(overrides))
        return run_config(config, 2, carried=data["rollout_log_probs"])

    def direct(name: str, **keywords: Any) -> tuple[float, Tensor, dict]:
        return run(f"trimtab-{name}", 2, keywords=keywords, carried=data["rollout_log_probs"])

    tis = f"{loss}=trimtab-token-tis"
    return {
        "number": difference(ran(tis, f"{key}.weight_max=1.1"), direct("token-tis", weight_max=1.1)),
        "default": difference(ran(tis), direct("token-tis")),
        "planted": difference(ran(tis, f"{key}.weight_max=1.1"), direct("token-tis")),
        "parts": difference(
            ran(
                f"{loss}=trimtab-composed",
                f"{key}.surrogate={{kind:clipped,high:0.3}}",
                f"{key}.mask=[{{kind:k3,reduce:mean,max:0.1}}]",
            ),
            direct(
                "composed",
                surrogate={"kind": "clipped", "high": 0.3},
                mask=[{"kind": "k3", "reduce": "mean", "max": 0.1}],
            ),
        ),
        "refused": [
            refusal(composed, overrides)
            for overrides in (
                ["actor_rollout_ref.actor.policy_loss.loss_mode=geo-mask-token-tis"],
                [f"{correction}.rollout_is=token-tis"],
                [f"{loss}=vanilla", f"{key}.weight_max=2.0"],
                [f"{loss}=trimtab_token_tis"],
                [f"{correction}.rollout_is=Trimtab-token-tis"],
                [f"{correction}.rollout_is=trimtab"],
                [tis, f"{key}=5"],
                [tis, f"{correction}.rollout_rs=seq_mean_k1"],
                [tis, f"{correction}.rollout_is_threshold=3.0"],
                [tis, "actor_rollout_ref.actor.clip_ratio_low=0.1", f"{key}.clip_low=0.3"],
                [tis, "actor_rollout_ref.actor.clip_ratio=0.1"],
                [f"{loss}=trimtab-dapo", f"{correction}.bypass_mode=True"],
                [
                    f"{loss}=trimtab-dr-grpo",
                    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
                    "actor_rollout_ref.actor.loss_scale_factor=12",
                    "algorithm.adv_estimator=grpo",
                ],
                [f"{loss}=trimtab-dapo", "actor_rollout_ref.actor.clip_ratio_high=5.0"],
            )
        ],
    }


def documented() -> list[Any]:
    """Loss and metrics with the lines of docs/verl.md for the surrogate and the mask of docs/objectives.md."""
    page = (Path(__file__).parents[2] / "docs" / "verl.md").read_text(encoding="utf-8")
    lines = re.findall(r"^    (\S+=\S+)$", page.partition("## Your own mask")[2].split("\n## ")[0], re.MULTILINE)
    rollout, log_ratio = (torch.tensor(x).log() for x in ([[0.5, 0.5], [0.5, 0.004]], [[1.2, 0.8], [1.1, 1.5]]))
    data = dict.fromkeys(("log_prob", "old_log_probs"), rollout + log_ratio)
    data |= {"advantages": torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), "length": torch.tensor([2, 2])}
    data["response_mask"] = torch.ones(2, 2, dtype=torch.bool)
    actors = (actor_of(composed(overrides)) for overrides in (lines[:2], lines[2:]))
    results = (run_config(actor, carried=rollout, data=data, ranks=1) for actor in actors)
    return [[loss, sorted(metrics)] for loss, _, metrics in results]


def settings() -> dict[str, list[str]]:
    """What verl's own losses read of its configuration classes, against the tables of the adapter.

    unlisted: fields that a loss reads and no table has. unread: those that a table has and no loss reads. defaults:
    those whose default is another than in the table.
    """
    from verl.trainer.config import RolloutCorrectionConfig
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig, PolicyLossConfig
    from verl.workers.utils import losses

    from trimtab.adapters.loss_settings import SETTINGS

    fields = [
        one for kind in (ActorConfig, PolicyLossConfig, RolloutCorrectionConfig) for one in dataclasses.fields(kind)
    ]
    names, read = {one.name for one in fields} - {"trimtab"}, set()
    sources = [
        *(inspect.getsource(one) for name, one in vars(core_algos).items() if name.startswith("compute_policy_loss")),
        inspect.getsource(losses.ppo_loss),
    ]
    for node in ast.walk(ast.parse("\n".join(sources))):
        if isinstance(node, ast.Attribute) and "config" in ast.unparse(node.value):
            read.add(node.attr)
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", "") == "get"
            and "config" in ast.unparse(node.func)
        ):
            read.add(ast.literal_eval(node.args[0]))
    listed = {**SETTINGS["VERL_ACTOR"], **SETTINGS["VERL_CORRECTION"]}
    known = {one.name: one.default for one in fields}
    return {
        "read": sorted(read & names),
        "unlisted": sorted((read & names) - listed.keys() - HARMLESS),
        "unread": sorted((listed.keys() | HARMLESS) - read),
        "defaults": sorted(name for name, one in listed.items() if known[name] != one.default),
    }


def variance() -> dict[str, dict[str, float]]:
    """verl's proxy of the gradient's variance, without weights, with weights, and with the log-probs of its driver."""
    from verl.trainer.ppo.metric_utils import compute_variance_proxy_metrics

    fields, squares = batch(), batch()["log_prob"].exp().square()
    cases = {"none": {}, "weights": {"rollout_is_weights": fields["rollout_log_probs"].exp()}}
    cases["log-probs"] = {"rollout_is_weights": fields["rollout_log_probs"]}
    return {
        case: compute_variance_proxy_metrics(proto(sum_pi_squared=squares, **extra), gradient_norm=1.0)
        for case, extra in cases.items()
    }


def configurations() -> list[Any]:
    """verl's check of its configuration, by the name that its main programs import it."""
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config

    def check(correction: dict[str, Any] | None, calculate: bool = True) -> str:
        algorithm = {"rollout_correction": correction}
        config = {"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"calculate_log_probs": calculate}}}
        try:
            return refusal(validate_config, OmegaConf.create(config), False, False)
        except Exception as error:  # verl's own check reads much more.
            return f"passed on to verl: {type(error).__name__}"

    def completed(mode: str, aggregation: str = "token-mean", rollout_is: str | None = None) -> list[Any]:
        """What verl would be asked for with this loss, and the reason where the loss is refused."""
        config = OmegaConf.create(
            {
                "algorithm": {"rollout_correction": {"rollout_is": rollout_is, "bypass_mode": False}},
                "actor_rollout_ref": {
                    "rollout": {"calculate_log_probs": False},
                    "actor": {
                        "policy_loss": {"loss_mode": mode},
                        "loss_agg_mode": aggregation,
                        "loss_scale_factor": None,
                    },
                },
            }
        )
        OmegaConf.set_struct(config, True)
        try:
            reason = refusal(validate_config, config, False, False)
        except Exception:  # verl's own check reads much more.
            reason = "passed on to verl"
        calculated = config.actor_rollout_ref.rollout.calculate_log_probs
        return [reason, calculated, config.algorithm.rollout_correction.rollout_is]

    return [
        [
            completed("trimtab-token-tis"),
            completed("trimtab-token-tis", rollout_is="trimtab"),
            completed("trimtab-dapo"),
            completed("vanilla"),
            completed("trimtab-icepop"),
            completed("trimtab-token-tis", rollout_is="token"),
            completed("trimtab-token-tiss"),
        ],
        check({"rollout_is": "trimtab", "bypass_mode": True}),
        check({"rollout_is": "trimtab"}, calculate=False),
        check({"rollout_is": "trimtab"}),
        check({"rollout_is": "token", "bypass_mode": True}),
        check(None),
    ]


def driver() -> dict[str, Any]:
    """verl's function of the driver with the value that carries the sampler's log-probs."""
    carried, metrics = correct(proto(), {"rollout_is": "trimtab"})
    return {
        "carried": torch.equal(carried.batch["rollout_is_weights"], batch()["rollout_log_probs"]),
        "mask": torch.equal(carried.batch["response_mask"].bool(), batch()["response_mask"]),
        "k3": metrics["rollout_corr/trimtab/k3"],
    }


def monitor() -> dict[str, Any]:
    """verl's function of the driver with a monitor, over steps of which the last three lost the trainer's weights."""
    import warnings

    from omegaconf import OmegaConf
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch as add
    from verl.utils.config import validate_config

    import trimtab

    direct, figures, same = trimtab.Monitor(on_alarm=lambda _: None), [], []
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        for step in range(9):
            fields = batch()
            old, mask = fields["old_log_probs"], fields["response_mask"]
            scale = (0.1 if step < 6 else 1.0) + 0.01 * step
            rollout = old + scale * (fields["rollout_log_probs"] - old)
            changed = {"rollout_log_probs": rollout, "uid": np.array(["a", "b"] * 4, dtype=object)}
            # verl's weights, and its rejection, which changes the mask.
            config = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "token_k1"}
            config |= {"rollout_rs_threshold": 1.2}
            results = [call(proto(**changed), OmegaConf.create(config)) for call in (add, add.__wrapped__)]
            expected = direct.observe(logp_train=old, logp_rollout=rollout, mask=mask, step=step)
            figures += [(results[0][1]["rollout_corr/trimtab/mismatch/k3"], expected["mismatch/k3"])]
            ours, theirs = (one.batch for one, _ in results)
            same += [all(torch.equal(ours[key], theirs[key]) for key in ("rollout_is_weights", "response_mask"))]
            same += [results[1][1].items() <= results[0][1].items()]
    rejected = int((ours["response_mask"] != mask).sum())
    rollout = {"calculate_log_probs": True}
    config = {"algorithm": {"rollout_correction": {"bypass_mode": True}}, "actor_rollout_ref": {"rollout": rollout}}
    refused = refusal(validate_config, OmegaConf.create(config), False, False)
    warned = [str(one.message) for one in raised if "Trimtab" in one.category.__name__]
    return {"figures": figures, "same": same, "rejected": rejected, "warned": warned, "refused": refused}


def stopped() -> None:
    """verl's function of the driver over steps of which the last ones have a low effective sample size."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch as add

    for step in range(20):
        old = batch()["old_log_probs"]
        noise = (0.01 if step < 8 else 3.0) * torch.randn(old.shape, generator=torch.Generator().manual_seed(step))
        add(
            proto(rollout_log_probs=old + noise), OmegaConf.create({"rollout_is": "token", "rollout_is_threshold": 2.0})
        )


def refusal(function: Any, *arguments: Any, **keywords: Any) -> str:
    from trimtab.errors import TrimtabError

    try:
        function(*arguments, **keywords)
    except TrimtabError as error:
        return str(error)
    return "accepted"


def bypass(mode: str) -> None:
    """v0's function for bypass_mode, by the name that its trainer imports."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.rollout_corr_helper import apply_bypass_mode

    held = SimpleNamespace(batch=batch())
    apply_bypass_mode(held, OmegaConf.create({}), OmegaConf.create({"loss_mode": mode}))


def refusals() -> list[str]:
    data = batch()
    return [
        refusal(run, "trimtab-icepop", loss_agg_mode="seq-mean-token-mean"),
        refusal(run, "trimtab-icepop", carried=data["advantages"].abs(), loss_agg_mode="seq-mean-token-mean"),
        refusal(run, "trimtab-gspo"),
        refusal(run, "trimtab-m2po", carried=data["rollout_log_probs"]),
        refusal(run, "trimtab-dr-grpo", loss_agg_mode="seq-mean-token-sum-norm"),
        refusal(bypass, "trimtab-token-bypass"),
        refusal(bypass, "vanilla"),
        refusal(run, "vanilla", carried=data["rollout_log_probs"]),
        refusal(run, "gspo", carried=data["rollout_log_probs"], loss_agg_mode="seq-mean-token-mean"),
        refusal(run, "vanilla", carried=data["rollout_log_probs"].exp()),
        refusal(baseline),
        refusal(correct, proto(), {"rollout_is": "trimtab", "rollout_rs": "token_k1"}),
        refusal(correct, proto(), {"rollout_is": "trimtab", "rollout_is_batch_normalize": True}),
        refusal(correct, proto(rollout_log_probs=None), {"rollout_is": "trimtab"}),
    ]


def baseline() -> None:
    """verl's baseline of each token, which weighs by the squares of `rollout_is_weights`."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    data = batch()
    rewards, mask = data["advantages"], data["response_mask"].float()
    get_adv_estimator_fn("optimal_token_baseline")(
        token_level_rewards=rewards,
        response_mask=mask,
        index=np.zeros(len(mask)),
        old_log_probs=data["old_log_probs"],
        sum_pi_squared=torch.ones_like(rewards),
        rollout_is_weights=data["rollout_log_probs"],
    )


if __name__ == "__main__":
    import verl  # noqa: F401 - loads the plugin

    torch.manual_seed(0)
    print(json.dumps(globals()[sys.argv[1]]()))
