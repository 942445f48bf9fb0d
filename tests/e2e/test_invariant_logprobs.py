"""Invariant numerics: the sampler's log-probs are the trainer's, bit for bit, whatever else was in the batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.engines import SIZE, After, tiny, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.embedded import decoder, embedded_engine
from trimtab.trainer.engines.embedded import invariant_decoder as rollout_invariant
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models import invariant, logprobs, packed_attention
from trimtab.trainer.models.invariant import add_exponentials
from trimtab.trainer.models.invariant.invariant_attention import KEY_BLOCK
from trimtab.trainer.models.logprobs import TokenBatch, pack_kept, score
from trimtab.types import Completion, Problem, Prompt, SamplingParams

pytestmark = pytest.mark.e2e

TYPES = [(torch.bfloat16, True), (torch.float32, False)]
# Within a block of keys, at its end, and over several.
LENGTHS = (3, KEY_BLOCK, KEY_BLOCK + 1, 150)
FREE = SamplingParams(temperature=0.7, max_tokens=KEY_BLOCK + 6, ignore_stop=True)


def instance(name: str = "llama") -> Any:
    model = tiny(name)
    model.config.max_position_embeddings = 256
    invariant.make_invariant(model)
    return model.train()


def asked(lengths: Sequence[int] = LENGTHS) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(Problem(f"p{i}", "", ""), "", rng.integers(2, SIZE, size=n)) for i, n in enumerate(lengths)]


def trained(
    model: Any,
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Completion]],
    sampling: SamplingParams,
    autocast: bool,
) -> list[np.ndarray]:
    """One packed micro-batch of everything, with gradient."""
    flat = [one for group in groups for one in group]
    index = [p for p, group in enumerate(groups) for _ in group]
    batch = TokenBatch.pack([p.ids for p in prompts], [one.response_ids for one in flat], index, pad_id=0)
    kept = None
    if sampling.truncated:
        kept = pack_kept([one.sampling_mask or () for one in flat], batch.response_ids.shape[1])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logp = score(model, batch, temperature=sampling.temperature, kept=kept).logp
    logp.sum().backward()
    return [row[: len(one.response_ids)].detach().numpy() for row, one in zip(logp, flat, strict=True)]


def assert_equal(rows: Sequence[np.ndarray], groups: Sequence[Sequence[Completion]]) -> None:
    written = [one.logp_behavior for group in groups for one in group]
    for row, logp in zip(rows, written, strict=True):
        np.testing.assert_array_equal(row, logp)
    assert len(np.unique(np.concatenate(written))) > sum(map(len, written)) // 2  # numbers, not a constant


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["llama", "llama3-rope", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "autocast"), TYPES)
def test_log_probs_of_sampler_and_trainer_are_equal(name: str, dtype: torch.dtype, autocast: bool) -> None:
    model = instance(name)
    engine = EmbeddedEngine(model, tokenizer(), dtype)
    groups = engine.generate(asked(), 3, FREE, seed=0)
    assert_equal(trained(model, asked(), groups, FREE, autocast), groups)


def test_native_ones_are_not() -> None:
    model = tiny("llama").train()
    model.config.max_position_embeddings = 256
    model.set_attn_implementation(packed_attention.PACKED_IMPLEMENTATION)
    groups = EmbeddedEngine(model, tokenizer(), torch.bfloat16).generate(asked(), 3, FREE, seed=0)
    rows = trained(model, asked(), groups, FREE, True)
    assert max(np.abs(row - one.logp_behavior).max() for row, one in zip(rows, chain(*groups), strict=True)) > 1e-3


@pytest.mark.parametrize(
    "sampling", [SamplingParams(0.9, 0.8, 0, 30, ("w1",)), SamplingParams(1.0, 1.0, 5, 30, ("w1",))]
)
def test_with_stops_and_truncated_sampling_too(sampling: SamplingParams) -> None:
    """Rows leave the batch one by one, and sets of tokens renormalise both sides."""
    model = instance()
    groups = EmbeddedEngine(model, tokenizer(), torch.bfloat16).generate(asked(), 6, sampling, seed=1)
    assert len({len(one.response_ids) for group in groups for one in group}) > 3
    assert_equal(trained(model, asked(), groups, sampling, True), groups)


@pytest.mark.parametrize(("dtype", "autocast"), TYPES)
def test_batch_threads_prefixes_and_prefill_blocks_change_no_bit(
    dtype: torch.dtype, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = instance(), asked((3, KEY_BLOCK + 1))
    engine = EmbeddedEngine(model, tokenizer(), dtype)
    groups = engine.generate(prompts, 2, FREE, seed=0)
    with threads(2):
        # A few tokens: two threads on busy cores wait for each other at every product.
        short = engine.generate(prompts, 2, replace(FREE, max_tokens=8), seed=0)
    for one, other in zip(chain(*short), chain(*groups), strict=True):
        np.testing.assert_array_equal(one.logp_behavior, other.logp_behavior[:8])
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 40)
    part = engine.generate(prompts, 2, FREE, seed=0, abort=After(20))
    assert_same(engine.generate(prompts, 2, FREE, seed=0, prefixes=part), groups)
    # The trainer, each response alone; and with scores worked on in parts of a row.
    monkeypatch.setattr(packed_attention, "BLOCK_SCORES", 1 << 14)
    monkeypatch.setattr(packed_attention, "BLOCK_QUERIES", 30)
    for prompt, group in zip(prompts, groups, strict=True):
        for one in group:
            assert_equal(trained(model, [prompt], [[one]], FREE, autocast), [[one]])


def test_the_cache_stays_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slabs are whole blocks of keys, far more than the tokens of a short text."""
    slabs: list[int] = []
    empty = rollout_invariant._Cache.empty.__func__

    def measured(cls: Any, *arguments: Any) -> Any:
        instance = empty(cls, *arguments)
        slabs.append(sum(slab.nbytes for slab in (*instance.keys, *instance.values)))
        return instance

    monkeypatch.setattr(rollout_invariant._Cache, "empty", classmethod(measured))
    monkeypatch.setattr(embedded_engine, "CACHE_BYTES", 1 << 19)
    engine = EmbeddedEngine(instance(), tokenizer(), torch.bfloat16)
    engine.generate(asked([10] * 40), 1, replace(FREE, max_tokens=10), seed=0)
    batches = [a + b for a, b in zip(slabs[::2], slabs[1::2], strict=True)]
    assert len(batches) == 4
    assert max(batches) <= 1 << 19


