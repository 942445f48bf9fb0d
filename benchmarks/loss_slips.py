"""Slips planted in the printed code of an objective, and losses of public reports, with the kinds that name them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Plant = Callable[[str], str | None]
"""Returns the text with the slip, or None where it does not apply."""


def changed(pattern: str, new: str | Callable[[re.Match[str]], str], text: str) -> str | None:
    result, count = re.subn(pattern, new, text, flags=re.MULTILINE)
    return result if count and result != text else None


def first_of(*changes: tuple[str, str]) -> Plant:
    """Returns a slip that is the first of these replacements that applies."""

    def plant(text: str) -> str | None:
        return next((result for change in changes if (result := changed(*change, text)) is not None), None)

    return plant


CLIP = r"^    (surrogate|clipped) = torch\.minimum\((ratio .*|log_bounded.*)\)$"
NUMBER = r"([\d.e-]+)"


def gradient_through_the_weight(text: str) -> str | None:
    if "    weight = " in text:
        return changed(
            r"log_rho = proximal - behavior", r"log_rho = proximal - behavior + current - current.detach()", text
        )
    return first_of(
        (r"surrogate = ratio\.detach\(\)", "surrogate = ratio"),
        (r"(log_bounded = sequence_log_ratio)", r"\1 + token_log_ratio - token_log_ratio.detach()"),
    )(text)


def clip_on_the_wrong_side(text: str) -> str | None:
    return changed(CLIP, r"\g<0>\n    \1 = torch.where(advantage < 0, torch.maximum(\2), \1)", text)


def bound_on_the_inverse(text: str) -> str | None:
    if "weight = rho.clamp(0.5, 2)" in text:  # a band that is its own inverse
        text = text.replace("weight = rho.clamp(0.5, 2)", "weight = rho .clamp(0.5, 2)")
    return first_of(
        (r"weight = (rho\w*)\.clamp\((.*)\)$", r"weight = 1 / (1 / \1).clamp(\2)"),
        (
            rf"weight = torch\.where\(\((rho\w*) >= {NUMBER}\) & \(\1 <= {NUMBER}\)",
            r"weight = torch.where((1 / \1 >= \2) & (1 / \1 <= \3)",
        ),
        (rf"weight = torch\.where\((rho\w*) <= {NUMBER}", r"weight = torch.where(1 / \1 <= \2"),
        (rf"\((rho_geometric|ratio) >= {NUMBER}\) & \(\1 <= {NUMBER}\)", r"(1 / \1 >= \2) & (1 / \1 <= \3)"),
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


SLIPS: dict[str, tuple[Plant, set[str]]] = {
    "gradient through the weight": (gradient_through_the_weight, {"live-weight"}),
    "min for max": (first_of((CLIP, r"    \1 = torch.maximum(\2)")), {"min-max"}),
    "bound on the inverse": (bound_on_the_inverse, {"inverse"}),
    "clip of A < 0 on the wrong side": (clip_on_the_wrong_side, {"clip-side"}),
    "no dual clip": (
        first_of((r"surrogate = torch\.where\(advantage < 0, torch\.maximum\(clipped, .*", "surrogate = clipped")),
        {"dual-clip"},
    ),
    "mean over padding": (
        first_of(
            (r"losses\.sum\(\) / tokens", "losses.mean()"),
            (r"\(losses / length\)\.sum\(\) / responses", "losses.mean(1).sum() / responses"),
        ),
        {"denominator"},
    ),
    "denominator of the micro-batch": (
        first_of((r"^    (tokens|responses) = (.*) if \1 is None else \1$", r"    \1 = \2")),
        {"micro-batches"},
    ),
    "sequence mean for token mean": (
        first_of(
            (r"losses\.sum\(\) / tokens", "(losses.sum(1) / mask.sum(1).clamp(min=1)).mean()"),
            (r"\(losses / length\)\.sum\(\) / responses", "losses.sum() / mask.sum()"),
        ),
        {"denominator"},
    ),
    "std of the batch": (
        first_of(
            (
                r"advantage = torch\.where\(mask, advantage, zero\)$",
                "advantage = torch.where(mask, advantage / (advantage.std() + 1e-6), zero)",
            )
        ),
        {"normalized-advantage"},
    ),
    "ratio to the wrong policy": (ratio_to_the_wrong_policy, {"policy"}),
    "product for geometric mean": (
        first_of(
            (r"\(log_rho\.sum\(1, keepdim=True\) / length\)", "log_rho.sum(1, keepdim=True)"),
            (r"(_log_ratio = .*\.(sum|cumsum)\(.*\)) / (length|position)$", r"\1"),
            (r"(lag = .*|mean = .*|\(k3\.sum\(1, keepdim=True\)|\(binary_kl\.sum\(1, keepdim=True\)) / length", r"\1"),
        ),
        {"level"},
    ),
    "KL over padding": (
        first_of((r"reference = torch\.where\(mask, reference\.detach\(\), zero\)", "reference = reference.detach()")),
        {"kl-padding"},
    ),
    "k1 for k3": (first_of((r"(k3|k3_2) = torch\.expm1\(log_reference.*", r"\1 = -log_reference")), {"kl"}),
    "NaN from padding": (
        first_of((r"    current = torch\.where\(mask, current, zero\)", "    current = current * mask")),
        {"nan"},
    ),
}
"""Slips that the probes were written with."""


def clip_of_the_log(text: str) -> str | None:
    return changed(
        rf"\bratio\.clamp\({NUMBER}, {NUMBER}\)",
        lambda found: f"log_ratio.clamp({float(found[1]) - 1:g}, {float(found[2]) - 1:g}).exp()",
        text,
    )


def swapped_bounds(text: str) -> str | None:
    def swap(found: re.Match[str]) -> str:
        return f"ratio.clamp({2 - float(found[2]):g}, {2 - float(found[1]):g})"

    return changed(rf"\bratio\.clamp\({NUMBER}, {NUMBER}\)", swap, text)


def ratio_without_gradient(text: str) -> str | None:
    if "= ratio.detach()" in text:
        return None
    return changed(r"^    ratio = (log_ratio\.clamp\(-20, 20\)\.exp\(\))$", r"    ratio = \1.detach()", text)


OTHERS: dict[str, tuple[Plant, set[str]]] = {
    "bounds on the log of the ratio": (clip_of_the_log, {"clip"}),
    "bounds swapped": (swapped_bounds, {"clip"}),
    "size of the advantage without its sign": (
        first_of((r"(advantage = torch\.where\(mask, advantage)(, zero\))$", r"\1.abs()\2")),
        {"sign"},
    ),
    "advantage clipped": (
        first_of((r"(advantage = torch\.where\(mask, advantage)(, zero\))$", r"\1.clamp(-0.8, 0.8)\2")),
        {"normalized-advantage"},
    ),
    "divided by the length twice": (first_of((r"losses / length\)", "losses / length / length)")), {"denominator"}),
    "weight applied twice": (
        first_of((r"-weight \* surrogate", "-weight * weight * surrogate")),
        {"shape", "policy", "level"},
    ),
    "sampler's log-probs one token late": (
        first_of(
            (
                r"behavior = torch\.where\(mask, behavior\.detach\(\), zero\)",
                "behavior = torch.where(mask, behavior.detach().roll(1, 1), zero)",
            )
        ),
        {"level", "policy", "alignment"},
    ),
    "KL the other way round": (
        first_of((r"log_reference = reference - current", "log_reference = current - reference")),
        {"kl"},
    ),
    "ratio without gradient": (ratio_without_gradient, {"no-gradient"}),
    "masked in place of truncated": (
        first_of((r"weight = (rho\w*)\.clamp\((?:0\.5, |max=)2\)", r"weight = torch.where(\1 <= 2, \1, 0.0)")),
        {"weight"},
    ),
}
"""Slips that were written when the probes were finished."""
MORE: dict[str, tuple[Plant, set[str]]] = {
    "half the loss": (
        first_of((r"losses = torch\.where\((mask|keep), ", r"losses = 0.5 * torch.where(\1, ")),
        {"scale"},
    ),
    "KL coefficient ten times": (first_of((r"\+ 0\.04 \* k3", "+ 0.4 * k3")), {"kl"}),
    "no lower clip": (first_of((rf"\bratio\.clamp\({NUMBER}, {NUMBER}\)", r"ratio.clamp(max=\2)")), {"clip"}),
    "weight not applied": (first_of((r"-weight \* surrogate", "-surrogate")), {"policy", "level"}),
    "no division": (
        first_of(
            (r"losses\.sum\(\) / tokens", "losses.sum()"),
            (r"\(losses / length\)\.sum\(\) / responses", "(losses / length).sum()"),
        ),
        {"denominator"},
    ),
    "bound of the weight doubled": (
        first_of(
            (r"(weight = rho\w*\.clamp\((?:0\.5, |max=))2\)", r"\g<1>4)"),
            (r"(weight = torch\.where\(rho\w* <= )2,", r"\g<1>4,"),
        ),
        {"weight"},
    ),
}
"""Slips that were written after a probe and two sentences had been added for those of `OTHERS`."""
READERS: dict[str, tuple[Plant, set[str]]] = {
    "exp forgotten": (first_of((r"(r\w+ = )(.*?)\.clamp\(-20, 20\)\.exp\(\)", r"\g<1>1 + \2")), {"log-ratio"}),
    "A < 0 dropped": (first_of((r"(advantage = .*, advantage, zero\))$", r"\1.clamp(min=0)")), {"dropped"}),
    "denominator of kept tokens": (
        first_of(
            (r"(?s)(keep = .* else tokens.*)(?=    return)", r"\1    tokens = tokens * keep.sum() / mask.sum()\n")
        ),
        {"denominator"},
    ),
    "default of kept tokens": (first_of((r"(?s)(keep = .*tokens = )mask", r"\1keep")), {"default"}),
    "sum over the batch": (
        first_of(
            (r"(log_\w+)\.sum\(1, keepdim=True\) / length", r"\1.sum() / mask.sum()"),
            (r"(log_\w+)\.sum\(1, keepdim=True\)", r"\1.sum(0, keepdim=True)"),
        ),
        {"batch-statistics"},
    ),
    "last token dropped": (
        first_of((r"^    zero = torch", "    mask = mask & (mask.flip(1).cumsum(1).flip(1) > 1)\n    zero = torch")),
        {"dropped"},
    ),
    "log-ratio in bfloat16": (
        first_of((r"(log_ratio|log_rho) = (\w+) - (\w+)$", r"\1 = (\2.bfloat16() - \3.bfloat16()).to(\2.dtype)")),
        {"rounding"},
    ),
    "weight divided by its mean": (
        first_of((r"^    losses =(.*weight)", r"    weight = weight / (weight * mask).sum() * mask.sum()\n\g<0>")),
        {"batch-statistics"},
    ),
}
"""Slips that a second author planted in three objectives each; the probes for them were written afterwards."""


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
