"""What differs from an objective is named with its figure; a right loss, written otherwise, is equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import trimtab
from trimtab.check_loss.bends import Bend, find_bends
from trimtab.check_loss.check import check
from trimtab.check_loss.signatures import of_function
from trimtab.testing import assert_loss


def grpo(
    logps: Tensor,
    old_logps: Tensor,
    mask: Tensor,
    advantages: Tensor,
    num_sequences: int,
    *,
    high: float = 1.2,
    scale: float = 1.0,
    late: int = 0,
    inside: Callable[[Tensor], Tensor] = lambda advantage: advantage,
    kl: Callable[[Tensor], Tensor] | None = None,
    ref_logps: Tensor | None = None,
) -> Tensor:
    """GRPO as it is usually written; the keywords plant a mistake."""
    ratio = torch.where(mask, logps - old_logps.roll(late, 1), 0.0).clamp(-20, 20).exp()
    advantages = inside(advantages)
    loss = -scale * torch.min(ratio * advantages, ratio.clamp(0.8, high) * advantages)
    if kl is not None and ref_logps is not None:
        loss = loss + 0.04 * kl(torch.where(mask, ref_logps - logps, 0.0))
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    return (torch.where(mask, loss, 0.0) / lengths).sum() / num_sequences


def with_default(
    logps: Tensor, old_logps: Tensor, mask: Tensor, advantages: Tensor, num_sequences: int | None = None
) -> Tensor:
    return grpo(logps, old_logps, mask, advantages, len(mask) if num_sequences is None else num_sequences)


def found(loss: Callable[..., Any], name: str = "grpo", **keywords: Any) -> list[tuple[str, str]]:
    answer = check(of_function(loss), trimtab.objective(name, **keywords), spec=name)
    return [(one.kind, one.text) for one in answer.differences]


def planted(**changes: Any) -> Callable[..., Tensor]:
    def loss(
        logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor, advantages: Tensor, num_sequences: int
    ) -> Tensor:
        return grpo(logps, old_logps, mask, advantages, num_sequences, ref_logps=ref_logps, **changes)

    return loss


def test_a_right_loss_is_equal() -> None:
    assert_loss(grpo, "grpo")
    assert_loss(with_default, "grpo")
    assert_loss(planted(high=1.28), trimtab.objective("grpo", clip_high=0.28))
    k3 = {"kl": lambda d: d.exp() - 1 - d}
    assert_loss(planted(**k3), "grpo", kl="k3", kl_coef=0.04)


@pytest.mark.parametrize(
    ("changes", "kind", "figures"),
    [
        ({"high": 1.28}, "clip", ["A > 0 above 1", "1.28", "1.2"]),
        ({"scale": 0.5}, "scale", ["0.5 times"]),
        ({"scale": -1.0}, "sign", ["rises with the advantage"]),
        ({"inside": torch.abs}, "sign", ["for A < 0"]),
        ({"late": 1}, "alignment", ["one too early or too late"]),
        ({"inside": lambda a: a / (a.abs().mean() + 1e-9)}, "normalized-advantage", ["give 1 times", "not 3"]),
        ({"kl": lambda d: d**2 / 2}, "kl", ["k2 with the coefficient 0.04", "none"]),
        ({"kl": lambda d: (-d).exp() - 1 + d}, "kl", ["k3 of the reverse direction with the coefficient 0.04"]),
        ({"kl": lambda d: d}, "kl", ["k1 of the reverse direction with the coefficient 0.04"]),
    ],
)
def test_a_mistake_is_named_first_with_its_figure(changes: dict[str, Any], kind: str, figures: list[str]) -> None:
    first = found(planted(**changes))[0]
    assert first[0] == kind
    assert [figure for figure in figures if figure not in first[1]] == []


@pytest.mark.parametrize(("bound", "reach"), [(torch.inf, 20), (10.0, 10)])
def test_another_clamp_of_the_exponent_is_a_note(bound: float, reach: int) -> None:
    def own_clamp(logps: Tensor, old_logps: Tensor, mask: Tensor, advantages: Tensor, num_sequences: int) -> Tensor:
        near = torch.where(mask, logps - old_logps, 0.0).clamp(-bound, bound)
        loss = -torch.min(near.exp() * advantages, near.exp().clamp(0.8, 1.2) * advantages)
        return (torch.where(mask, loss, 0.0).sum(1) / mask.sum(1).clamp(min=1)).sum() / num_sequences

    answer = check(of_function(own_clamp), trimtab.objective("grpo"), spec="grpo")
    assert (answer.equal, [one.kind for one in answer.notes]) == (True, ["exponent"])
    assert f"|log-ratio| <= {reach}, " in answer.notes[0].text
    assert "own_clamp is grpo, except as noted: " in answer.text().partition("\n")[0]
    assert check(of_function(own_clamp), trimtab.objective("grpo"), ignore=["exponent"]).notes == []
    assert_loss(own_clamp, "grpo")


def test_padding() -> None:
    def product(logps: Tensor, old_logps: Tensor, mask: Tensor, advantages: Tensor, num_sequences: int) -> Tensor:
        ratio = (logps - old_logps).clamp(-20, 20).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask
        return (loss.sum(1) / mask.sum(1).clamp(min=1)).sum() / num_sequences

    assert [kind for kind, _ in found(product)] == ["nan"]
    assert_loss(product, "grpo", ignore=["nan"])
    with pytest.raises(AssertionError, match="product is not grpo: 1 difference\n\n  nan  NaN in `current` at padding"):
        assert_loss(product, "grpo")


LAST = "mask = mask & (mask.flip(1).cumsum(1).flip(1) > 1)\n    zero = torch"
FIRST = "mask = mask & (mask.cumsum(1) > 1)\n    zero = torch"
POSITIVE = "torch.where(mask, advantage, zero).clamp(min=0)"
ROUNDED = "log_ratio = (current.bfloat16() - proximal.bfloat16()).to(current.dtype)"
ROUNDED_WEIGHT = "log_rho = (proximal.half() - behavior.half()).double()"
OF_KEPT = "tokens = tokens * keep.sum() / mask.sum()\n    return torch.where("
OF_KEPT_IN_ROW = "length = (mask & (weight > 0)).sum(1, keepdim=True).clamp(min=1)"
NORMALIZED = "weight = weight / weight[mask].mean()\n    losses ="
EXP = ".clamp(-20, 20).exp()"
LATE = "zero)\n    behavior = mask * torch.nn.functional.pad(behavior[:, :-1], (1, 0))\n    advantage ="
KEPT_IN_ROW = "(losses / keep.sum(1, keepdim=True).clamp(min=1)).sum()"
RATIO, CLIPPED = "torch.minimum(ratio * advantage, ", "ratio.clamp(0.8, 1.2) * advantage)"
LENGTH = "length = mask.sum(1, keepdim=True).clamp(min=1)"
OF_WIDTH = "length = torch.full_like(mask[:, :1], mask.shape[1], dtype=torch.long)"
AVERAGED = "weight = (weight * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)\n    losses ="
OF_RATIOS = "torch.where(mask, log_rho.exp(), zero).sum(1, keepdim=True) / length"
GEOMETRIC = "(log_rho.sum(1, keepdim=True) / length).clamp(-20, 20).exp()"
MEAN, OF_TOKENS = (
    "geometric_log_ratio + (token_log_ratio - token_log_ratio.detach())",
    "token_log_ratio.sum(1, keepdim=True)",
)
RESPONSES = "max(len(mask), 1) if responses is None else responses"
PRODUCT = "-torch.minimum(weight * ratio * advantage, (weight * ratio).clamp(0.8, 1.2) * advantage)"
LIVE = "log_rho = proximal - behavior + current - current.detach()"


@pytest.mark.parametrize(
    ("name", "right", "wrong", "kind", "said"),
    [
        ("grpo", "torch.where(mask, advantage, zero)", POSITIVE, "dropped", "tokens with A < 0 get no gradient"),
        ("gspo", "zero = torch", LAST, "dropped", "the last trained token of a response gets no gradient"),
        ("icepop", "zero = torch", FIRST, "dropped", "the first trained token of a response gets no gradient"),
        ("grpo", "ratio = log_ratio" + EXP, "ratio = 1 + log_ratio", "log-ratio", "exp of the log-ratio missing"),
        ("cispo", "ratio = log_ratio" + EXP, "ratio = 1 + log_ratio", "log-ratio", "with log r, not with r"),
        ("token-tis", "rho = log_rho" + EXP, "rho = log_rho", "log-ratio", "no gradient where all policies are equal"),
        ("seq-mis", "log_rho.sum(1, ", "log_rho.sum(0, ", "batch-statistics", "over the wrong axis"),
        ("geo-mask", "log_rho.sum(1, keepdim=True)", "log_rho.sum()", "batch-statistics", "over the wrong axis"),
        ("token-tis", "losses =", NORMALIZED, "batch-statistics", "divided by their mean over the batch"),
        ("geo-mask", "return torch.where(", OF_KEPT, "denominator", "tokens that the mask rejects are not counted"),
        ("icepop", LENGTH, OF_KEPT_IN_ROW, "denominator", "1.333 times"),
        ("geo-mask", "tokens = mask.sum()", "tokens = keep.sum()", "default", "has 3 times the gradient with them"),
        ("token-tis", "tokens = mask.sum()", "tokens = 2 * mask.sum()", "default", "the count of the batch"),
        ("grpo", "log_ratio = current - proximal", ROUNDED, "rounding", "compute in float32"),
        ("token-tis", "log_rho = proximal - behavior", ROUNDED_WEIGHT, "rounding", "compute in float32"),
        ("token-tis", "-weight * ", "-weight * weight * ", "policy", "the weight is applied twice"),
        ("token-tis", "log_rho = proximal - behavior", LIVE, "live-weight", "2 times as large"),
        ("grpo", "(losses / length).sum()", "losses.mean(1).sum()", "denominator", "over all positions, padding"),
        ("token-tis", "rho.clamp(max=2)", "torch.where(rho <= 2, rho, 0.0)", "weight", "do not set it to 0"),
        ("geo-mask", "zero)\n    advantage =", LATE, "alignment", "one too early or too late"),
        ("cispo", ".clamp(max=5)", "", "clip", "the cap is missing"),
        ("gspo", "clamp(0.9997, 1.0004)", "clamp(min=0.9997)", "clip", "in gspo it is 0 beyond 1.0004: the bound is"),
        ("grpo", RATIO + CLIPPED, CLIPPED[:-1], "clip", "the minimum with the term that is not clipped is missing"),
        ("token-tis", "-weight * surrogate", PRODUCT, "weight", "the clip is on the weight times the ratio"),
        ("geo-mask", "(log_rho.sum(1, keepdim=True) / length)", "log_rho", "level", "rejected per token, not per"),
        ("geo-mask", GEOMETRIC, OF_RATIOS, "level", "bound exp of that mean, not a mean of ratios"),
        ("token-tis", "rho.clamp(max=2)", "rho.clamp(max=0.5)", "weight", "does beyond a ratio of 0.5"),
        ("token-tis", "losses =", "weight = weight[:, :1]\n    losses =", "level", "take the token's own"),
        ("token-tis", "losses =", AVERAGED, "level", "of the mean over the response, not of the ratio of the token"),
        ("grpo", "current - proximal", "proximal - current", "sign", "is the ratio upside down"),
        ("cispo", "current - proximal", "proximal - current", "inverse", "the ratio is upside down"),
        ("grpo", "mask, advantage, zero", "mask, advantage.roll(1, 0), zero", "batch-statistics", "its own advantage"),
        ("grpo", "-surrogate, 0.0)", "-surrogate, 0.0).clamp(-9, 9)", "normalized-advantage", "100 times as large"),
        ("gspo", LENGTH, OF_WIDTH, "denominator", "not the width of the batch"),
        ("seq-mis", "log_rho.sum(1, keepdim=True)", "log_rho", "level", "ratio of the token, not of the product over"),
        ("opsm", "(losses / length).sum()", KEPT_IN_ROW, "denominator", "where advantages differ within a response"),
        ("dppo", "tokens = mask.sum()", "tokens = keep.sum()", "default", "that the mask rejects are not counted"),
        ("gspo", MEAN, OF_TOKENS, "level", "the ratio is the product over the response, not the mean"),
        # Of five responses, two and three.
        ("grpo", RESPONSES, "len(mask)", "micro-batches", "1.67 to 2.5 times"),
        ("grpo", RESPONSES, "(advantage[:, 0] != 0).sum()", "denominator", "responses with A = 0 are not counted"),
        (
            "grpo",
            "mask, advantage, zero",
            "mask, advantage / advantage.std(), zero",
            "normalized-advantage",
            "give 1 times",
        ),
        ("dppo", "losses = torch.where(keep, -", "losses = torch.where(mask, -", "clip", "π/μ of a"),
    ],
)
def test_a_slip_in_printed_code_is_named_by_its_cause(name: str, right: str, wrong: str, kind: str, said: str) -> None:
    text = trimtab.objective(name).code()
    names: dict[str, Any] = {}
    assert right in text
    exec(text.replace(right, wrong), names)  # noqa: S102  what Trimtab prints
    differences = found(next(value for key, value in names.items() if key.endswith("_loss")), name)
    assert (differences[0][0], said in differences[0][1]) == (kind, True)
    assert not any(" nan " in text for _, text in differences)


def test_a_bound_beyond_the_usual_ratios_is_a_difference() -> None:
    names: dict[str, Any] = {}
    exec(trimtab.objective("grpo", clip_dual=30.0).code(), names)  # noqa: S102  what Trimtab prints
    [(kind, text)] = found(names["grpo_loss"], "grpo")
    assert (kind, "for A < 0" in text) == ("clip", True)


@pytest.mark.parametrize(
    ("name", "keywords"), [("token-tis", {"normalize": True}), ("geo-mask", {"denominator": "kept"}), ("m2po", {})]
)
def test_a_statistic_of_the_micro_batch_is_named(name: str, keywords: dict[str, Any]) -> None:
    """The printed code has it, where nobody passes that of the update."""
    names: dict[str, Any] = {}
    exec(trimtab.objective(name, **keywords).code(), names)  # noqa: S102  what Trimtab prints
    kind, text = found(next(value for key, value in names.items() if key.endswith("_loss")), name, **keywords)[0]
    assert (kind, "depends on the others of its micro-batch" in text) == ("batch-statistics", True)


def test_a_difference_that_no_probe_is_made_for_is_found_on_random_batches() -> None:
    def odd(logps: Tensor, old_logps: Tensor, mask: Tensor, advantages: Tensor, num_sequences: int) -> Tensor:
        # Reads whether a response has two neighbors beyond 0.3 nats, as no probe does.
        far = (mask & ((logps - old_logps).detach().abs() > 0.3)).sum(1, keepdim=True) == 2
        return grpo(logps, old_logps, mask, torch.where(far, 0.0, advantages), num_sequences)

    assert [kind for kind, _ in found(odd)] == ["unexplained"]


def test_bends_behind_bends_and_the_exponents_between() -> None:
    def curve(x: Tensor) -> Tensor:
        ratio = x.exp()
        return torch.where(x > 1.0, 0.0, torch.where(x > 0.5, 2.0, ratio.clamp(max=1.5)))

    points = torch.cat([torch.tensor([1e-4]), 0.03 * torch.arange(1, 100)]).double()
    bends = find_bends(curve, points)
    assert [bend.kind for bend in bends] == ["constant", "constant", "zero"]
    assert [bend.x for bend in bends] == pytest.approx([0.4054651, 0.5, 1.0], abs=1e-6)
    assert find_bends(torch.exp, -points) == ()


def test_a_bend_at_any_log_ratio_is_described() -> None:
    assert str(Bend("constant", math.log(1.2), 1.2)) == "is 1.2 beyond 1.2"
    assert [str(Bend("jump", x)) for x in (-800.0, 800.0)] == ["jumps at 0", "jumps at exp(800)"]
