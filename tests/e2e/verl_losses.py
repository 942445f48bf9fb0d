"""verl's own functions with Trimtab's losses, on CPUs; the environment must have verl.

    python tests/e2e/verl_losses.py PART     (a function of this file)

Prints a JSON object as its last line.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor


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


def nearer() -> dict[str, Tensor]:
    """The same batch, from responses that no mask rejects to responses that most do."""
    data = batch()
    scale, old = torch.logspace(-4, 0, len(data["length"]))[:, None], data["old_log_probs"]
    return data | {name: old + scale * (data[name] - old) for name in ("rollout_log_probs", "log_prob")}


def run(
    mode: str,
    parts: int = 1,
    *,
    carried: Tensor | None = None,
    data: dict[str, Tensor] | None = None,
    **options: Any,
) -> tuple[float, Tensor, dict]:
    """The loss and gradient of `ppo_loss`, verl's loss of an actor, over micro-batches on two ranks."""
    from verl.trainer.config import RolloutCorrectionConfig  # noqa: F401 - registers the configuration
    from verl.utils import tensordict_utils
    from verl.workers.config import FSDPActorConfig, FSDPEngineConfig
    from verl.workers.utils.losses import ppo_loss

    data = batch() if data is None else data
    rows, time = data["log_prob"].shape
    leaf = data["log_prob"].clone().requires_grad_()
    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=4,
        use_kl_loss=False,
        engine=FSDPEngineConfig(),
        **options,
    )
    object.__setattr__(config.policy_loss, "loss_mode", mode)
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
        counts = {
            "dp_size": 2,
            "batch_num_tokens": int(data["response_mask"].sum()),
            "global_batch_size": rows,
        }
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
    cases = {"token-mean": ("plain", 1), "token-mean, 2 micro-batches": ("plain", 2), "token-mean, 3": ("plain", 3)}
    cases |= {"seq-mean-token-mean": ("means", 1), "seq-mean-token-mean, 2": ("means", 2)}
    cases |= {"seq-mean-token-sum-norm, 2": ("constant", 2)}
    result = {}
    for case, (name, parts) in cases.items():
        options: dict[str, Any] = {"loss_agg_mode": case.partition(",")[0]}
        options |= {"loss_scale_factor": 12} if name == "constant" else {}
        result[case] = difference(run(f"trimtab-{name}", parts, **options), run("vanilla", parts, **options))
    result["planted"] = difference(run("trimtab-narrow", loss_agg_mode="token-mean"), run("vanilla"))
    return result


def own() -> dict[str, Any]:
    """verl's own losses, corrections and configuration, to the last bit: with the plugin and without it."""
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.trainer.ppo import core_algos, rollout_corr_helper
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
        fields = {key: value for key, value in batch().items() if key != "length"}
        rejecting = {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.2, "rollout_is_threshold": 2.0, **config}
        data = DataProto.from_single_dict(fields | {"response_mask": fields["response_mask"].long()})
        data, metrics = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(
            data, OmegaConf.create(rejecting)
        )
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


def presets() -> dict[str, Any]:
    """Every preset that verl carries, the sampler's log-probs carried by its driver, against the library."""
    from trimtab.adapters.hooks import HOOKS, turns_of
    from trimtab.adapters.verl_loss import MODES
    from trimtab.objectives import PolicyLogps, objective, objectives

    data, result = nearer(), {}
    for name in objectives():
        constant = {"length_max": 12} if name in ("dr-grpo", "luffy") else {}
        built = objective(name, **constant)
        if HOOKS["verl"].refusal(built) is not None:
            continue
        leaf, mask = data["log_prob"].clone().requires_grad_(), data["response_mask"]
        logps = PolicyLogps(
            current=leaf,
            behavior=data["rollout_log_probs"],
            mask=mask,
            proximal=data["old_log_probs"],
            turn=turns_of(mask),
        )
        loss = built(logps, data["advantages"][:, :1]).loss
        (gradient,) = torch.autograd.grad(loss, leaf)
        options = {"loss_scale_factor": 12} if constant else {}
        mode = MODES.get(built.aggregation.kind, built.aggregation.kind)
        ours = run(f"trimtab-{name}", 2, carried=data["rollout_log_probs"], data=data, loss_agg_mode=mode, **options)
        # Two ranks, whose gradients verl averages.
        result[name] = difference((ours[0] / 2, ours[1] / 2, {}), (loss.item(), gradient, {}))
        result[name]["metrics"] = sorted(key for key in ours[2] if "trimtab" in key)
    return result


