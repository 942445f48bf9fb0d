"""Memory of a training rank: hand numbers, what autograd keeps, the micro-batches that fit, and a full device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.run_results import untimed, weights
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trimtab.errors import TrimtabError
from trimtab.trainer import learner, memory, run
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.memory import DecoderSizes, UpdateLoad, layer_activations, rank_memory
from trimtab.trainer.models import packed_attention
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.trainer.run import out_of_memory_as_user_error

TINY = DecoderSizes(
    layers=2, hidden=4, heads=2, queries=4, keys=2, inner=8, vocabulary=10, layer=152, parameters=348, tied=True
)
ROWS, PROMPT, RESPONSE = 24, 16, 41
SMALL = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "tie_word_embeddings": False,
}
SEVEN = AutoConfig.for_model(
    "qwen2",
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    tie_word_embeddings=False,
)
ONE = UpdateLoad(ranks=1, tokens=100, scored=80, rows=4, prompt=20, response=20)


def test_a_configuration_gives_the_sizes_of_its_model() -> None:
    seven = DecoderSizes.of(SEVEN)
    assert seven == DecoderSizes(28, 3584, 28, 3584, 512, 18944, 152064, seven.layer, 7_615_616_512, tied=False)
    # Queries, keys, values with biases, the output, three matrices of the network, two norms.
    assert seven.layer == 3584 * (2 * 3584 + 2 * 512 + 3 * 18944 + 2) + 3584 + 2 * 512
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    sizes = DecoderSizes.of(AutoConfig.for_model("qwen3_moe", **SMALL, **mixture))
    assert (sizes.inner, sizes.qk_norm) == (2 * 24, True)
    assert sizes.layer == 96 * (4 * 6 * 16 - 2 * 4 * 16) + 2 * 16 + 4 * 3 * 96 * 24 + 4 * 96 + 2 * 96


def test_sixteen_bytes_for_a_parameter() -> None:
    result = rank_memory(TINY, ONE)
    assert result["weights"] + result["gradients"] + result["optimizer"] == 16 * TINY.parameters


def test_a_layer_by_hand() -> None:
    # float32: two residuals and two norms of 4; bfloat16: five rounded inputs of 4, queries and output of 4, keys and
    # values of 2, and four times the network's 8.
    assert layer_activations(TINY, ONE) == 4 * 4 * 4 + 2 * (5 * 4 + 2 * 4 + 2 * 2 + 4 * 8)
    # In float32 a CPU pads the input of every product anew.
    assert layer_activations(TINY, replace(ONE, compute=4)) == 4 * 4 * 4 + 4 * (5 * 4 + 2 * 4 + 2 * 2 + 4 * 8)


def test_checkpointing_keeps_one_input_for_each_layer() -> None:
    with_, without = (rank_memory(TINY, replace(ONE, recompute=on)) for on in (True, False))
    assert with_["kept"] == (2 + 3) * 4 * 4 * 100 + 2 * 800
    assert with_["layer"] - without["layer"] == layer_activations(TINY, ONE) * 100
    assert with_["kept"] < without["kept"]


def test_ranks_share_weights_but_not_activations() -> None:
    sizes = DecoderSizes.of(SEVEN)
    two, four = (rank_memory(sizes, replace(ONE, ranks=ranks)) for ranks in (2, 4))
    for term in ("weights", "gradients", "optimizer"):
        assert two[term] == 2 * four[term]
    for term in ("copies", "kept", "layer", "attention", "head"):
        assert two[term] == four[term]


def test_copies_by_hand() -> None:
    # One rank under autocast: all layers in bfloat16. Several: two layers of 152 parameters and a gradient in bfloat16,
    # one reduced in float32, and the embedding in float32 (its gradient is the head's term).
    assert rank_memory(TINY, ONE)["copies"] == 2 * 152 * 2
    assert rank_memory(TINY, replace(ONE, compute=4))["copies"] == 0
    assert rank_memory(TINY, replace(ONE, ranks=2))["copies"] == 152 * (3 * 2 + 4) + 40 * 4
    untied = replace(TINY, tied=False)
    assert rank_memory(untied, replace(ONE, ranks=2))["copies"] == 152 * (3 * 2 + 4) + 3 * 40 * 4


def test_terms_of_the_peak_by_hand() -> None:
    """On a CPU, of 100 tokens of which 80 are scored, in 4 rows of 20 + 20 positions, with 2 heads."""
    result = rank_memory(TINY, replace(ONE, cpu=True))
    # Hidden states and their gradient, 4 each, in float32 and bfloat16; three tiles; the gradient of 10 x 4 logits.
    assert result["head"] == 80 * 4 * (2 * 4 + 2 * 2) + 3 * 2**20 * 4 + 10 * 4 * 4
    # The widest gradients of a layer: three of its network's 8 in bfloat16, three of 4 in float32.
    assert result["layer"] == (3 * 8 * 2 + 3 * 4 * 4) * 100
    # All 4 x 2 x 20 x 40 scores are one block: four in float32 and one in bfloat16 each, and a mask of all positions.
    assert result["attention"] == 4 * 2 * 20 * 40 * (4 * 4 + 2) + 4 * 20 * 40 * 4
    # Two layers of activations and bfloat16 scores, the last residual, its norm and output, and the logits.
    scores = 4 * 2 * 20 * 40 * 2
    assert result["kept"] == 2 * (layer_activations(TINY, ONE) * 100 + scores) + 3 * 4 * 4 * 100 + 80 * 10 * 2
    offloaded = rank_memory(TINY, replace(ONE, offload=True))
    assert offloaded["weights"] == offloaded["gradients"] == offloaded["optimizer"] == 0


def test_an_accelerator_keeps_rows_and_no_scores() -> None:
    ours, cpu = rank_memory(TINY, ONE), rank_memory(TINY, replace(ONE, cpu=True))
    # One tile of the head is 2**20 numbers on a CPU, three are held.
    assert ours["head"] - cpu["head"] == 3 * 4 * 15 * 2**20
    # Queries, keys, values and output of 160 tokens in rows, and a sum of 2 heads; of 100 packed ones the output alone.
    rows, scores = 160 * (2 * (4 + 2 + 2 + 4) + 2 * 4) - 100 * 2 * (4 + 2 + 2), 4 * 2 * 20 * 40 * 2
    assert ours["kept"] - cpu["kept"] == 2 * (rows - scores)
    assert ours["attention"] == 160 * (2 * 2 * 4 + (2 + 4) * 8) + 2 * 4 * 100 * 8


def test_attention_of_long_rows_grows_with_their_length_on_a_cpu() -> None:
    sizes, one = DecoderSizes.of(SEVEN), replace(ONE, rows=1, cpu=True)
    once, twice = (rank_memory(sizes, replace(one, response=n))["attention"] for n in (16384, 32768))
    # 28 heads x 128 queries x 16404 keys, 18 bytes a score, and 14 for each pair of positions.
    assert once == pytest.approx(28 * 128 * 16404 * 18 + 128 * 16404 * 14 + 2 * 16404 * 512 * 4)
    assert twice < 2 * once


def model(kind: str) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **SMALL)
    config._attn_implementation = packed_attention.PACKED_IMPLEMENTATION
    return AutoModelForCausalLM.from_config(config).train()


def kept(model: PreTrainedModel) -> int:
    """Bytes of every storage saved in a forward, parameters not counted."""
    numbers = np.random.default_rng(0)
    batch = TokenBatch.pack(
        [numbers.integers(SMALL["vocab_size"], size=PROMPT)],
        list(numbers.integers(SMALL["vocab_size"], size=(ROWS, RESPONSE))),
        [0] * ROWS,
        pad_id=0,
    )
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    result: dict[int, Any] = {}  # the storages themselves: a freed address would be used again

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            result[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16):
        score(model, batch)
    return sum(storage.nbytes() for storage in result.values())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("cpu", [True, False])
def test_the_formula_counts_what_autograd_saves(kind: str, cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpu:  # the path of an accelerator
        monkeypatch.setattr(packed_attention, "MIN_WIDTH", 1)
    # A response's last token predicts nothing and is not run.
    load = UpdateLoad(1, PROMPT + ROWS * (RESPONSE - 1), ROWS * RESPONSE, ROWS, PROMPT, RESPONSE, cpu=cpu)
    built = model(kind)
    computed = rank_memory(DecoderSizes.of(built.config), load)
    assert computed["kept"] + computed["copies"] == pytest.approx(kept(built), rel=0.03)


PIB = 1 << 50


@pytest.mark.parametrize(
    "fill",
    [lambda: torch.empty(PIB, dtype=torch.uint8), lambda: np.ones(PIB, dtype=np.uint8), lambda: bytearray(PIB)],
    ids=["torch", "numpy", "python"],
)
def test_a_full_memory_is_one_line(fill: Callable[[], object]) -> None:
    line = r"the memory is full \(.+\): lower trainer.micro_batch_tokens"
    with pytest.raises(TrimtabError, match=line) as raised, out_of_memory_as_user_error():
        fill()
    assert "\n" not in str(raised.value)


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), out_of_memory_as_user_error():
        torch.ones(2, 3) @ torch.ones(2, 3)


def qwen(trained: bool = True) -> Any:
    """Qwen2.5-1.5B's shape, without weights."""
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
    shape = AutoConfig.for_model("qwen2", num_hidden_layers=28, vocab_size=151936, tie_word_embeddings=True, **sizes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape).requires_grad_(trained)


