"""What Miles computes: `compute_mis_weights`, its built-in corrections, clipped loss, GSPO and OPSM.

Miles is read from a checkout, file by file; what its files import from the rest of Miles (context parallelism,
process groups) is not needed by the functions used here and is replaced by empty names.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its compiled functions run as written

import torch
from generate import Batch, Recording, each, with_gradient

MIS = "examples/infra_features/train_infer_mismatch_helper/mis.py"
MATH = "miles/backends/training_utils/loss_hub/math_utils.py"
CORRECTIONS = "miles/backends/training_utils/loss_hub/corrections.py"

DEFAULTS: dict[str, Any] = {
    "use_tis": True,
    "use_rs": False,
    "tis_level": "token",
    "rs_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": None,
    "tis_upper_bound": 2.0,
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": None,
    "tis_batch_normalize": False,
}

CASES: dict[str, dict[str, Any]] = {
    "token-truncate-2": {},
    "token-clip-0.5-2": {"tis_mode": "clip", "tis_lower_bound": 0.5},
    "token-clip-0.9-1.2-normalized": {
        "tis_mode": "clip",
        "tis_lower_bound": 0.9,
        "tis_upper_bound": 1.2,
        "tis_batch_normalize": True,
    },
    "token-mask-0.9-1.2": {"tis_mode": "mask", "tis_lower_bound": 0.9, "tis_upper_bound": 1.2},
    "sequence-truncate-2": {"tis_level": "sequence"},
    "sequence-truncate-2-normalized": {"tis_level": "sequence", "tis_batch_normalize": True},
    "sequence-mask-0.5-3": {
        "tis_level": "sequence",
        "tis_mode": "mask",
        "tis_lower_bound": 0.5,
        "tis_upper_bound": 3.0,
    },
    "geometric-clip-0.99-1.01": {
        "tis_level": "geometric",
        "tis_mode": "clip",
        "tis_lower_bound": 0.99,
        "tis_upper_bound": 1.01,
    },
    "token-clip-geometric-band-veto": {
        "tis_mode": "clip",
        "tis_lower_bound": 0.5,
        "use_rs": True,
        "rs_level": "geometric",
        "rs_lower_bound": 0.99,
        "rs_upper_bound": 1.001,
        "rs_veto_threshold": 1e-4,
    },
    "token-truncate-token-band-veto": {
        "use_rs": True,
        "rs_lower_bound": 0.8,
        "rs_upper_bound": 1.1,
        "rs_veto_threshold": 1e-4,
    },
    "token-truncate-sequence-band": {
        "use_rs": True,
        "rs_level": "sequence",
        "rs_lower_bound": 0.5,
        "rs_upper_bound": 3.0,
    },
}


def load(root: Path, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"miles_{Path(path).stem}", root / path)
    if spec is None or spec.loader is None or not (root / path).exists():
        raise SystemExit(f"{root / path} is missing: --miles must name a checkout of Miles")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_math(root: Path) -> ModuleType:
    cp_utils = ModuleType("miles.backends.training_utils.cp_utils")
    for name in ("all_gather_with_cp", "slice_log_prob_with_cp", "slice_loss_masks_for_local_cp"):
        setattr(cp_utils, name, None)
    parallel = ModuleType("miles.backends.training_utils.parallel")
    parallel.get_parallel_state = lambda: SimpleNamespace(cp=SimpleNamespace(size=1, rank=0))  # type: ignore[attr-defined]
    for name in ("miles", "miles.backends", "miles.backends.training_utils"):
        sys.modules[name] = ModuleType(name)
    sys.modules[cp_utils.__name__] = cp_utils
    sys.modules[parallel.__name__] = parallel
    cp_utils.slice_loss_masks_for_local_cp = lambda masks, *_: masks  # type: ignore[attr-defined]
    return load(root, MATH)


def rows(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor.unbind(0))


def record(batches: dict[str, Batch], root: Path) -> Recording:
    commit = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    recording = Recording({"miles": commit.stdout.strip(), "torch": torch.__version__})
    mis, math, corrections = load(root, MIS), load_math(root), load(root, CORRECTIONS)
    for name, batch in each(batches):
        _mis(recording, name, batch, mis)
        _built_in(recording, name, batch, corrections)
        _losses(recording, name, batch, math, mis)
    for name, batch in each(batches, "bounds"):
        _weights(recording, "mis/token-clip-geometric-band-veto", name, batch, mis)
    return recording


def _weights(recording: Recording, case: str, name: str, batch: Batch, mis: ModuleType) -> None:
    call = CASES[case.removeprefix("mis/")]
    weights, keep, metrics = mis.compute_mis_weights(
        SimpleNamespace(**DEFAULTS | call),
        train_log_probs=rows(batch["proximal"]),
        rollout_log_probs=rows(batch["behavior"]),
        loss_masks=rows(batch["mask"].double()),
    )
    kept = {key: torch.stack(values) for key, values in metrics.items() if not key.endswith("fraction")}
    wanted = (
        {key: kept[key] for key in ("kl", "k3_kl", "ppl_ratio", "chi2_token", "chi2_seq")}
        if case == "mis/token-truncate-2"
        else {}
    )
    recording.add(case, name, DEFAULTS | call, weights=torch.stack(weights), keep=torch.stack(keep).bool(), **wanted)


def _mis(recording: Recording, name: str, batch: Batch, mis: ModuleType) -> None:
    for case in CASES:
        _weights(recording, f"mis/{case}", name, batch, mis)
    call = DEFAULTS | CASES["geometric-clip-0.99-1.01"] | {"tis_batch_normalize": True}
    try:
        mis.compute_mis_weights(
            SimpleNamespace(**call),
            train_log_probs=rows(batch["proximal"]),
            rollout_log_probs=rows(batch["behavior"]),
            loss_masks=rows(batch["mask"].double()),
        )
        raised = ""
    except ValueError as error:
        raised = f"ValueError: {error}"
    recording.add("mis/geometric-clip-normalized", name, call, raised=raised)


def _built_in(recording: Recording, name: str, batch: Batch, corrections: ModuleType) -> None:
    args = SimpleNamespace(tis_clip_low=0.5, tis_clip=2.0)
    for case, function in {"tis": corrections.vanilla_tis_function, "icepop": corrections.icepop_function}.items():
        weights, _, _ = function(
            args,
            pg_loss=torch.ones(batch["mask"].numel(), dtype=torch.float64),
            train_log_probs=rows(batch["proximal"]),
            rollout_log_probs=rows(batch["behavior"]),
            loss_masks=rows(batch["mask"].double()),
        )
        recording.add(
            f"built-in/{case}-0.5-2", name, vars(args), weights=weights.view(batch["mask"].shape) * batch["mask"]
        )


def _losses(recording: Recording, name: str, batch: Batch, math: ModuleType, mis: ModuleType) -> None:
    mask = batch["mask"].double()
    count = mask.sum()

    def clipped(logp: torch.Tensor, dual: float | None) -> torch.Tensor:
        return math.compute_policy_loss(batch["proximal"] - logp, batch["advantage"].expand_as(logp), 0.2, 0.28, dual)[
            0
        ]

    for case, dual in {"clipped": None, "clipped-dual-3": 3.0}.items():
        value, gradient = with_gradient(
            lambda logp, dual=dual: (clipped(logp, dual) * mask).sum() / count, batch["current"]
        )
        recording.add(f"loss/{case}", name, {"eps_clip": 0.2, "eps_clip_high": 0.28}, loss=value, gradient=gradient)

    call = DEFAULTS | CASES["token-clip-geometric-band-veto"]
    weights, keep, _ = mis.compute_mis_weights(
        SimpleNamespace(**call),
        train_log_probs=rows(batch["proximal"]),
        rollout_log_probs=rows(batch["behavior"]),
        loss_masks=rows(mask),
    )
    weight, kept = torch.stack(weights), torch.stack(keep)
    # Miles divides by the counts of the original mask (`rollout_mask_sums`): rejection changes the numerator only.
    value, gradient = with_gradient(lambda logp: (clipped(logp, None) * weight * kept).sum() / count, batch["current"])
    recording.add("loss/mis", name, call, loss=value, gradient=gradient)

    gspo = math.compute_gspo_kl(rows(batch["current"]), rows(batch["proximal"]), rows(batch["current"]), rows(mask))
    recording.add("gspo-kl", name, {}, kl=gspo.view(mask.shape))
    for against in ("proximal", "behavior"):
        keep, _ = math.compute_opsm_mask(
            SimpleNamespace(opsm_delta=0.01),
            rows(batch["current"]),
            rows(batch[against]),
            rows(batch["advantage"].expand_as(mask)),
            rows(mask),
        )
        recording.add(f"opsm/{against}", name, {"opsm_delta": 0.01}, keep=keep.view(mask.shape).bool())
    for case, call in {"k1": {}, "k2": {}, "k3": {}, "unbiased": {"importance_ratio": True}}.items():

        def kl(logp: torch.Tensor, case: str = case, call: dict[str, Any] = call) -> torch.Tensor:
            ratio = (logp - batch["proximal"]).exp() if call else None
            kind = "k3" if call else case
            return (math.compute_approx_kl(logp, batch["reference"], kind, importance_ratio=ratio) * mask).sum() / count

        value, gradient = with_gradient(kl, batch["current"])
        recording.add(f"kl/{case}", name, call, loss=value, gradient=gradient)
    ess = math.compute_ess_ratio_contribution(
        (batch["proximal"] - batch["current"]).flatten(), rows(mask), [], [], "thd", None, True
    )
    recording.add("ess", name, {"calculate_per_token_loss": True}, ess=ess / count)
