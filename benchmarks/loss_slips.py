"""Slips planted in the printed code of an objective, each by a change of its text, and the kinds that name it."""

from __future__ import annotations

import re
from collections.abc import Callable

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
TOKENS, LENGTH = r"tokens = mask\.sum\(\)\.clamp\(min=1\)", r"length = mask\.sum\(1, keepdim=True\)\.clamp\(min=1\)$"


def in_bfloat16(text: str) -> str | None:
    return changed(
        r"^    ((?:token_)?log_ratio|log_rho) = (\w+) - (\w+)$",
        r"    \1 = (\2.bfloat16() - \3.bfloat16()).to(\2.dtype)",
        text,
    )


def only_kept_tokens(text: str) -> str | None:
    return changed(TOKENS + r" if tokens is None else tokens", "tokens = keep.sum().clamp(min=1)", text) and changed(
        r"^    return", "    tokens = tokens * keep.sum().clamp(min=1) / mask.sum().clamp(min=1)\n    return", text
    )


READERS: dict[str, tuple[Plant, set[str]]] = {
    "exp forgotten, 1 + log": (
        first_of((r"(ratio|rho|rho_\w+) = (.*?)\.clamp\(-20, 20\)\.exp\(\)", r"\1 = 1 + \2")),
        {"log-ratio"},
    ),
    "A < 0 dropped": (
        first_of((r"(advantage = torch\.where\(mask, advantage, zero\))$", r"\1.clamp(min=0)")),
        {"dropped"},
    ),
    "denominator of kept tokens": (lambda text: only_kept_tokens(text) if "keep = " in text else None, {"denominator"}),
    "default of kept tokens": (
        lambda text: changed(TOKENS, "tokens = keep.sum().clamp(min=1)", text) if "keep = " in text else None,
        {"default"},
    ),
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
    "log-ratio in bfloat16": (in_bfloat16, {"rounding"}),
    "weight divided by its mean": (
        first_of(
            (r"^    losses =(.*weight)", r"    weight = weight / (weight * mask).sum() * mask.sum()\n    losses =\1")
        ),
        {"batch-statistics"},
    ),
}
"""Slips that a second author planted in three objectives each; the probes for them were written afterwards."""
