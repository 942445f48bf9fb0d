"""What AReaL's decoupled loss computes with its log-linear proximal policy (`prox_logp_method = "loglinear"`), A-3PO.

    python generate.py --areal CHECKOUT

Its functions are taken out of their files and run as they are (from_hooks.py), called as `grpo_loss_fn` calls them:
the proximal policy is resolved from detached log-probs, then the loss takes it. The loss has the weight
proximal/behavior, computed in float32, only where `rejection_sampling` is set; here it clamps at a bound that nothing
reaches, and the case `unweighted` leaves it out. Frozen for tokens of each age, in AReaL's count: the version that is
trained minus the version that sampled the token.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from from_hooks import load
from generate import Batch, Recording, each, with_gradient

VERSION = 10
WEIGHTED = {"level": "token", "action": "clamp", "metric": "ratio", "agg": "mean", "upper": 1e9, "lower": None}
AGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fresh": torch.zeros_like,
    **{f"age-{age}": partial(torch.full_like, fill_value=age) for age in (1, 2, 7)},
    "mixed": lambda columns: 1 + columns % 4,
    "unweighted": lambda columns: 1 + columns % 4,
}
"""The ages of the tokens in each case, from the numbers of their columns (rows, time)."""


def functions(checkout: Path) -> dict[str, Any]:
    """The loss, and what resolves the proximal policy."""
    space: dict[str, Any] = {"torch": torch, "str": str, "Enum": Enum, "RejectionSamplingResult": SimpleNamespace}
    load(space, checkout / "areal/utils/constants.py", "ProxLogpMethod", "ProxApproxMethod")
    for name in ("ProxLogpMethod", "ProxApproxMethod"):
        prefix = "PROX_LOGP_METHOD" if name == "ProxLogpMethod" else "PROX_APPROX_METHOD"
        space |= {f"{prefix}_{member.name}": member.value for member in space[name]}  # as constants.py ends
    load(space, checkout / "areal/utils/functional/functional.py", "ppo_actor_loss_fn", "apply_rejection_sampling")
    load(space, checkout / "areal/trainer/ppo/actor.py", "compute_prox_logp_approximations", "_resolve_proximal_logp")
    return space


def record(batches: dict[str, Batch], checkout: Path) -> Recording:
    space = functions(checkout)
    commit = (checkout / "COMMIT").read_text().strip()
    recording = Recording({"areal": commit, "torch": torch.__version__})
    for name, batch in each(batches):
        columns = torch.arange(batch["mask"].shape[1]).expand(batch["mask"].shape)
        for case, ages in AGES.items():
            rejection = None if case == "unweighted" else WEIGHTED
            loss, gradient = with_gradient(partial(_loss, space, batch, ages(columns), rejection), batch["current"])
            call = {"prox_logp_method": "loglinear", "eps_clip": 0.2, "rejection_sampling": rejection}
            recording.add(case, name, call, loss=loss, gradient=gradient)
    return recording


def _loss(
    space: dict[str, Any], batch: Batch, ages: torch.Tensor, rejection: dict[str, Any] | None, logp: torch.Tensor
) -> torch.Tensor:
    proximal = space["_resolve_proximal_logp"](
        prox_logp_gt=None,
        prox_logp_method="loglinear",
        old_logp=batch["behavior"],
        logprobs=logp.detach(),
        versions=VERSION - ages,
        current_version=VERSION,
    )
    return space["ppo_actor_loss_fn"](
        logprobs=logp,
        proximal_logprobs=proximal,
        old_logprobs=batch["behavior"],
        advantages=batch["advantage"].expand_as(logp),
        eps_clip=0.2,
        loss_mask=batch["mask"],
        rejection_sampling=None if rejection is None else SimpleNamespace(**rejection),
    )[0]
