"""Stable reinforcement learning for LLMs on off-policy data.

    logps = trimtab.PolicyLogps(current=c, behavior=b, mask=m, proximal=p)
    out = trimtab.objective("token-tis", weight_max=2.0)(logps, trimtab.advantages("grpo", rewards, groups))
    out.loss.backward()

Packages, by what a user wants; their docstrings say which module does what:

objectives, corrections   a loss, or only its weights and masks, in a training loop
check_loss                whether your own loss equals an objective (`trimtab check-loss`)
adapters                  an objective inside another trainer (TRL, verl, ...)
monitor                   alarms on log-probs while a run trains (`Monitor`), and on scalars that it logged
diagnosis                 the cause of a mismatch in a file of log-probs (`trimtab diagnose`)
preflight                 whether a pair of sampler and trainer is fit to train (`trimtab preflight`)
trainer                   training with Trimtab's own loop (`trimtab train`)
runs, report, pages       what a run wrote, its health, and its page (`trimtab report`)
cli                       the commands

The modules beside these packages serve several of them: the first line of each says for whom it is. Users import `api`,
`testing` (assertions for their tests), `types` and `errors`.

Names are imported on first use, so that `import trimtab` and the command line start without torch. A name whose
packages are not installed raises `TrimtabError` with the pip command.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab import objectives
    from trimtab.api import train
    from trimtab.corrections import OPSM, Band, Divergence, Veto, Weight
    from trimtab.diagnosis.pipeline import diagnose
    from trimtab.errors import TrimtabError, TrimtabWarning
    from trimtab.monitor import Monitor
    from trimtab.objectives import Objective, PolicyLogps, advantages, correct, mismatch, objective
    from trimtab.trainer.config import Config, load_config
    from trimtab.trainer.evaluation import pass_at_k

_EXPORTS = {
    "trimtab.api": ("train",),
    "trimtab.trainer.config": ("Config", "load_config"),
    "trimtab.corrections": ("Band", "Divergence", "OPSM", "Veto", "Weight"),
    "trimtab.diagnosis.pipeline": ("diagnose",),
    "trimtab.errors": ("TrimtabError", "TrimtabWarning"),
    "trimtab.trainer.evaluation": ("pass_at_k",),
    "trimtab.monitor": ("Monitor",),
    "trimtab.objectives": ("Objective", "PolicyLogps", "advantages", "correct", "mismatch", "objective"),
}
# The extra that a module needs; the other modules need only torch, numpy and jaxtyping.
_EXTRA_OF = {
    "trimtab.api": "train",
    "trimtab.trainer.config": "diagnose",
    "trimtab.diagnosis.pipeline": "diagnose",
    "trimtab.trainer.evaluation": "train",
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "OPSM",
    "Band",
    "Config",
    "Divergence",
    "Monitor",
    "Objective",
    "PolicyLogps",
    "TrimtabError",
    "TrimtabWarning",
    "Veto",
    "Weight",
    "advantages",
    "correct",
    "diagnose",
    "load_config",
    "mismatch",
    "objective",
    "objectives",
    "pass_at_k",
    "train",
]


def __getattr__(name: str) -> Any:
    # `trimtab.objectives` is a callable package: calling it lists the presets.
    if name == "objectives":
        return importlib.import_module("trimtab.objectives")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
    module = _MODULE_OF[name]
    if module in _EXTRA_OF:
        from trimtab.plugins import require_extra

        require_extra(_EXTRA_OF[module], f"trimtab.{name}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