def variance() -> dict[str, dict[str, float]]:
    """verl's proxy of the gradient's variance, without weights, with weights, and with the log-probs of its driver."""
    from verl import DataProto
    from verl.trainer.ppo.metric_utils import compute_variance_proxy_metrics

    fields = {key: value for key, value in batch().items() if key != "length"}
    fields |= {"sum_pi_squared": fields["log_prob"].exp().square(), "response_mask": fields["response_mask"].long()}
    cases = {"none": {}, "weights": {"rollout_is_weights": fields["rollout_log_probs"].exp()}}
    cases["log-probs"] = {"rollout_is_weights": fields["rollout_log_probs"]}
    return {
        case: compute_variance_proxy_metrics(DataProto.from_single_dict(fields | extra), gradient_norm=1.0)
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
        check({"rollout_is": "trimtab-token-tis", "bypass_mode": True}),
        check({"rollout_is": "trimtab", "bypass_mode": True}),
        check({"rollout_is": "trimtab"}, calculate=False),
        check({"rollout_is": "trimtab"}),
        check({"rollout_is": "token", "bypass_mode": True}),
        check(None),
    ]


def driver() -> dict[str, Any]:
    """verl's function of the driver, by the name that the trainers import, with its own values and with ours."""
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch as add

    def called(**config: Any) -> tuple[DataProto, dict[str, Any]]:
        fields = {key: value for key, value in batch().items() if key != "length"}
        fields["response_mask"] = fields["response_mask"].long()
        return add(DataProto.from_single_dict(fields), config)

    theirs, _ = called(rollout_is="token", rollout_is_threshold=2.0)
    ours, metrics = called(rollout_is="trimtab-token-tis")
    mask = batch()["response_mask"]
    weights = [one.batch["rollout_is_weights"] * mask for one in (theirs, ours)]
    carried, _ = called(rollout_is="trimtab")
    rejected, _ = called(rollout_is="trimtab-icepop")
    ratio = (batch()["old_log_probs"] - batch()["rollout_log_probs"]).exp()
    expected = mask & (ratio >= 0.5) & (ratio <= 5.0)
    return {
        "weights": (weights[0] - weights[1]).abs().max().item(),
        "carried": torch.equal(carried.batch["rollout_is_weights"], batch()["rollout_log_probs"]),
        "kept": torch.equal(rejected.batch["rollout_is_weights"] > 0, expected),
        "rejected": int((mask & ~expected).sum()),
        "mask": torch.equal(rejected.batch["response_mask"].bool(), mask),
        "k3": metrics["rollout_corr/trimtab/k3"],
        "refused": [refusal(called, rollout_is=f"trimtab-{name}") for name in ("grpo", "opsm", "icepopp")],
    }


def monitor() -> dict[str, Any]:
    """verl's function of the driver with a monitor, over steps of which the last three lost the trainer's weights."""
    import warnings

    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch as add
    from verl.utils.config import validate_config

    import trimtab

    direct, figures, same = trimtab.Monitor(on_alarm=lambda _: None), [], []
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        for step in range(9):
            fields = {key: value for key, value in batch().items() if key != "length"}
            old, mask = fields["old_log_probs"], fields["response_mask"]
            scale = (0.1 if step < 6 else 1.0) + 0.01 * step
            rollout = old + scale * (fields["rollout_log_probs"] - old)
            fields |= {"rollout_log_probs": rollout, "response_mask": mask.long()}
            texts = {"uid": np.array(["a", "b"] * 4, dtype=object)}
            # verl's weights, and its rejection, which changes the mask.
            config = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "token_k1"}
            config |= {"rollout_rs_threshold": 1.2}
            results = [
                call(DataProto.from_single_dict({**fields, **texts}), OmegaConf.create(config))
                for call in (add, add.__wrapped__)
            ]
            expected = direct.observe(logp_train=old, logp_rollout=rollout, mask=mask, step=step)
            figures += [(results[0][1]["rollout_corr/trimtab/mismatch/k3"], expected["mismatch/k3"])]
            ours, theirs = (one.batch for one, _ in results)
            same += [all(torch.equal(ours[key], theirs[key]) for key in ("rollout_is_weights", "response_mask"))]
            same += [results[1][1].items() <= results[0][1].items()]
    rejected = int((ours["response_mask"] != fields["response_mask"]).sum())
    rollout = {"calculate_log_probs": True}
    config = {"algorithm": {"rollout_correction": {"bypass_mode": True}}, "actor_rollout_ref": {"rollout": rollout}}
    refused = refusal(validate_config, OmegaConf.create(config), False, False)
    warned = [str(one.message) for one in raised if "Trimtab" in one.category.__name__]
    return {"figures": figures, "same": same, "rejected": rejected, "warned": warned, "refused": refused}


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
        refusal(added, rollout_is="trimtab", rollout_rs="token_k1"),
        refusal(added, rollout_is="trimtab-token-tis", rollout_is_batch_normalize=True),
        refusal(added, rollout_is="trimtab", absent="rollout_log_probs"),
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


def added(absent: str = "", **config: Any) -> None:
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch as add

    fields = {key: value for key, value in batch().items() if key not in ("length", absent)}
    add(DataProto.from_single_dict(fields), config)


if __name__ == "__main__":
    import verl  # noqa: F401 - loads the plugin

    torch.manual_seed(0)
    print(json.dumps(globals()[sys.argv[1]]()))