def chosen(gib: float, monkeypatch: pytest.MonkeyPatch, *, model: Any = None, device: str = "cuda", **sets: Any) -> int:
    monkeypatch.setattr(memory, "free_memory", lambda _: gib * 2**30)
    config = load_config("quickstart", [f"{key.replace('__', '.')}={value}" for key, value in sets.items()])
    lengths = {"prompt": 64, "response": 512}
    return memory.choose_micro_batch_tokens(config, model or qwen(), torch.device(device), **lengths)


def test_micro_batches_grow_with_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen()
    sizes = [chosen(gib, monkeypatch, model=model) for gib in (24, 40, 72, 200)]
    assert sizes == [512, 2048, 8192, 32768]  # 18.5 GB of optimizer state come first; docs/results/gpu.md
    assert chosen(40, monkeypatch, model=model, model__gradient_checkpointing="true") > sizes[1]
    assert chosen(24, monkeypatch, model=qwen(trained=False)) > sizes[0]


def test_several_ranks_have_a_micro_batch_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda _: 200 * 2**30)
    lengths = {"prompt": 64, "response": 512, "ranks": 4}
    config, cuda = load_config("quickstart"), torch.device("cuda")
    budgets = [
        memory.choose_micro_batch_tokens(config, qwen(), cuda, update=tokens, **lengths) for tokens in (40_000, 1_000)
    ]
    assert budgets == [8192, 512]


