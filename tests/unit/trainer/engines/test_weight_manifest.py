"""What may be handed to an engine elsewhere: everything, once, by its name, finite, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.engines import CONFIGS, prompt, tiny

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.request import validate_request
from trimtab.trainer.engines.weights import WeightManifest
from trimtab.types import SamplingParams

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3-moe", "gpt2"])
def test_a_config_alone_says_what_weights_there_are(name: str, tmp_path: Path) -> None:
    CONFIGS[name]().save_pretrained(tmp_path)
    assert WeightManifest.read(tmp_path) == WeightManifest.of(tiny(name))


def test_a_tied_head_comes_out_once_whichever_name_it_had() -> None:
    model = tiny()
    inventory = WeightManifest.of(model)
    assert inventory.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    both = inventory.check(model.state_dict().items())
    head = [(name, tensor) for name, tensor in model.state_dict().items() if name != "model.embed_tokens.weight"]
    for chosen in (both, inventory.check(model.named_parameters()), inventory.check(head)):
        assert set(chosen) == {name for name, _ in model.named_parameters()}
        assert chosen["model.embed_tokens.weight"].data_ptr() == model.lm_head.weight.data_ptr()


def test_a_copy_of_a_tied_weight_may_be_equal_but_not_differ() -> None:
    state = dict(tiny().state_dict())
    state["lm_head.weight"] = state["lm_head.weight"].clone()
    inventory = WeightManifest.of(tiny())
    inventory.check(state.items())
    state["lm_head.weight"][0, 0] += 1
    with pytest.raises(TrimtabError, match="differs from its twin"):
        inventory.check(state.items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_the_model_is_refused(value: float) -> None:
    inventory, good = WeightManifest.of(tiny()), dict(tiny().named_parameters())
    bad = good[UP].detach().clone()
    bad[1, 2] = value
    for weights, message in [
        ([*good.items(), (UP, good[UP])], f"{UP}' was published twice"),
        ([(name, tensor) for name, tensor in good.items() if name != UP], f"{UP}' is missing .1 in all"),
        ([*good.items(), ("model.layers.0.mlp.up.weight", bad)], "not in the engine's model .did you mean"),
        ((good | {UP: bad.t()}).items(), r"has shape \(48, 64\), the engine's is \(64, 48\)"),
        ((good | {UP: bad}).items(), f"{UP}' has non-finite values"),
    ]:
        with pytest.raises(TrimtabError, match=message):
            inventory.check(weights)


def test_large_finite_weights_pass_although_their_sum_overflows() -> None:
    good = dict(tiny().named_parameters())
    good[UP] = torch.full_like(good[UP], 3e38)
    WeightManifest.of(tiny()).check(good.items())


def test_requests_that_cannot_be_sampled_are_refused() -> None:
    validate_request([prompt([1, 2])], 1, SamplingParams(max_tokens=8), 0, vocabulary=3, context=10)
    for asked, samples, sampling, seed, message in [
        ([1], 0, SamplingParams(), 0, "samples = 0"),
        ([1], 1, SamplingParams(max_tokens=0), 0, "max_tokens = 0"),
        ([1], 1, SamplingParams(), -1, "seed = -1"),
        ([1], 1, SamplingParams(top_p=0.0), 0, "need temperature >= 0, 0 < top_p <= 1"),
        ([1], 1, SamplingParams(logprobs="raw"), 0, '"processed" log-probs only'),
        ([], 1, SamplingParams(), 0, "has no tokens"),
        ([3], 1, SamplingParams(max_tokens=1), 0, "outside the model's vocabulary of 3"),
        ([1, 2, 0], 1, SamplingParams(max_tokens=8), 0, "context holds 10"),
    ]:
        with pytest.raises(TrimtabError, match=message):
            validate_request([prompt(asked)], samples, sampling, seed, vocabulary=3, context=10)
