"""What the losses of trainers without a package for CPUs compute, called as their trainers call them.

    python generate.py --hooks FOLDER

FOLDER holds a checkout of each (`skyrl`, `nemo-rl`, `areal`, `openrlhf`, `slime`, `miles`), with its commit in the file
COMMIT. Functions are taken out of their files and run as they are, because the files import CUDA libraries. Frozen are
their losses and gradients, and the names of the parameters of each hook (tests/parity/test_hooks.py).
"""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from generate import Batch, Recording, each, with_gradient

SKYRL = Path("skyrl/skyrl/backends/skyrl_train")
NEMO_RL = Path("nemo-rl/nemo_rl/algorithms")
AREAL, OPENRLHF = Path("areal/areal"), Path("openrlhf/openrlhf/models")
SLIME = Path("slime/slime/backends/megatron_utils/loss.py")
MILES = Path("miles/miles/backends/training_utils/loss_hub/corrections.py")
MILES_SCORES = Path("miles/miles/backends/training_utils/loss_hub/logit_processors.py")
SCORES = "get_log_probs_and_entropy"
HALVES = (slice(0, 3), slice(3, None))
LENGTH_MAX = 40


def definitions(path: Path, *names: str) -> list[ast.stmt]:
    """The functions and classes of these names, without decorators."""
    tree = ast.parse(path.read_text())
    chosen = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names]
    assert {node.name for node in chosen} == set(names), f"{path} has no {set(names) - {node.name for node in chosen}}"
    for node in chosen:
        node.decorator_list = []
    return list(chosen)


def load(namespace: dict[str, Any], path: Path, *names: str) -> dict[str, Any]:
    """Runs these definitions in the namespace, annotations unread."""
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([future, *definitions(path, *names)], []))
    exec(compile(module, str(path), "exec"), namespace)  # noqa: S102 - checkouts that the caller names
    return namespace


def parameters(path: Path, name: str, method: str | None = None) -> list[str]:
    """The names of the parameters of a function, or of a method of a class, without `self`."""
    (node,) = definitions(path, name)
    if method is not None:
        assert isinstance(node, ast.ClassDef)
        (node,) = (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == method)
    assert isinstance(node, ast.FunctionDef)
    given = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return [one for one in given if one != "self"]


def returned(path: Path, name: str) -> str:
    """The kind of expression that a function returns at its end: `Tuple`, `Name`, ..."""
    (node,) = definitions(path, name)
    assert isinstance(node, ast.FunctionDef)
    assert isinstance(node.body[-1], ast.Return)
    return type(node.body[-1].value).__name__


def skyrl(folder: Path) -> Callable[..., torch.Tensor]:
    utils = folder / SKYRL / "utils"
    space = {"torch": torch}
    load(space, utils / "torch_utils.py", "masked_mean", "safe_exp_delta")
    load(space, utils / "off_policy_correction_utils.py", "apply_off_policy_correction")
    load(
        space, utils / "ppo_utils.py", "ppo_policy_loss", "reduce_loss", "apply_loss_reduction_to_advantages_minibatch"
    )

    def run(batch: Batch, logp: torch.Tensor, *, reduction: str) -> torch.Tensor:
        config = SimpleNamespace(
            policy_loss_type="regular", eps_clip_low=0.2, eps_clip_high=0.2, off_policy_correction=None
        )
        mask = batch["mask"].double()
        advantage = space["apply_loss_reduction_to_advantages_minibatch"](
            batch["advantage"].expand_as(logp), mask, reduction, 4, LENGTH_MAX
        )
        parts = [
            space["ppo_policy_loss"](logp[part], batch["proximal"][part], advantage[part], config, mask[part])[0]
            for part in HALVES
        ]
        return torch.stack(parts).sum()

    return run


