"""Scores against the plain forward, for every supported architecture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.errors import TrimtabError
from trimtab.trainer.models import fused_head
from trimtab.trainer.models import packed_attention as attention_room
from trimtab.trainer.models.architecture import FAMILIES
from trimtab.trainer.models.logprobs import TokenBatch, pack_kept, score
from trimtab.trainer.models.packed_attention import PACKED_IMPLEMENTATION

VOCABULARY = 61
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.4,  # far from uniform, so that a wrong position or mask shows
}
EXTRA: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "scale_attn_by_inverse_layer_idx": True},
    "qwen2": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 5},
    "gemma2": {
        "sliding_window": 4,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
    },
    # A window in the first layer with rotary angles of its own, norms of queries and keys.
    "gemma3_text": {"sliding_window": 4, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 3.0},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    "smollm3": {"no_rope_layers": [1, 0]},
}
PROMPTS = [[5, 9, 11, 7, 8, 20], [30, 4], [17]]
RESPONSES = [[3, 8, 9, 10], [40, 41, 42, 43, 44, 45, 46], [6], [50, 51], [12, 13, 14]]
PROMPT_INDEX = [0, 0, 1, 1, 2]


@pytest.fixture(autouse=True)
def many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several uneven tiles and blocks even at this size."""
    monkeypatch.setattr(fused_head, "TILE_TOKENS", 7)
    monkeypatch.setattr(fused_head, "TILE_VOCABULARY", 16)
    monkeypatch.setattr(attention_room, "BLOCK_SCORES", 300)
    monkeypatch.setattr(attention_room, "MAX_SAVED_SCORES", 500)  # prompts' are kept, responses' are not


def build(kind: str, attention: str = PACKED_IMPLEMENTATION, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **EXTRA.get(kind, {}), **changes})
    if kind == "gpt2":
        config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()


def batch(pad_id: int = 0) -> TokenBatch:
    prompts, responses = ([np.array(row) for row in rows] for rows in (PROMPTS, RESPONSES))
    return TokenBatch.pack(prompts, responses, PROMPT_INDEX, pad_id=pad_id)


