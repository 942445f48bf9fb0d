"""What prime-rl's losses compute: `ipo`, and its DPPO with binary total variation, both without their KL term.

They run as they are, from `src/prime_rl/trainer/rl/loss.py` of a checkout; only the imports that they do not use (two
of its own package, and the type checker) are replaced by empty modules.
"""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from generate import Batch, Recording, each, with_gradient

LOSS = Path("src/prime_rl/trainer/rl/loss.py")
CASES: dict[str, tuple[str, dict[str, float]]] = {
    "ipo-0.3": ("ipo_loss_fn", {"ipo_threshold": 0.3}),
    "ipo-0.05": ("ipo_loss_fn", {"ipo_threshold": 0.05}),
    "default-0.2": ("default_loss_fn", {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2}),
    "default-0.05": ("default_loss_fn", {"dppo_mask_low": 0.05, "dppo_mask_high": 0.05}),
}


def functions(checkout: Path) -> dict[str, Any]:
    """The functions of the loss file."""
    for name in ("prime_rl", "prime_rl.configs", "prime_rl.utils"):
        sys.modules[name] = ModuleType(name)
    configs, utils = ModuleType("prime_rl.configs.trainer"), ModuleType("prime_rl.utils.utils")
    for name in ("CustomLossConfig", "DefaultLossConfig", "IPOLossConfig", "LossConfig"):
        setattr(configs, name, SimpleNamespace)
    utils.import_object = None  # pyright: ignore[reportAttributeAccessIssue]
    typechecker = ModuleType("beartype")
    typechecker.beartype = lambda function: function  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules["beartype"] = typechecker
    sys.modules["prime_rl.configs.trainer"], sys.modules["prime_rl.utils.utils"] = configs, utils
    return runpy.run_path(str(checkout / LOSS))


def record(batches: dict[str, Batch], checkout: Path) -> Recording:
    loss = functions(checkout)
    commit = (checkout / "COMMIT").read_text().strip()
    recording = Recording({"prime-rl": commit, "torch": torch.__version__})
    for name, batch in each(batches):
        for case, (function, options) in CASES.items():
            config = SimpleNamespace(adv_tau=1.0, kl_tau=0.0, **options)
            value, gradient = with_gradient(partial(_mean, loss, function, config, batch), batch["current"])
            recording.add(case, name, {**options, "adv_tau": 1.0, "kl_tau": 0.0}, loss=value, gradient=gradient)
    return recording


def _mean(loss: dict[str, Any], function: str, config: Any, batch: Batch, logp: torch.Tensor) -> torch.Tensor:
    """The sum of the losses of all rows over their trained tokens, as prime-rl scales it."""
    parts = [
        loss[function](
            loss["LossInputs"](
                trainer_logprobs=logp[row],
                inference_logprobs=batch["behavior"][row],
                ref_logprobs=None,
                advantages=batch["advantage"][row].expand_as(logp[row]),
                loss_mask=batch["mask"][row],
            ),
            config,
        ).loss
        for row in range(len(logp))
    ]
    return torch.stack(parts).sum() / batch["mask"].sum()
