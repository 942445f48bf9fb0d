"""A Trimtab objective as OpenRLHF's policy loss, or a record of OpenRLHF's own. Checked against 0.11.2 (3c3be623).

import trimtab.adapters.openrlhf
trimtab.adapters.openrlhf.install("icepop")     # in the process of the policy actor, before it is built
trimtab.adapters.openrlhf.install(dump="logps")     # OpenRLHF's own loss; its log-probs are written
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.adapters.hooks import build, hook, peer_module
from trimtab.adapters.loss_settings import refuse_chosen
from trimtab.adapters.micro_batch import evaluate, record
from trimtab.adapters.recording import Dump, MonitorChoice
from trimtab.errors import TrimtabError
from trimtab.objectives import Objective, PolicyLogps

MODULES = ("openrlhf.models.loss", "openrlhf.models", "openrlhf.trainer.ray.ppo_actor")


def install(
    objective: str | Objective | None = None, *, dump: str | None = None, monitor: MonitorChoice = None, **keywords: Any
) -> None:
    """Replaces `PolicyLoss` in the modules that use it. OpenRLHF has no hook; call it in each process of an actor.

    Without an objective, the loss stays OpenRLHF's own, bit for bit. With an objective, the actor's constructor raises
    `TrimtabError` for settings that only OpenRLHF's own loss reads (`eps_clip`, ...). dump: a folder for the log-probs
    of every call, which `trimtab diagnose` reads. monitor: True for the alarms of `trimtab.Monitor`, or a folder into
    which each process also writes its files.
    """
    built = None if objective is None and not keywords else build("openrlhf", objective, keywords)
    modules = [peer_module("OpenRLHF", name) for name in MODULES]
    for name, module in zip(MODULES, modules, strict=True):
        if not hasattr(module, "PolicyLoss"):
            raise TrimtabError(f"this version of OpenRLHF has no {name}.PolicyLoss: use 0.11.2")
    own = modules[0].PolicyLoss
    signature = inspect.signature(own)

    @functools.wraps(own, updated=())
    def policy_loss(*arguments: Any, **options: Any) -> nn.Module:
        if built is None:
            return _recorded(own(*arguments, **options), None if dump is None else Dump(dump), monitor)
        named = signature.bind(*arguments, **options).arguments
        given = {name: value for name, value in named.items() if value is not None}  # None: an option that is off
        refuse_chosen("OpenRLHF", "OPENRLHF", given, "In install")
        return ObjectivePolicyLoss(built, dump=dump, monitor=monitor)

    for module in modules:
        module.PolicyLoss = policy_loss


def _recorded(loss: nn.Module, dump: Dump | None, monitor: MonitorChoice) -> nn.Module:
    """Returns OpenRLHF's own loss, changed so that it writes its log-probs and shows them to a monitor."""
    own = loss.forward

    @functools.wraps(own)
    def forward(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        **counts: Any,
    ) -> Any:
        logps = _read(log_probs.detach(), old_log_probs, action_mask, rollout_log_probs)
        record(logps, advantages, dump=dump, monitor=monitor)
        return own(log_probs, old_log_probs, advantages, action_mask, rollout_log_probs, **counts)

    loss.forward = forward
    return loss


class ObjectivePolicyLoss(nn.Module):
    """A Trimtab objective with the interface of OpenRLHF's `PolicyLoss`."""

    def __init__(
        self, objective: str | Objective, *, dump: str | None = None, monitor: MonitorChoice = None, **keywords: Any
    ) -> None:
        super().__init__()
        self._monitor = monitor
        self._dump = None if dump is None else Dump(dump)
        self.objective = build("openrlhf", objective, keywords)

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | None = None,
        global_batch_size: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns the loss, the share of clipped tokens, the KL of the update, and the KL of sampler and trainer."""
        given = _read(log_probs, old_log_probs, action_mask, rollout_log_probs)
        mask = given.mask
        if "behavior" in self.objective.needs and rollout_log_probs is None:
            raise hook("openrlhf").absent(self.objective.name, "behavior")
        tokens = mask.sum() if batch_num_tokens is None else batch_num_tokens
        sequences = mask.shape[0] if global_batch_size is None else global_batch_size
        loss, values, logps = evaluate(
            self.objective, given, advantages, counts=(tokens, sequences), dump=self._dump, monitor=self._monitor
        )
        clipped = values.get("clip/low", 0.0) + values.get("clip/high", 0.0)
        count, mismatch = mask.sum().clamp(min=1), None
        old_to_new = torch.where(mask, old_log_probs - log_probs, 0.0).detach().sum() / count
        if rollout_log_probs is not None:
            mismatch = torch.where(logps.mask, rollout_log_probs - old_log_probs, 0.0).detach().sum() / count
        return loss * dp_size, torch.as_tensor(clipped).to(log_probs), old_to_new, mismatch


def _read(current: Tensor, old: Tensor, action_mask: Tensor | None, rollout: Tensor | None) -> PolicyLogps:
    mask = torch.ones_like(current, dtype=torch.bool) if action_mask is None else action_mask.bool()
    return PolicyLogps(current, rollout, mask, proximal=old)
