"""Prints what each adapter carries and refuses, which the site appends to docs/reference-adapters.md (docs/site.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trimtab.adapters.hooks import HOOKS
from trimtab.objectives import Aggregation, Objective, objective, objectives

HEAD = """## What each adapter carries

Policies besides the current one: μ is the sampler's, π_old that at the start of the update, π_ref the reference.
Where a trainer makes one update per batch, π_old is the current policy. Turns follow from the mask.

| trainer | policies | statistics of the whole update | aggregation | KL, entropy |
|---|---|---|---|---|
"""

OPTIONS: dict[str, dict[str, Any]] = {"dr-grpo": {"length_max": 1}, "luffy": {"length_max": 1}}
SYMBOLS = {"behavior": "μ", "proximal": "π_old", "reference": "π_ref", "entropy": "entropy", "age": "age"}


def markdown() -> str:
    """Both tables."""
    lines = [HEAD.rstrip("\n")]
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
