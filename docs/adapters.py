"""Generates docs/adapters.md from the hooks of the adapters: `python docs/adapters.py > docs/adapters.md`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trimtab.adapters.hooks import HOOKS
from trimtab.objectives import Aggregation, Objective, objective, objectives

HEAD = """# Inside other trainers

An adapter makes Trimtab's objectives a line of another trainer's configuration. It needs only the core of the package
(no extra: torch, numpy, jaxtyping). Rollouts, rewards, advantages, and KL and entropy terms where the
table says so remain the trainer's.

This page is generated from `src/trimtab/adapters/hooks.py` (`python docs/adapters.py > docs/adapters.md`).

| trainer | version | one line | checked |
|---|---|---|---|
"""

TRAINERS: dict[str, tuple[str, str, str]] = {
    "trl": ("1.16.0", "`from trimtab.adapters.trl import GRPOTrainer`", "run"),
    "verl": ("0.9.1", "`actor.policy_loss.loss_mode=trimtab-NAME`", "run"),
    "prime-rl": ("559b4477", '`import_path = "trimtab.adapters.prime_rl.loss"`', "against source"),
    "skyrl": ("a9564572", '`trimtab.adapters.skyrl.register("NAME")`', "against source"),
    "nemo-rl": ("7ea279ab", '`loss_fn = ObjectiveLoss("NAME", ...)` after `setup`', "against source"),
    "miles": ("31f1ca96", "`--custom-tis-function-path trimtab.adapters.slime.tis`", "against source"),
    "slime": ("624b824a", "`--custom-tis-function-path trimtab.adapters.slime.tis`", "against source"),
    "areal": ("4aef98d8 (1.0.4)", '`install("NAME")` in the constructor of an actor', "against source"),
    "openrlhf": ("3c3be623 (0.11.2)", '`install("NAME")` in the actor of the policy', "against source"),
    "tinker": ("SDK 0.38.0", '`forward_backward_custom(data, custom_loss("NAME"))`', "against source"),
}
"""Version, the line, and how the adapter was checked, by the name of its hook."""

PAGES = {"miles": "slime"}

GRADES = """
- **run**: the trainer itself ran with the adapter on a CPU, and its loss and gradient were compared with its own.
- **against source**: its own loss functions were taken out of its files and run on the same batches, called as its
  trainer calls them; the adapter gives the same losses and gradients, to 1e-6 in float64 (SkyRL to 5e-5, which
  exponentiates in float32). The numbers are frozen in `tests/parity/frozen/hooks.json`; with
  `TRIMTAB_PEERS=FOLDER` the test computes them again from checkouts. Of tinker, whose service computes no loss of a
  user, it is what its SDK sends there.
- **read**: the interface was read in its documentation only. No adapter is left at this grade.

In all, every preset that the hook carries gives the loss and gradient of the library
(`tests/contract/test_adapters.py`; in TRL's trainer and verl's `ppo_loss`: `tests/e2e/test_trl_trainer.py` and
`tests/e2e/test_verl_losses.py`).

## What each hook carries

Policies besides the current one: μ is the sampler's, π_old that at the start of the update, π_ref the reference.
Where a trainer makes one update a batch, π_old is the current policy. Turns follow from the mask.

"""

OPTIONS: dict[str, dict[str, Any]] = {"dr-grpo": {"length_max": 1}, "luffy": {"length_max": 1}}
SYMBOLS = {"behavior": "μ", "proximal": "π_old", "reference": "π_ref", "entropy": "entropy", "age": "age"}


def markdown() -> str:
    """The whole page."""
    lines = [HEAD.rstrip("\n")]
    for name, (version, line, grade) in TRAINERS.items():
        page = PAGES.get(name, name)
        lines.append(f"| [{HOOKS[name].trainer}](adapters/{page}.md) | {version} | {line} | {grade} |")
    lines += [
        GRADES.rstrip("\n"),
        "",
        "| trainer | policies | statistics of the whole update | aggregation | KL, entropy |",
    ]
    lines += ["|---|---|---|---|---|"]
    for hook in HOOKS.values():
        policies = ", ".join(SYMBOLS[name] for name in SYMBOLS if name in hook.passes)
        aggregation = ", ".join(hook.aggregations) or "any"
        terms = "objective" if hook.terms else "trainer"
        whole = "yes" if hook.whole_update else "no"
        lines.append(f"| {hook.trainer} | {policies} | {whole} | {aggregation} | {terms} |")
    lines += [
        "",
        "## What is refused",
        "",
        "Every other preset is carried, with an aggregation that the trainer has.",
        "",
    ]
    lines += ["| preset | refused by | reason |", "|---|---|---|"]
    for name in objectives():
        for reason, trainers in refusals(objective(name, **OPTIONS.get(name, {}))).items():
            where = "all" if len(trainers) == len(HOOKS) else ", ".join(trainers)
            lines.append(f"| `{name}` | {where} | {reason} |")
    return "\n".join(lines)


def refusals(one: Objective) -> dict[str, list[str]]:
    """The trainers that refuse an objective, by the reason without its remedy."""
    result: dict[str, list[str]] = {}
    for hook in HOOKS.values():
        allowed = one
        if one.name != "oapl" and hook.aggregations and one.aggregation.kind not in hook.aggregations:
            allowed = replace(one, aggregation=Aggregation(hook.aggregations[0]))
        reason = hook.refusal(allowed)
        if reason is not None:
            result.setdefault(reason.split(":")[0], []).append(hook.trainer)
    return result


if __name__ == "__main__":
    print(markdown())
