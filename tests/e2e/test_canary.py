"""The canary on engines with planted faults: every one is caught, and healthy engines never are."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.run_results import untimed
from tests.support.vllm_support import update
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from trimtab.errors import DivergedError, TrimtabError
from trimtab.trainer.config import load_config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models import laboratory
from trimtab.trainer.rollout.canary import MARGIN, MIN_BOUND, Canary
from trimtab.trainer.run import train
from trimtab.types import Completion, Prompt

pytestmark = pytest.mark.e2e

_, TOKENIZER = laboratory.build(seed=0)


def policy(seed: int = 0, *, tied: bool = True) -> Any:
    config = LlamaConfig(
        vocab_size=len(laboratory.ALPHABET),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def canary(model: nn.Module, *sets: str) -> Canary:
    config = load_config("laboratory", ["engine.canary.every=1", *(f"engine.canary.{item}" for item in sets)])
    built = Canary.build(config, TOKENIZER, model)
    assert built is not None
    return built


def engine_of(model: nn.Module, dtype: torch.dtype = torch.float32, kind: type = EmbeddedEngine) -> Any:
    return kind(model, TOKENIZER, dtype)


def run_canary(watch: Canary, engine: Any, model: Any, version: int) -> float:
    engine.update_weights(model.named_parameters(), version)
    return check(watch, engine, model, version)


def check(watch: Canary, engine: Any, model: Any, version: int) -> float:
    expected = watch.predict(model, version)
    assert expected is not None
    return watch.check(engine, expected)


def test_what_is_expected_is_the_policy_at_every_context() -> None:
    model = policy()
    expected = canary(model).predict(model, 3)
    assert expected is not None
    assert expected.logp.shape == (4 * 16, 14)
    assert [len(ids) for ids in expected.contexts[:16]] == list(range(129, 145))
    for index in (0, 15, 16, 40, 63):
        with torch.no_grad():
            logits = model(torch.from_numpy(expected.contexts[index])[None]).logits[0, -1]
        np.testing.assert_allclose(expected.logp[index], logits.log_softmax(-1).numpy(), atol=5e-5)  # measured 3e-6


def test_half_of_the_contexts_stay_and_half_are_new_at_every_version() -> None:
    watch = canary(policy())
    expectations = [watch.predict(policy(), version) for version in (0, 1, 2, 13, 14, 500_000)]
    contexts: set[tuple[int, ...]] = set()
    for expected in expectations:
        assert expected is not None
        assert expectations[0] is not None
        beginnings = {
            tuple(ids[:6].tolist()) for ids, fixed in zip(expected.contexts, expected.fixed, strict=True) if not fixed
        }
        assert not beginnings & contexts
        contexts |= beginnings
        for ids, first, fixed in zip(expected.contexts, expectations[0].contexts, expected.fixed, strict=True):
            assert not fixed or np.array_equal(ids, first)
        assert int(expected.fixed.sum()) == 32


def test_contexts_fit_a_short_model_or_the_context_of_a_recipe() -> None:
    model, tokenizer = laboratory.build(seed=0)
    for words, longest in (([], 63), (['engine.type="vllm"', "engine.vllm.context=40"], 39)):
        watch = Canary.build(load_config("laboratory", ["engine.canary.every=1", *words]), tokenizer, model)
        assert watch is not None
        expected = watch.predict(model, 0)
        assert expected is not None
        assert max(len(ids) for ids in expected.contexts) == longest  # and one token after it
        assert watch.check(EmbeddedEngine(model, tokenizer, torch.float32), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-5, 3e-2])
def test_no_fault_is_reported_for_a_healthy_engine(dtype: torch.dtype, size: float) -> None:
    model = policy()
    watch, engine = canary(model, "tokens=6"), engine_of(policy(), dtype)
    differences = []
    for version in range(20):
        differences.append(run_canary(watch, engine, model, version))
        update(model, size, seed=version)
    assert watch.noise == differences[0]
    assert watch.metrics()["canary/abs_diff"] == differences[-1]
    # A float32 engine leans nowhere: its bound alone is as sharp.
    assert ("canary/pull" in watch.metrics()) == (dtype == torch.bfloat16)
    assert watch.metrics().get("canary/pull", 0) < 5
    assert max(differences) < max(MARGIN * differences[0], MIN_BOUND)


def test_publishing_the_same_weights_again_is_not_a_skipped_update() -> None:
    model = policy()
    watch, engine = canary(model), engine_of(model)
    assert [run_canary(watch, engine, model, version) for version in range(3)] == [pytest.approx(0, abs=1e-5)] * 3


class Skips(EmbeddedEngine):
    """Reports success and keeps its weights."""

    skipping = False

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, as_is: bool = False) -> None:
        if self.skipping:
            self.policy_version = version
        else:
            super().update_weights(weights, version, as_is=as_is)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.01, 0.3])
def test_a_skipped_update_is_caught(dtype: torch.dtype, size: float) -> None:
    model = policy()
    watch, engine = canary(model), engine_of(model, dtype, Skips)
    run_canary(watch, engine, model, 0)
    update(model, 0.01, seed=0)
    run_canary(watch, engine, model, 1)
    engine.skipping = True
    update(model, size, seed=1)
    with pytest.raises(TrimtabError, match=r"version 2.*version 1.*skipped"):
        run_canary(watch, engine, model, 2)


def test_small_skipped_updates_add_up_until_they_are_caught() -> None:
    model = policy()
    watch, engine = canary(model), engine_of(model, torch.bfloat16, Skips)
    run_canary(watch, engine, model, 0)
    engine.skipping = True

    def train() -> None:
        for version in range(1, 60):
            update(model, 1e-3, seed=0)  # the same direction every time
            run_canary(watch, engine, model, version)

    with pytest.raises(TrimtabError, match=r"version 0.*the update was skipped"):
        train()


def test_a_publication_that_did_not_arrive_is_named() -> None:
    model = policy()
    watch, engine = canary(model), engine_of(model)
    with pytest.raises(TrimtabError, match=r"version 4 was published.*with 0: the publication did not reach it"):
        check(watch, engine, model, 4)


def publish_but_the_head(engine: EmbeddedEngine, model: Any, version: int) -> None:
    """The head keeps a copy of its own, which the publication does not reach."""
    head = engine._model.lm_head
    old = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    engine.update_weights(model.named_parameters(), version)
    head.weight = old


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_with_its_own_copy_is_caught(dtype: torch.dtype) -> None:
    model = policy()
    watch, engine = canary(model), engine_of(model, dtype)
    run_canary(watch, engine, model, 0)
    update(model, 0.3, seed=1)
    publish_but_the_head(engine, model, 1)
    with pytest.raises(TrimtabError, match=r"a part of the weights was not taken over .*tied head"):
        check(watch, engine, model, 1)


def test_a_head_that_falls_behind_slowly_is_caught() -> None:
    model = policy()
    watch, engine = canary(model), engine_of(model, torch.bfloat16)
    run_canary(watch, engine, model, 0)
    head = engine._model.lm_head.weight.detach().clone()

    def train() -> None:
        for version in range(1, 60):
            update(model, 0.01, seed=version)
            engine._model.lm_head.weight = engine._model.model.embed_tokens.weight
            engine.update_weights(model.named_parameters(), version)
            engine._model.lm_head.weight = nn.Parameter(head, requires_grad=False)
            check(watch, engine, model, version)

    with pytest.raises(TrimtabError, match=r"of the policy's way back towards version 0|was not taken over"):
        train()


def test_a_wrong_head_is_caught_at_the_first_check_too() -> None:
    model = policy()
    watch, engine = canary(model), engine_of(policy(seed=1), torch.bfloat16)
    publish_but_the_head(engine, model, 0)
    with pytest.raises(TrimtabError, match=r"bound 0\.5.*another model, or a part.*tied head"):
        check(watch, engine, model, 0)


def test_a_part_that_was_not_taken_over_is_caught_without_a_tied_head() -> None:
    model = policy(tied=False)
    watch, engine = canary(model), engine_of(model)
    run_canary(watch, engine, model, 0)
    old = engine._model.model.layers[1].mlp.down_proj.weight.detach().clone()
    update(model, 0.1, seed=1)
    engine.update_weights(model.named_parameters(), 1)
    engine._model.model.layers[1].mlp.down_proj.weight.data.copy_(old)
    with pytest.raises(TrimtabError, match="a part of the weights was not taken over"):
        check(watch, engine, model, 1)


class Remembers(EmbeddedEngine):
    """Answers for contexts it has seen with the weights of that time, as a prefix cache does that was not reset."""

    def __init__(self, model: Any, tokenizer: Any, dtype: Any) -> None:
        super().__init__(model, tokenizer, dtype)
        self._old: dict[bytes, EmbeddedEngine] = {}

    def generate(self, prompts: Sequence[Prompt], *args: Any, **keywords: Any) -> list[list[Completion]]:
        now = copy.deepcopy(self)
        out = []
        for prompt in prompts:
            owner = self._old.setdefault(prompt.ids[:128].tobytes(), now)
            [group] = EmbeddedEngine.generate(owner, [prompt], *args, **keywords)
            out.append([_dated(completion, self.policy_version) for completion in group])
        return out


def _dated(completion: Completion, version: int) -> Completion:
    return Completion(
        completion.response_ids,
        completion.logp_behavior,
        np.full(len(completion.response_ids), version),
        completion.finish_reason,
        completion.text,
    )


def test_a_stale_prefix_cache_is_distinguished_from_stale_weights() -> None:
    model = policy()
    watch, engine = canary(model, "prompts=2", "tokens=4"), engine_of(model, torch.float32, Remembers)
    run_canary(watch, engine, model, 0)
    update(model, 0.3, seed=1)
    with pytest.raises(TrimtabError, match=r"only contexts it had seen before.*prefix cache"):
        run_canary(watch, engine, model, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_caught(dtype: torch.dtype) -> None:
    model = policy()
    watch, engine = canary(model), engine_of(model, dtype)
    run_canary(watch, engine, model, 0)
    engine._model.model.layers[0].mlp.up_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(DivergedError, match="not finite"):
        check(watch, engine, model, 0)
    model.model.norm.weight.data.fill_(float("inf"))
    with pytest.raises(DivergedError, match="trained policy of version 1 is not finite"):
        watch.predict(model, 1)


def test_engines_are_checked_one_by_one() -> None:
    model = policy()
    watch, engines = canary(model), [engine_of(model), engine_of(model, kind=Skips)]
    for engine in engines:
        run_canary(watch, engine, model, 0)
    update(model, 0.05, seed=0)
    engines[1].skipping = True
    expected = watch.predict(model, 1)
    assert expected is not None
    for engine in engines:
        engine.update_weights(model.named_parameters(), 1)
    watch.check(engines[0], expected)
    with pytest.raises(TrimtabError, match="skipped"):
        watch.check(engines[1], expected)


def test_every_determines_which_publications_are_checked() -> None:
    model = policy()
    watch = canary(model, "every=3")
    assert [watch.predict(model, version) is not None for version in range(7)] == [True, False, False] * 2 + [True]
    assert Canary.build(load_config("laboratory"), TOKENIZER, model) is None
    assert Canary.build(load_config("quickstart-vllm", ["engine.canary.every=0"]), TOKENIZER, model) is None
    assert Canary.build(load_config("quickstart-vllm"), TOKENIZER, model) is not None


def test_a_resumed_run_checks_the_same_publications() -> None:
    model = policy()
    first, engine = canary(model, "every=2"), engine_of(model)
    for version in range(4):
        if (expected := first.predict(model, version)) is not None:
            engine.update_weights(model.named_parameters(), version)
            first.check(engine, expected)
    resumed = canary(model, "every=2")
    resumed.load_state(json.loads(json.dumps(first.state())))
    assert resumed.metrics() == first.metrics() != {}
    assert resumed.predict(model, 3) is None, "a repeated publication is not counted"
    assert [resumed.predict(model, version) is not None for version in range(4, 8)] == [True, False] * 2


def test_the_bound_is_that_of_the_recipe_or_of_the_noise_measured_before() -> None:
    model = policy()
    engine = engine_of(model, torch.bfloat16)
    with pytest.raises(TrimtabError, match=r"bound 1e-05.*engine\.canary\.bound"):
        run_canary(canary(model, "bound=1e-5"), engine, model, 0)
    resumed = canary(model)
    resumed.noise = 1e-4
    other = policy()
    update(other, 0.1, seed=9)
    engine.update_weights(other.named_parameters(), 1)
    expected = resumed.predict(model, 1)
    assert expected is not None
    with pytest.raises(TrimtabError, match=r"bound 0\.001"):
        resumed.check(engine, expected)


def test_the_temperature_is_the_runs() -> None:
    model = policy()
    config = load_config("laboratory", ["engine.canary.every=1", "sampling.temperature=0.5"])
    watch = Canary.build(config, TOKENIZER, model)
    assert watch is not None
    assert run_canary(watch, engine_of(model), model, 0) < 1e-4


def test_a_run_that_is_resumed_between_two_checks_has_the_same_metrics(tmp_path: Path) -> None:
    sets = ["engine.canary.every=3", "engine.dtype=float32", "optim.schedule=constant", "trainer.prompts=4"]
    sets += ["trainer.samples=4", "eval.every=0", "eval.problems=4", "checkpoint.every=0", "log.trajectories_every=0"]
    for name, steps in (("whole", (7,)), ("parts", (3, 4, 7))):
        for count in steps:
            resume = (tmp_path / name).exists()
            train(load_config("laboratory", [*sets, f"trainer.steps={count}"]), out=tmp_path / name, resume=resume)
    whole, parts = untimed(tmp_path / "whole", "eval/"), untimed(tmp_path / "parts", "eval/")
    assert whole == parts
    assert len({row["canary/abs_diff"] for row in whole}) == 3, "after steps 0, 3 and 6"
