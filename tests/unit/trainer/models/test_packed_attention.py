"""Packed rows through the fused kernel and small products, and products with the same bits whatever other rows."""

from __future__ import annotations

import pytest
import torch

from trimtab.trainer.models import packed_attention
from trimtab.trainer.models.invariant.invariant_attention import (
    KEY_BLOCK,
    accumulate,
    attention_scores,
    exponentials_,
    largest,
    query_rows,
)
from trimtab.trainer.models.load import default_device
from trimtab.trainer.models.packed_attention import PackedAttention, PackedLayout, packed_attention_forward

PROMPTS, LENGTHS, INDEX = [3, 5, 1], [9, 0, 7, 12, 4], [1, 1, 0, 2, 0]


@pytest.fixture(autouse=True)
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "MIN_WIDTH", 4)


def masks(lengths: list[int]) -> torch.Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def layout(prompts: list[int] = PROMPTS, lengths: list[int] = LENGTHS, index: list[int] = INDEX) -> PackedLayout:
    return PackedLayout.build(masks(prompts), masks(lengths), torch.tensor(index))


def inputs(tokens: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, heads, tokens, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for heads in (6, 2, 2)
    ]


def attend(packed: PackedLayout, qkv: list[torch.Tensor], **options: float) -> list[torch.Tensor]:
    """The output and the gradients of a fixed weighted sum of it."""
    out, _ = packed_attention_forward(torch.nn.Identity(), *qkv, None, layout=packed, **options)  # pyright: ignore
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), qkv)]


def test_output_and_gradients_equal_those_of_small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = layout()
    monkeypatch.setattr(packed_attention, "MIN_WIDTH", 1000)
    blocks = layout()
    assert [packed.fused is not None and packed.fused.on_cpu for packed in (fused, blocks)] == [True, False]
    exact = attend(blocks, inputs(sum(PROMPTS) + sum(LENGTHS), torch.float64))
    for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 0.02)):
        for one, other in zip(attend(fused, inputs(sum(PROMPTS) + sum(LENGTHS), dtype)), exact, strict=True):
            assert (one - other).norm() < error * other.norm()


def test_a_prompt_of_many_responses_gets_the_sum_of_their_gradients() -> None:
    # 1,024 equal responses: the gradient of the prompt's keys and values is 1,024 times that of one. A GPU that adds in
    # bfloat16 would stop at 256 to 512 times, where an addend is half of the sum's spacing; a CPU adds in float32.
    device = default_device()
    one, many = (layout([2], [6] * count, [0] * count).to(device) for count in (1, 1024))
    q, k, v = (x.detach().to(device).requires_grad_() for x in inputs(8, torch.bfloat16))
    tiled = [torch.cat([x[:, :, :2], *[x[:, :, 2:]] * 1024], 2).detach().requires_grad_() for x in (q, k, v)]

    def gradients(packed: PackedLayout, qkv: list[torch.Tensor]) -> list[torch.Tensor]:
        out, _ = packed_attention_forward(torch.nn.Identity(), *qkv, None, layout=packed)  # pyright: ignore
        return [grad[:, :, :2].float() for grad in torch.autograd.grad(out[:, 2:].sum(), qkv[1:])]

    for single, summed in zip(gradients(one, [q, k, v]), gradients(many, tiled), strict=True):
        torch.testing.assert_close(summed, 1024 * single, rtol=0.005, atol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {"softcap": 2.0}), (torch.float32, {"sliding_window": 4}), (torch.float64, {})],
)
def test_soft_caps_windows_and_float64_use_small_products(
    dtype: torch.dtype, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = layout()
    qkv = inputs(sum(PROMPTS) + sum(LENGTHS), dtype)
    calls = []
    apply = PackedAttention.apply
    monkeypatch.setattr(PackedAttention, "apply", lambda *given: calls.append(1) or apply(*given))
    attend(fused, qkv, **options)
    assert calls


def test_long_prompts_and_prompts_without_response_use_small_products() -> None:
    long = layout([13, 5, 1]).fused
    assert not long.on_cpu
    assert layout([49, 5, 1]).fused is None  # on an accelerator neither
    assert layout(index=[1, 1, 0, 1, 0]).fused is None
    assert layout([3], [0], [0]).fused is None


@pytest.mark.parametrize("width", [16, 64, 80, 128, 256])
def test_rows_of_queries_do_not_depend_on_how_many_there_are(width: int) -> None:
    """With 4 rows the scores of heads of 128 channels were others than with 64."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(3, 96, width),
        torch.randn(3, 2 * KEY_BLOCK, width),
        torch.randn(3, 2 * KEY_BLOCK, width),
    )
    whole = attention_scores(query, key, 0.5)
    sums, out = accumulate(whole.exp(), value)
    for count in range(query_rows(width), 96, query_rows(width)):
        some = attention_scores(query[:, :count], key, 0.5)
        assert torch.equal(some, whole[:, :count])
        part = accumulate(some.exp(), value)
        assert torch.equal(part[0], sums[:, :count])
        assert torch.equal(part[1], out[:, :count])
        # Keys that come later change nothing of those before.
        assert torch.equal(attention_scores(query[:, :count], key[:, :KEY_BLOCK], 0.5), whole[:, :count, :KEY_BLOCK])


def test_hidden_keys_get_exactly_0_however_large_their_scores_are() -> None:
    scores, shown = torch.tensor([[0.5, 1e4, -1.0]]), torch.tensor([[1.0, 0.0, 1.0]])
    peak = largest(scores, shown)
    assert peak.tolist() == [[0.5]]
    assert torch.equal(exponentials_(scores, peak, shown), torch.tensor([[0.0, -torch.inf, -1.5]]).exp())