def assert_same(result: Sequence[Sequence[Completion]], expected: Sequence[Sequence[Completion]]) -> None:
    for one, other in zip(chain(*result), chain(*expected), strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        np.testing.assert_array_equal(one.logp_behavior, other.logp_behavior)


@pytest.mark.parametrize(("dtype", "autocast"), TYPES)
def test_gradient_checkpointing_changes_no_bit(dtype: torch.dtype, autocast: bool) -> None:
    model = instance()
    groups = EmbeddedEngine(model, tokenizer(), dtype).generate(asked(), 2, FREE, seed=0)
    result = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        assert_equal(trained(model, asked(), groups, FREE, autocast), groups)
        result.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all(torch.equal(result[0][name], grad) for name, grad in result[1].items())


def test_fillers_of_a_packed_row_affect_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = instance(), [np.arange(2, 9)]
    batch = TokenBatch.pack(prompts, [np.arange(4, 16)], [0], pad_id=0)

    def result() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        logp = score(model, batch).logp
        logp.square().sum().backward()
        return logp.detach(), [p.grad.clone() for p in model.parameters()]

    torch.use_deterministic_algorithms(True)  # memory that was not written is NaN
    try:
        logp, grads = result()
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(logprobs, "padding_rows", lambda *_: 0)
    expected, exact = result()
    assert torch.equal(logp, expected)
    for grad, one in zip(grads, exact, strict=True):
        torch.testing.assert_close(grad, one, rtol=1e-4, atol=1e-6)


def test_it_is_the_models_own_function() -> None:
    """Float64, where only transformers' norms round: mistakes are far larger. Gradients too."""
    native = tiny("qwen3").double().train()
    native.set_attn_implementation(packed_attention.PACKED_IMPLEMENTATION)
    model = copy.deepcopy(native)
    invariant.make_invariant(model)
    rng = np.random.default_rng(1)
    prompts, responses = ([rng.integers(2, SIZE, size=n) for n in lengths] for lengths in ((5, 70), (4, 33, 9)))
    batch = TokenBatch.pack(prompts, responses, [0, 1, 1], pad_id=0)
    for model_ in (native, model):
        logp = score(model_, batch, temperature=0.7).logp
        logp.square().sum().backward()
        model_.found = logp.detach()
    torch.testing.assert_close(model.found, native.found, rtol=0, atol=1e-5)
    for (name, parameter), reference in zip(model.named_parameters(), native.parameters(), strict=True):
        assert (parameter.grad - reference.grad).norm() < 1e-5 * reference.grad.norm(), name


def test_functions_give_a_part_the_bits_of_the_whole() -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 4
    silu = invariant.InvariantSiLU()
    whole = silu(numbers)
    total = add_exponentials(numbers, numbers[:, None] * torch.linspace(-1, 1, 7))
    for start, stop in ((0, 1), (3, 20), (5, 118), (900, 1000)):
        part = numbers[start:stop]
        assert torch.equal(silu(part), whole[start:stop])
        assert torch.equal(add_exponentials(part, part[:, None] * torch.linspace(-1, 1, 7)), total[start:stop])
    torch.testing.assert_close(whole, F.silu(numbers))
    torch.testing.assert_close(
        total, torch.cat([numbers[:, None], numbers[:, None] * torch.linspace(-1, 1, 7)], 1).logsumexp(1)
    )


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("gpt2", {}, "covers llama"),
        ("mistral", {}, "covers llama"),
        ("qwen3-moe", {}, "covers llama"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "no sliding windows"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "rotary angles"),
    ],
)
def test_other_models_are_refused(name: str, changes: dict[str, Any], says: str) -> None:
    model = tiny(name)
    for key, value in changes.items():
        setattr(model.config, key, value)
    with pytest.raises(TrimtabError, match=says):
        invariant.make_invariant(model)


def test_rounded_float32_products_are_refused() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with pytest.raises(TrimtabError, match="allow_tf32 off"):
            invariant.make_invariant(tiny("llama"))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_unknown_modules_are_refused_before_anything_is_changed() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            hidden_act="gelu",
        )
    )
    with pytest.raises(TrimtabError, match=r"layers\.0\.mlp\.act_fn"):
        invariant.make_invariant(model)
    assert type(model.model.embed_tokens) is torch.nn.Embedding
