"""Slips planted in the printed code of an objective, and losses of public reports, with the kinds that name them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

Plant = Callable[[str], str | None]
"""Returns the text with the slip, or None where it does not apply."""
NUMBER = r"([\d.e-]+)"
VARIANTS: dict[str, dict[str, Any]] = {
    **{"": {}, "kl": {"kl_coef": 0.04}, "dual": {"clip_dual": 3.0}, "entropy": {"entropy_coef": 0.01}},
    **{"normalized": {"normalize": True}, "kept": {"denominator": "kept"}},
}
"""Further keywords of an objective in which slips are planted."""


class Slip(NamedTuple):
    """kinds: the differences that name it. needs: the variants in which it is planted."""

    plant: Plant
    kinds: Collection[str]
    needs: Collection[str]


def changed(pattern: str, new: str | Callable[[re.Match[str]], str], text: str) -> str | None:
    result, count = re.subn(pattern.replace("NUMBER", NUMBER), new, text, flags=re.MULTILINE)
    return result if count and result != text else None


def first_of(changes: Collection[tuple[str, str]]) -> Plant:
    """Returns a slip that is the first of these replacements that applies."""

    def plant(text: str) -> str | None:
        return next((result for change in changes if (result := changed(*change, text)) is not None), None)

    return plant


def gradient_through_the_weight(text: str) -> str | None:
    if "    weight = " in text:
        return changed(
            r"log_rho = proximal - behavior", r"log_rho = proximal - behavior + current - current.detach()", text
        )
    return first_of(
        [
            (r"surrogate = ratio\.detach\(\)", "surrogate = ratio"),
            (r"(log_bounded = sequence_log_ratio)", r"\1 + token_log_ratio - token_log_ratio.detach()"),
        ]
    )(text)


def bound_on_the_inverse(text: str) -> str | None:
    if "weight = rho.clamp(0.5, 2)" in text:  # a band that is its own inverse
        text = text.replace("weight = rho.clamp(0.5, 2)", "weight = rho .clamp(0.5, 2)")
    inside = r"(rho\w*) >= NUMBER\) & \(\1 <= NUMBER\)"
    return first_of(
        [
            (r"weight = (rho\w*)\.clamp\((.*)\)$", r"weight = 1 / (1 / \1).clamp(\2)"),
            (rf"weight = torch\.where\(\({inside}", r"weight = torch.where((1 / \1 >= \2) & (1 / \1 <= \3)"),
            (r"weight = torch\.where\((rho\w*) <= NUMBER", r"weight = torch.where(1 / \1 <= \2"),
            (r"\((rho_geometric|ratio) >= NUMBER\) & \(\1 <= NUMBER\)", r"(1 / \1 >= \2) & (1 / \1 <= \3)"),
        ]
    )(text)


def ratio_to_the_wrong_policy(text: str) -> str | None:
    if "def m2po_limit" in text:
        return None
    old, new = ("proximal", "behavior") if "log_ratio = current - proximal" in text else ("behavior", "proximal")
    result = changed(rf"^    (token_)?log_ratio = current - {old}$", rf"    \1log_ratio = current - {new}", text)
    if result is None or re.search(rf"_loss\(.*{new}", result):
        return result
    result = re.sub(r"_loss\(current", rf"_loss(current, {new}", result)
    line = f"    {new} = torch.where(mask, {new}.detach(), zero)\n"
    return re.sub(r"(    current = torch\.where\(mask, current, zero\)\n)", rf"\1{line}", result)


def clip_of_the_log(text: str) -> str | None:
    return changed(
        r"\bratio\.clamp\(NUMBER, NUMBER\)",
        lambda found: f"log_ratio.clamp({float(found[1]) - 1:g}, {float(found[2]) - 1:g}).exp()",
        text,
    )


def swapped_bounds(text: str) -> str | None:
    def swap(found: re.Match[str]) -> str:
        return f"ratio.clamp({2 - float(found[2]):g}, {2 - float(found[1]):g})"

    return changed(r"\bratio\.clamp\(NUMBER, NUMBER\)", swap, text)


def ratio_without_gradient(text: str) -> str | None:
    if "= ratio.detach()" in text:
        return None
    return changed(r"^    ratio = (log_ratio\.clamp\(-20, 20\)\.exp\(\))$", r"    ratio = \1.detach()", text)


def _slip(row: dict[str, Any]) -> Slip:
    plant = globals()[row["plant"]] if "plant" in row else first_of(row["changes"])
    return Slip(plant, row["kinds"], row.get("needs", [""]))


SETS: dict[str, dict[str, Slip]] = {
    group: {name: _slip(row) for name, row in rows.items()}
    for group, rows in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}


def clipped(current: Tensor, proximal: Tensor, advantage: Tensor, high: float = 1.2) -> Tensor:
    ratio = (current - proximal).clamp(-20, 20).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, high) * advantage)


def dapo_accumulated(current: Any, proximal: Any, mask: Any, advantage: Any, tokens: Any, parts: Any) -> Tensor:
    """Divided by the tokens of the update, and by the accumulation steps again."""
    return torch.where(mask, clipped(current, proximal, advantage, 1.28), 0.0).sum() / tokens / parts


def dr_grpo_of_micro_batch(current: Any, proximal: Any, mask: Any, advantage: Any) -> Tensor:
    """Divided by rows and width of the micro-batch."""
    return torch.where(mask, clipped(current, proximal, advantage), 0.0).sum() / mask.numel()


def grpo_unbounded(current: Any, proximal: Any, mask: Any, advantage: Any, responses: Any) -> Tensor:
    """exp of any log-ratio."""
    ratio = torch.where(mask, current - proximal, 0.0).exp()
    loss = torch.where(mask, -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage), 0.0)
    return (loss.sum(1) / mask.sum(1).clamp(min=1)).sum() / responses


def tis_with_gradient(current: Any, proximal: Any, behavior: Any, mask: Any, advantage: Any, tokens: Any) -> Tensor:
    """The weight is taken from the live policy and not detached."""
    weight = torch.where(mask, current - behavior, 0.0).clamp(-20, 20).exp().clamp(max=2)
    return torch.where(mask, weight * clipped(current, proximal, advantage), 0.0).sum() / tokens


def cispo_with_floor(current: Any, proximal: Any, mask: Any, advantage: Any, tokens: Any) -> Tensor:
    """clamp(1 - 0, 1 + 5): a floor of 1."""
    ratio = torch.where(mask, current - proximal, 0.0).clamp(-20, 20).exp().detach().clamp(1, 6)
    return torch.where(mask, -ratio * advantage * current, 0.0).sum() / tokens


def k3_mask_of_inverse(current: Any, proximal: Any, behavior: Any, mask: Any, advantage: Any, tokens: Any) -> Tensor:
    """k3 of mu/pi_old in place of pi_old/mu."""
    log = torch.where(mask, behavior - proximal, 0.0)
    k3 = ((log.exp() - log) - 1).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return torch.where(mask & (k3 <= 0.01), clipped(current, proximal, advantage), 0.0).sum() / tokens


REPORTS: list[tuple[str, str, Callable[..., Tensor], set[str]]] = [
    ("huggingface/trl#5619", "dapo", dapo_accumulated, {"micro-batches"}),
    ("verl-project/verl#3741", "dr-grpo", dr_grpo_of_micro_batch, {"denominator", "micro-batches"}),
    ("OpenRLHF/OpenRLHF#1293", "grpo", grpo_unbounded, {"exponent"}),
    ("a weight that carries a gradient", "token-tis", tis_with_gradient, {"live-weight"}),
    ("NovaSky-AI/SkyRL#1928", "cispo", cispo_with_floor, {"kink"}),
    ("verl's k3 of the inverse ratio", "k3-mask", k3_mask_of_inverse, {"inverse"}),
]
