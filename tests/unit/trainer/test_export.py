"""A run's checkpoint as a folder other tools load: equal weights, equal answers, nothing overwritten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.support.engines import tiny
from tests.unit.trainer.checkpoint.test_store import small_files
from transformers import AutoModelForCausalLM, AutoTokenizer

from trimtab.cli import main
from trimtab.errors import TrimtabError, TrimtabWarning
from trimtab.runs.directory import RunDirectory
from trimtab.trainer.build_model import add_lora, save_model_files
from trimtab.trainer.checkpoint import state_tensors, store
from trimtab.trainer.config import load_config
from trimtab.trainer.export import export, export_adapter, restore
from trimtab.trainer.models import laboratory


@pytest.mark.parametrize(("limit", "reached"), [(500, "config"), (1000, "tokenizer")])
def test_a_full_disk_while_config_or_tokenizer_are_saved_is_one_line(tmp_path: Path, limit: int, reached: str) -> None:
    model, tokenizer = laboratory.build(0)
    model.config.save_pretrained(tmp_path / "sizes")
    assert ((tmp_path / "sizes" / "config.json").stat().st_size < limit) == (reached == "tokenizer")
    with small_files(limit), pytest.raises(TrimtabError, match=r"cannot write .*model: File too large; free space"):
        save_model_files(model, tokenizer, tmp_path / "model")
    assert [item.name for item in tmp_path.iterdir()] == ["sizes"]


IDS = torch.tensor([[1, 2, 3, 11, 5]])


BUILD = {
    "laboratory": lambda: laboratory.build(0)[0],
    "tied-llama": lambda: tiny("llama").train(),
    "gpt2": lambda: tiny("gpt2").train(),
}


def answers(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def make_run(path: Path, name: str = "laboratory", *, rank: int = 0, dtype: str = "float32") -> tuple[Path, Any]:
    """A run with checkpoints 1 and 2 of weights that moved; returns it and the model as of step 2."""
    config = load_config({"model": {"dtype": dtype, "lora": {"rank": rank}}, "task": {"name": "arithmetic"}})
    torch.manual_seed(3)
    model, tokenizer = BUILD[name](), laboratory.build(0)[1]
    for parameter in model.parameters():  # not model.to: it would round the rotary frequencies, which are no weights
        parameter.data = parameter.data.to(getattr(torch, config.model.dtype))
    with RunDirectory.create(path, config.dump()) as run:
        save_model_files(model, tokenizer, run.model_folder)
        trained = add_lora(model, **config.model.lora.model_dump()) if rank else model
        for step in (1, 2):
            with torch.no_grad():
                for parameter in trained.parameters():
                    if parameter.requires_grad:
                        parameter.add_(torch.randn_like(parameter), alpha=0.1)
            store.save(run.checkpoint_root, step, {"model": state_tensors.model_state(trained)}, {})
    return path, trained


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BUILD)
def test_transformers_loads_exactly_the_trained_weights(tmp_path: Path, name: str, dtype: str) -> None:
    run, trained = make_run(tmp_path / "run", name, dtype=dtype)
    folder = export(run, tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == getattr(torch, dtype)
    for key, tensor in trained.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key
    assert torch.equal(answers(model), answers(trained))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("31=")["input_ids"] == [3, 1, 10]
    assert (folder / "generation_config.json").is_file()


def test_adapters_are_merged(tmp_path: Path) -> None:
    run, trained = make_run(tmp_path / "run", "tied-llama", rank=2)
    model = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "out"))
    assert not [key for key in model.state_dict() if "lora" in key or "base_layer" in key]
    untouched = restore(run)[0]
    torch.testing.assert_close(answers(model), answers(trained), rtol=0, atol=2e-5)  # logits up to 7
    assert torch.equal(answers(untouched), answers(model))
    with torch.no_grad():
        for key, parameter in trained.named_parameters():
            if "lora_B" in key:
                parameter.zero_()
    assert (answers(model) - answers(trained)).abs().max() > 0.01, "the adapters did nothing: this test showed nothing"


@pytest.mark.parametrize("name", ["laboratory", "tied-llama"])
def test_peft_loads_the_adapter_alone(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run, trained = make_run(tmp_path / "run", name, rank=2)
    assert main.run(["export", str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert capsys.readouterr().out == f"adapter: {tmp_path / 'adapter'}\n"
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    base = BUILD[name]()  # the weights that the run began with and froze
    assert (answers(base) - answers(trained)).abs().max() > 0.01
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert torch.equal(answers(loaded), answers(trained))
    merged = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "out"))
    torch.testing.assert_close(answers(loaded), answers(merged), rtol=0, atol=2e-5)


def test_best_and_last_differ(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path / "run")
    with pytest.raises(TrimtabError, match=r"has no best checkpoint: set eval.best"):
        export(run, tmp_path / "best", "best")
    store.mark_best(run / "checkpoints", 1, "eval/arithmetic/greedy", 0.5)
    before = torch.get_rng_state()
    assert restore(run, "best")[2] == 1
    assert torch.equal(torch.get_rng_state(), before)
    assert restore(run, "last")[2] == 2
    assert restore(run, "step-000001")[2] == 1
    with pytest.raises(TrimtabError, match=r"unknown checkpoint 'bset' \(did you mean 'best' or 'last'\?\)"):
        export(run, tmp_path / "best", "bset")


def test_a_damaged_checkpoint_is_named_and_never_mistaken_for_the_best(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path / "run")
    store.mark_best(run / "checkpoints", 2, "m", 0.5)
    (run / "checkpoints" / "step-000002" / "model.safetensors").write_bytes(b"")
    with pytest.warns(TrimtabWarning, match="step-000002 is damaged.*using step-000001"):
        assert restore(run, "last")[2] == 1
    with pytest.raises(TrimtabError, match="step-000002 is damaged"):
        restore(run, "best")


def test_what_a_run_does_not_have_is_named_and_nothing_is_overwritten(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path / "run")
    with pytest.raises(TrimtabError, match=r"trained every weight \(model.lora.rank = 0\)"):
        export_adapter(run, tmp_path / "out")
    with pytest.raises(TrimtabError, match="has no checkpoint 'step-000009': choose one of step-000001, step-000002"):
        export(run, tmp_path / "out", "step-000009")
    (tmp_path / "out").mkdir()  # which did not exist yet
    with pytest.raises(TrimtabError, match=r"out already exists: choose another folder"):
        export(run, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_no_finished_run_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match=r"absent holds no run \(config.toml is missing\)"):
        export(tmp_path / "absent", tmp_path / "out")
    RunDirectory.create(tmp_path / "run", load_config({}).dump()).close()
    with pytest.raises(TrimtabError, match=r"has no model/config.json"):
        export(tmp_path / "run", tmp_path / "out")
    save_model_files(*laboratory.build(0), tmp_path / "run" / "model")
    with pytest.raises(TrimtabError, match=r"has no checkpoint yet"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path / "run", "tied-llama")
    save_model_files(*laboratory.build(0), run / "model")
    with pytest.raises(TrimtabError, match=r"the checkpoint's weights do not fit the model: 1 missing .*lm_head"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