def test_a_cpu_has_the_size_of_laptops_and_a_number_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(1, monkeypatch, device="cpu") == 2048
    assert chosen(1, monkeypatch, trainer__micro_batch_tokens=4096) == 4096


def recipe(tokens: str, *sets: str) -> Config:
    sizes = ["trainer.steps=3", "trainer.prompts=4", "trainer.samples=4", "eval.problems=8"]
    return load_config("laboratory", [*sizes, f"trainer.micro_batch_tokens={tokens}", *sets])


def fill_above(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training forwards of more padded tokens fail as on a device that is full."""
    score = learner.score

    def limited(model: Any, batch: TokenBatch, **options: Any) -> Any:
        if torch.is_grad_enabled() and batch.prompt_ids.numel() + batch.response_ids.numel() > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        return score(model, batch, **options)

    monkeypatch.setattr(learner, "score", limited)


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("objective.name=token-alp", "trainer.max_lag=0"),
        pytest.param(
            ("objective.name=geo-mask", "objective.calibrate=true", "trainer.prompts=16"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_full_memory_halves_micro_batches_and_repeats_the_update(
    sets: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = run.train(recipe("64", *sets), out=tmp_path / "direct").run
    fill_above(64, monkeypatch)
    halved = run.train(recipe("256", *sets), out=tmp_path / "halved").run
    assert untimed(halved) == untimed(direct)
    assert all(torch.equal(weights(halved)[name], value) for name, value in weights(direct).items())


def test_an_update_that_cannot_be_repeated_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_above(0, monkeypatch)
    with pytest.raises(TrimtabError, match="the memory is full"):
        run.train(recipe("64"), out=tmp_path / "run")