def nemo_rl(folder: Path, wrap: Callable[[Any], Any] = lambda loss: loss) -> Callable[..., torch.Tensor]:
    """wrap: is given the loss."""
    names = {"LossType": "TOKEN_LEVEL SEQUENCE_LEVEL", "LossInputType": "LOGPROB"}
    space: dict[str, Any] = {"torch": torch, "LossFunction": object}
    space |= {name: Enum(name, values) for name, values in names.items()}
    space["MetricNormalizer"] = Enum("MetricNormalizer", "TOKENS SEQUENCES NONE")
    load(space, folder / NEMO_RL / "utils.py", "masked_mean", "calculate_kl")
    load(space, folder / NEMO_RL / "loss" / "loss_functions.py", "ClippedPGLossFn")

    def run(batch: Batch, logp: torch.Tensor, *, filtered: float | None = None, **options: Any) -> torch.Tensor:
        """filtered: how much top-k or top-p raises the log-probs of the policy; None where there is none."""
        config = {
            **{"disable_ppo_ratio": False, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "ratio_clip_c": None},
            **{"reference_policy_kl_penalty": 0.0, "use_kl_in_reward": False, "reference_policy_kl_type": "k3"},
            **{"kl_input_clamp_value": None, "kl_output_clamp_value": None, "force_on_policy_ratio": False},
            **{"use_importance_sampling_correction": False, "truncated_importance_sampling_type": None},
            **{"truncated_importance_sampling_ratio": None, "truncated_importance_sampling_ratio_min": None},
            **{"use_on_policy_kl_approximation": False, "sequence_level_importance_ratios": False},
            **{"positive_example_nll_weight": 0.0, "token_level_loss": True, "use_cispo": False, **options},
        }
        loss = wrap(space["ClippedPGLossFn"](SimpleNamespace(**config)))

        def shifted(value: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(value.expand_as(logp).double(), (1, 0))

        data = {
            "token_mask": shifted(batch["mask"]),
            "sample_mask": torch.ones(len(logp), dtype=torch.float64),
            "advantages": shifted(batch["advantage"]),
            "prev_logprobs": shifted(batch["proximal"]),
            "generation_logprobs": shifted(batch["behavior"]),
            "reference_policy_logprobs": shifted(batch["reference"]),
        }
        counts = (torch.tensor(float(len(logp))), batch["mask"].sum().double())
        if filtered is not None:
            data["curr_logprobs_unfiltered"], logp = logp, logp + filtered
        parts = [loss(logp[part], {key: value[part] for key, value in data.items()}, *counts)[0] for part in HALVES]
        return torch.stack(parts).sum()

    return run


def areal(folder: Path) -> Callable[..., torch.Tensor]:
    space = load({"torch": torch}, folder / AREAL / "utils/functional/functional.py", "ppo_actor_loss_fn")

    def run(batch: Batch, logp: torch.Tensor) -> torch.Tensor:
        return space["ppo_actor_loss_fn"](
            logprobs=logp,
            proximal_logprobs=batch["proximal"],
            old_logprobs=batch["behavior"],
            advantages=batch["advantage"].expand_as(logp),
            eps_clip=0.2,
            loss_mask=batch["mask"],
        )[0]

    return run


def openrlhf(folder: Path, wrap: Callable[[Any], Any] = lambda loss: loss) -> Callable[..., torch.Tensor]:
    """wrap: is given the loss."""
    space: dict[str, Any] = {"torch": torch, "nn": torch.nn}
    load(space, folder / OPENRLHF / "utils.py", "masked_mean")
    load(space, folder / OPENRLHF / "loss.py", "aggregate_loss", "PolicyLoss")

    def run(batch: Batch, logp: torch.Tensor, **options: Any) -> torch.Tensor:
        loss = wrap(space["PolicyLoss"](clip_eps_low=0.2, clip_eps_high=0.2, **options))
        parts = [
            loss(
                logp[part],
                batch["proximal"][part],
                batch["advantage"].expand_as(logp)[part],
                batch["mask"][part].double(),
                batch["behavior"][part],
                dp_size=2,
                batch_num_tokens=float(batch["mask"].sum()),
                global_batch_size=float(len(logp)),
            )[0]
            for part in HALVES
        ]
        return torch.stack(parts).sum() / 2

    return run


def corrected(path: Path, name: str) -> Callable[..., torch.Tensor]:
    """A plain policy gradient, multiplied by the correction of Miles or slime."""
    space = load({"torch": torch}, path, name)

    def run(batch: Batch, logp: torch.Tensor, **options: Any) -> torch.Tensor:
        mask = batch["mask"]
        loss = -(logp * batch["advantage"])[mask]
        flat = {
            key: [row[keep] for row, keep in zip(batch[key], mask, strict=True)] for key in ("proximal", "behavior")
        }
        result, _, _ = space[name](
            Namespace(**options),
            pg_loss=loss,
            train_log_probs=flat["proximal"],
            rollout_log_probs=flat["behavior"],
            loss_masks=[torch.ones(len(one)) for one in flat["proximal"]],
        )
        return result.sum() / mask.sum()

    return run


def record(batches: dict[str, Batch], folder: Path) -> Recording:
    peers = ("skyrl", "nemo-rl", "areal", "openrlhf", "slime", "miles")
    versions = {peer: (folder / peer / "COMMIT").read_text().strip() for peer in peers}
    recording = Recording({**versions, "torch": torch.__version__})
    bounds = {"tis_clip_low": 0.5, "tis_clip": 2.0}
    icepop = {"truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio_min": 0.5}
    penalized = {"reference_policy_kl_penalty": 0.05, "use_on_policy_kl_approximation": True}
    truncated = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0}
    runs: dict[str, tuple[Callable[..., torch.Tensor], dict[str, Any]]] = {
        **{f"skyrl-{one}": (skyrl(folder), {"reduction": one}) for one in ("token_mean", "sequence_mean")},
        "skyrl-constant": (skyrl(folder), {"reduction": "seq_mean_token_sum_norm"}),
        "nemo-rl-token": (nemo_rl(folder), {}),
        "nemo-rl-sequence": (nemo_rl(folder), {"token_level_loss": False}),
        "nemo-rl-tis": (nemo_rl(folder), {**truncated, "truncated_importance_sampling_type": "tis"}),
        "nemo-rl-icepop": (nemo_rl(folder), {**truncated, **icepop}),
        "nemo-rl-kl": (nemo_rl(folder), penalized),
        "nemo-rl-kl-sequence": (nemo_rl(folder), {**penalized, "token_level_loss": False}),
        "nemo-rl-kl-filtered": (nemo_rl(folder), {**penalized, "filtered": 0.1}),
        "areal-grpo": (areal(folder), {}),
        "openrlhf-token": (openrlhf(folder), {}),
        "openrlhf-sequence": (openrlhf(folder), {"token_level_loss": False}),
        "openrlhf-icepop": (
            openrlhf(folder),
            {
                "enable_vllm_is_correction": True,
                "vllm_is_truncated_threshold": [0.5, 2.0],
                "vllm_is_correction_type": "icepop",
            },
        ),
        "slime-tis": (corrected(folder / SLIME, "vanilla_tis_function"), bounds),
        "slime-icepop": (corrected(folder / SLIME, "icepop_function"), bounds),
        "miles-tis": (corrected(folder / MILES, "vanilla_tis_function"), bounds),
        "miles-icepop": (corrected(folder / MILES, "icepop_function"), bounds),
    }
    for case, (run, options) in runs.items():
        for name, batch in each(batches):
            loss, gradient = with_gradient(partial(run, batch, **options), batch["current"])
            recording.add(case, name, options, loss=loss, gradient=gradient)
    recording.add("signatures", "hooks", {}, **{name: " ".join(one) for name, one in signatures(folder).items()})
    return recording


def signatures(folder: Path) -> dict[str, list[str]]:
    """The parameters of each hook, by adapter."""
    return {
        "skyrl": parameters(folder / SKYRL / "utils/ppo_utils.py", "ppo_policy_loss"),
        "nemo-rl": parameters(folder / NEMO_RL / "loss/loss_functions.py", "ClippedPGLossFn", "__call__"),
        "areal": parameters(folder / AREAL / "trainer/ppo/actor.py", "grpo_loss_fn"),
        "openrlhf": parameters(folder / OPENRLHF / "loss.py", "PolicyLoss", "forward"),
        "slime": parameters(folder / SLIME, "vanilla_tis_function"),
        "miles": parameters(folder / MILES, "vanilla_tis_function"),
        "slime-scores": parameters(folder / SLIME, SCORES),
        "miles-scores": parameters(folder / MILES_SCORES, SCORES),
        "slime-returns": [returned(folder / SLIME, SCORES)],
        "miles-returns": [returned(folder / MILES_SCORES, SCORES)],
    }