def reference(model: Any, temperature: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Each row alone through the whole model, all logits: nothing shared, nothing padded."""
    logps, entropies = [], []
    for response, index in zip(RESPONSES, PROMPT_INDEX, strict=True):
        prompt = PROMPTS[index]
        logits = model(torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        logp = (logits / temperature).log_softmax(-1)
        logps.append(logp.gather(1, torch.tensor(response)[:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    return logps, entropies


def mixed_loss(logps: list[Tensor], entropies: list[Tensor]) -> Tensor:
    """Gives every token a different gradient through log-prob and entropy."""
    flat, spread = torch.cat(logps), torch.cat(entropies)
    weight = torch.linspace(-1, 2, len(flat), dtype=flat.dtype)
    return (weight * flat).sum() + (weight.flip(0) * spread).sum()


def rows(values: Tensor) -> list[Tensor]:
    return [row[: len(response)] for row, response in zip(values, RESPONSES, strict=True)]


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_close_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert (ours[name] - expected).abs().max() <= bound * expected.abs().max() + 1e-9, name


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_scores_and_gradients_equal_the_plain_forward(kind: str) -> None:
    check_against_plain(kind)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # gemma2: a window and a soft cap
@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_long_rows_are_worked_on_in_parts(kind: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_room, "BLOCK_SCORES", 20)
    monkeypatch.setattr(attention_room, "BLOCK_QUERIES", 2)
    monkeypatch.setattr(attention_room, "MAX_SAVED_SCORES", kept)
    blocks = attention_room.working_blocks(2, heads=4, queries=7, keys=13, device=torch.device("cpu"))
    spans = [(b.rows.start, b.queries.start, b.queries.stop, b.keys) for b in blocks]
    assert spans[:4] == [(0, 0, 2, 8), (0, 2, 4, 10), (0, 4, 6, 12), (0, 6, 7, 13)]
    assert len(spans) == 8
    assert len(attention_room.working_blocks(2, heads=4, queries=7, keys=13, device=torch.device("cuda"))) == 4
    check_against_plain(kind)


def check_against_plain(kind: str) -> None:
    plain = build(kind, "eager")  # transformers' sdpa leaves out Gemma 2's soft cap
    ours = build(kind)
    ours.load_state_dict(plain.state_dict())
    logps, entropies = reference(plain, temperature=0.8)
    scores = score(ours, batch(), temperature=0.8, entropy=True)
    # float32 all through, in another order: a log-prob of 8 to 16 nats has steps of 1e-6. Measured over architectures
    # and two roundings: 4.8e-6 for log-probs, 2.1e-6 for entropies, 5.5e-6 for gradients.
    assert torch.cat([a - b for a, b in zip(rows(scores.logp), logps, strict=True)]).abs().max() < 3e-5
    assert torch.cat([a - b for a, b in zip(rows(scores.entropy), entropies, strict=True)]).abs().max() < 3e-5
    assert_close_gradients(
        gradients(ours, mixed_loss(rows(scores.logp), rows(scores.entropy))),
        gradients(plain, mixed_loss(logps, entropies)),
        5e-5,
    )


def test_padding_is_exactly_zero_and_its_ids_do_not_matter() -> None:
    model = build("llama")
    first, second = (score(model, batch(pad_id), entropy=True) for pad_id in (0, 55))
    outside = ~batch().response_mask
    assert torch.equal(first.logp, second.logp)
    assert torch.equal(first.entropy, second.entropy)
    assert (first.logp[outside] == 0).all()
    assert (first.entropy[outside] == 0).all()
    # A gradient that arrives at padding goes nowhere.
    grads = gradients(model, (first.logp * outside).sum() + (first.entropy * outside).sum())
    assert all((grad == 0).all() for grad in grads.values())


def test_scoring_without_gradient_is_the_same_to_the_bit() -> None:
    model = build("qwen3")
    with_grad = score(model, batch(), entropy=True)
    with torch.no_grad():
        without = score(model, batch(), entropy=True)
    assert torch.equal(with_grad.logp, without.logp)
    assert torch.equal(with_grad.entropy, without.entropy)  # type: ignore[arg-type]


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model = build("llama").train()
    stored = gradients(model, score(model, batch()).logp.sum())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_close_gradients(gradients(model, score(model, batch()).logp.sum()), stored, 1e-6)


def test_kept_sets_renormalise_over_the_set() -> None:
    model = build("llama", dtype=torch.float64)
    kept = [[[token, (token * 7 + 1) % VOCABULARY, 60] for token in response] for response in RESPONSES]
    scores = score(
        model, batch(), temperature=0.7, entropy=True,
        kept=pack_kept([[np.array(ids) for ids in row] for row in kept], 7),
    )  # fmt: skip
    logps, entropies = [], []
    for response, sets, index in zip(RESPONSES, kept, PROMPT_INDEX, strict=True):
        prompt = PROMPTS[index]
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.7
        for t, ids in enumerate(sets):
            logp = logits[t, sorted(set(ids))].log_softmax(-1)
            logps.append(logp[sorted(set(ids)).index(response[t])][None])
            entropies.append(-(logp.exp() * logp).sum()[None])
    assert torch.allclose(torch.cat(rows(scores.logp)), torch.cat(logps), atol=1e-6)
    assert torch.allclose(torch.cat(rows(scores.entropy)), torch.cat(entropies), atol=1e-6)
    ours = gradients(model, mixed_loss(rows(scores.logp), rows(scores.entropy)))
    assert_close_gradients(ours, gradients(model, mixed_loss(logps, entropies)), 1e-5)


def test_a_token_outside_its_keep_set_is_nan() -> None:
    kept = pack_kept([[np.array([token]) for token in response] for response in RESPONSES], 7)
    kept[1, 2, 0] = 3
    assert score(build("llama"), batch(), kept=kept).logp.isnan().nonzero().tolist() == [[1, 2]]


def test_autocast_rounds_products_but_not_the_softmax() -> None:
    model = build("llama", hidden_size=64)
    exact = torch.cat(rows(score(model, batch()).logp))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = score(model, batch()).logp
    assert rounded.dtype == torch.float32
    error = (torch.cat(rows(rounded)) - exact).abs()
    assert 0 < error.max() < 0.5
    grads = gradients(model, rounded.sum())
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads.values())


def test_empty_response_scores_zero_and_costs_its_row_nothing() -> None:
    model = build("llama")
    with_empty = TokenBatch.pack([np.array([5, 9])], [np.array([], np.int64), np.array([3, 8])], [0, 0], pad_id=0)
    scores = score(model, with_empty)
    alone = score(model, TokenBatch.pack([np.array([5, 9])], [np.array([3, 8])], [0], pad_id=0))
    assert (scores.logp[0] == 0).all()
    assert torch.allclose(scores.logp[1], alone.logp[0], atol=1e-6)


def test_all_empty_gives_zero_with_zero_gradient() -> None:
    model = build("llama")
    nothing = TokenBatch.pack([np.array([5, 9])], [np.array([], np.int64)] * 2, [0, 0], pad_id=0)
    scores = score(model, nothing, entropy=True)
    assert (scores.logp == 0).all()
    grads = gradients(model, scores.logp.sum())
    assert grads.keys() == dict(model.named_parameters()).keys()
    assert all((grad == 0).all() for grad in grads.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model.config, "model_type", "granite"), "cannot score architecture 'granite'"),
        (lambda model: model.set_attn_implementation("sdpa"), "attention 'sdpa' cannot read packed rows"),
        (lambda model: setattr(model, "lm_head", torch.nn.Sequential(model.lm_head)), "not a plain linear layer"),
        (lambda model: setattr(model, "lm_head", torch.nn.Linear(16, 60)), "not a plain linear layer without bias"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(change: Any, message: str) -> None:
    model = build("llama")
    change(model)
    with pytest.raises(TrimtabError, match=message):
        score(model, batch())


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TrimtabError, match="prompt 1 has no tokens"):
        TokenBatch.pack([np.array([1]), np.array([], np.int64)], [np.array([2])], [0], pad_id=0)
    with pytest.raises(TrimtabError, match=r"temperature 0\.0 must be positive"):
        score(build("llama"), batch(), temperature=0.0)


def test_attention_dropout_is_refused() -> None:
    model = build("llama", attention_dropout=0.1).train()
    with pytest.raises(TrimtabError, match="attention dropout is on"):
        score(model, batch())
