"""What a plan starts from: parameter counts against published ones and those of transformers; assumptions; devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.errors import TrimtabError
from trimtab.trainer.models import laboratory
from trimtab.trainer.planning.inputs import DEVICES, SHAPES, Assumptions, find_device, find_shape, parse_assumptions

# Parameters of the published safetensors files (the number on each model's page on huggingface.co).
PUBLISHED = {
    "smollm2-135m-instruct": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 751_632_384 - 1024 * 151_936,  # the file holds the head, which is tied, once more
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_has_the_published_number_of_parameters(name: str) -> None:
    assert SHAPES[name].parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 48}),
        ("qwen3_moe", MIXTURE),
    ],
)
def test_a_config_counts_what_its_model_has(kind: str, more: dict[str, object], tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **SMALL, **more)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = find_shape(str(tmp_path))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    if kind == "qwen3_moe":
        assert shape.parameters - shape.products - 2 * shape.embedding - shape.hidden == 3 * 2 * 3 * 64 * 24


def test_the_laboratory_is_in_the_table() -> None:
    model, _ = laboratory.build(seed=0)
    assert SHAPES["laboratory"].parameters == sum(p.numel() for p in model.parameters())


def test_an_id_means_its_last_part() -> None:
    assert find_shape("Qwen/Qwen2.5-7B-Instruct") is SHAPES["qwen2.5-7b"]
    assert find_shape("meta-llama/Llama-3.1-8B") is SHAPES["llama-3.1-8b"]


def test_what_is_not_known_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match=r"unknown model 'qwen2.5-8b'.*did you mean.*config.json"):
        find_shape("qwen2.5-8b")
    with pytest.raises(TrimtabError, match=r"cannot read .*config\.json"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TrimtabError, match="not JSON"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 3}))
    with pytest.raises(TrimtabError, match="has no 'num_attention_heads'"):
        find_shape(str(tmp_path))


def test_every_assumption_says_why() -> None:
    reasons = [field.description or "" for field in Assumptions.model_fields.values()]
    assert all(len(why) > 10 and "\n" not in why for why in reasons)


def test_changes_replace_defaults() -> None:
    assert parse_assumptions(["train_flops=0.5", "score=12"]) == Assumptions(train_flops=0.5, score=12)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("train_flop=1", "unknown assumption 'train_flop'.*train_flops"),
        ("score", "--assume score=: .*valid number"),
        ("score=fast", "score=fast: .*valid number"),
        ("score=-1", "greater than or equal to 0"),
        ("train_flops=1.5", "less than or equal to 1"),
        ("handover=0", "greater than 0"),
        ("handover=nan", "finite number"),
        ("decode_overhead=inf", "finite number"),
    ],
)
def test_mistakes_are_one_line(change: str, named: str) -> None:
    with pytest.raises(TrimtabError, match=named):
        parse_assumptions([change])


def test_devices_carry_their_source() -> None:
    assert all(entry.source and entry.memory > 1e10 for entry in DEVICES.values())
    assert find_device("H100").flops == 989e12
    with pytest.raises(TrimtabError, match=r"unknown device 'h1000'.*did you mean 'h100'"):
        find_device("h1000")
