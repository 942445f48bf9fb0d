"""Each planted fault is named by the check that looks for it, and a healthy pair passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.support import faulty_engines as faults

from trimtab.errors import EngineDeadError, TrimtabError
from trimtab.preflight import checklist, engine_pair
from trimtab.preflight.checklist import PARTS, check_prefill, prefill_verdict
from trimtab.preflight.engine_pair import BOUNDS, EnginePair, build_pair, common_log_ratio, default_bound, pair_config
from trimtab.preflight.weight_checks import check_weights
from trimtab.trainer.engines.factory import build_engines
from trimtab.types import Completion, Engine

MakePair = Callable[..., EnginePair]
LORA, WARM = "model.lora.rank=8", "sampling.temperature=0.7"
INT8, INVARIANT = "engine.quantize=int8", "numerics=invariant"


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    cleanup = ExitStack()

    def make(
        dtype: str = "float32", sets: Sequence[str] = (), trainer: str = "trimtab", file: Path | None = None
    ) -> EnginePair:
        config = pair_config("laboratory", None, dtype, None, sets)
        bound = default_bound(config, trainer)
        pair = cleanup.enter_context(build_pair(config, trainer, file, bound, print))
        pair.publish()
        return pair

    with cleanup:
        yield make


def plant(pair: EnginePair, fault: Callable[[Engine], Any], *, visible: bool = False) -> EnginePair:
    """The pair with a fault in its engine, after a publication. visible: whether the engine returns its weights."""
    pair.engine, pair.weights_in_use = fault(pair.engine), visible
    pair.publish()
    return pair


def statuses(pair: EnginePair) -> dict[str, str]:
    result = checklist.run_checks(pair, [20, 500], {"model": "laboratory"}, lambda _: None)
    assert result.ok == all(check.status != "fail" for check in result.checks)
    return {check.name: check.status for check in result.checks}


@pytest.mark.parametrize(
    ("dtype", "sets", "trainer", "bound"),
    [
        ("float32", (), "trimtab", "float32"),
        ("float32", (), "transformers", "float32"),
        ("bfloat16", (), "trimtab", "16 bits"),
        ("float32", (INT8,), "trimtab", "quantized"),
        pytest.param("float32", (INVARIANT,), "trimtab", "invariant", marks=pytest.mark.slow),
        ("float32", (LORA, WARM, "sampling.top_p=0.8"), "transformers", "float32"),
    ],
)
def test_a_healthy_pair_passes(make_pair: MakePair, dtype: str, sets: Sequence[str], trainer: str, bound: str) -> None:
    pair = make_pair(dtype, sets, trainer)
    assert pair.bound == BOUNDS[bound]
    assert set(statuses(pair).values()) == {"ok"}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fault", "sets", "check", "words"),
    [
        (lambda e: faults.StaleTensors(e, "layers.0.self_attn.q_proj"), (), "weights", "a part of the weights"),
        (lambda e: faults.StaleTensors(e, ""), (), "weights", "the update was not taken over"),
        (lambda e: faults.StaleTensors(e, ""), (LORA,), "weights", "the adapter is not merged"),
        (faults.StaleCache, (), "weights", "stale-cache"),
        (faults.TopToken, (), "mismatch", "wrong-token"),
        (faults.TopToken, (), "distribution", "wrong-token"),
        (faults.RawLogprobs, (WARM,), "sampling settings", "raw-logprobs"),
        (lambda e: faults.OtherEnd(e, 13), (), "end tokens", "end with token 13 ('?')"),
    ],
)
def test_a_planted_fault_is_named(
    make_pair: MakePair, fault: Callable[[Engine], Any], sets: Sequence[str], check: str, words: str, dtype: str
) -> None:
    pair = plant(make_pair(dtype, sets), fault)
    found = checklist.CHECKS[check].run(pair, {20: pair.compare(pair.prompts, 20)})
    assert found.status == "fail"
    assert words in found.detail
    assert found.next_step


@pytest.mark.parametrize("lines", [0, 2])
def test_a_stale_cache_is_named_after_all_other_checks(make_pair: MakePair, tmp_path: Path, lines: int) -> None:
    """They ask every prompt, and a file of few lines repeats them."""
    file = tmp_path / "prompts.txt"
    file.write_text("3141592653=\n27=\n")
    pair = plant(make_pair(file=file if lines else None), faults.StaleCache)
    result = checklist.run_checks(pair, [20], {"model": "laboratory"}, lambda _: None)
    assert "(stale-cache)" in next(check.detail for check in result.checks if check.name == "weights")


@pytest.mark.parametrize("sets", [(), (WARM,)])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (lambda e: faults.PerturbedCache(e, 1.0), ("decode/prefill",)),
        (lambda e: faults.ChangedTensors(e, "layers.1.mlp.down_proj", 2.0), ("prefill/trainer",)),
        (
            lambda e: faults.PerturbedCache(faults.ChangedTensors(e, "layers.1.mlp.down_proj", 2.0), 1.0),
            ("decode/prefill", "prefill/trainer"),
        ),
    ],
)
def test_decoding_is_told_from_the_engine(
    make_pair: MakePair, fault: Callable[[Engine], Any], named: Sequence[str], dtype: str, sets: Sequence[str]
) -> None:
    pair = plant(make_pair(dtype, sets), fault)
    found = check_prefill(pair, {20: pair.compare(pair.prompts[:16], 20)})
    assert found.status == "fail"
    for name, (words, advice) in PARTS.items():
        assert (found.figures[f"k3/{name}"] > pair.bound) == (name in named)
        assert (words in found.detail, advice in found.next_step) == (name in named, name in named)


def test_the_prefill_of_a_healthy_pair(make_pair: MakePair) -> None:
    """With a quantized sampler, its two computations agree far better than it and the trainer."""
    pair = make_pair(sets=[INT8, WARM])
    found = check_prefill(pair, {500: pair.compare(pair.prompts[:4], 500)})  # up to the context
    assert found.status == "ok"
    assert found.figures["k3/decode/prefill"] < 1e-10
    assert 1e-6 < found.figures["k3/prefill/trainer"] == pytest.approx(found.figures["k3/decode/trainer"], rel=1e-2)


def test_the_part_behind_a_difference_by_hand() -> None:
    log = np.log(1.1)
    found = prefill_verdict(5e-3, {"decode/prefill": np.array([log, 0.0]), "prefill/trainer": np.array([log, 0.0])})
    assert found.figures == pytest.approx(
        {f"k3/{name}": (0.1 - log) / 2 for name in PARTS}
        | {f"ratio_mean/{name}": 1.05 for name in PARTS}
        | {"k3/decode/trainer": (0.21 - 2 * log) / 2, "ratio_mean/decode/trainer": 1.105}
    )
    assert found.status == "fail"  # no part alone is beyond the bound
    assert (
        prefill_verdict(1e-2, {"decode/prefill": np.array([log, 0.0]), "prefill/trainer": np.zeros(2)}).status == "ok"
    )
    assert prefill_verdict(1.0, {"decode/prefill": np.array([np.nan]), "prefill/trainer": np.zeros(1)}).status == "fail"


def test_a_shift_far_below_the_bound_is_a_difference_of_its_part() -> None:
    noise = 0.05 * np.random.default_rng(0).standard_normal(2000) - 0.05**2 / 2
    healthy = dict.fromkeys(PARTS, noise)
    assert prefill_verdict(1e-2, healthy).status == "ok"
    for part, (words, _) in PARTS.items():
        found = prefill_verdict(1e-2, {**healthy, part: noise - 0.05})
        assert found.status == "fail"
        assert words in found.detail


def test_a_sampler_that_cannot_score_is_skipped(make_pair: MakePair) -> None:
    pair = make_pair()
    samples = {8: pair.compare(pair.prompts[:2], 8)}

    class Refusing(faults.Wrapped):
        def prefill_logps(self, *_: object) -> None:
            raise TrimtabError("start it with --prompt-logprobs")

    pair.engine = Refusing(pair.engine)  # pyright: ignore[reportAttributeAccessIssue]
    found = check_prefill(pair, samples)
    assert (found.status, found.detail) == ("note", "skipped: start it with --prompt-logprobs")
    pair.engine = object()  # pyright: ignore[reportAttributeAccessIssue]
    assert check_prefill(pair, samples).detail == "skipped: this sampler cannot score given responses"


@pytest.mark.parametrize(
    ("part", "sets", "words", "tensors"),
    [
        ("layers.1.mlp.down_proj", (), "not published: model.layers.1.mlp.down_proj.weight; compared", 1),
        ("layernorm", (), "model.layers.0.post_attention_layernorm.weight", 4),
        ("", (), "the update was not taken over: all ", None),
        ("", (LORA,), "the adapter is not merged or not loaded: all ", None),
    ],
)
def test_tensors_in_use_name_what_was_not_published(
    make_pair: MakePair, part: str, sets: Sequence[str], words: str, tensors: int | None
) -> None:
    pair = plant(make_pair("bfloat16", sets), lambda e: faults.StaleTensors(e, part), visible=True)
    found = check_weights(pair, {})
    assert found.status == "fail"
    assert words in found.detail
    expected = found.figures["tensors/changed"] if tensors is None else tensors
    assert found.figures["tensors/different"] == expected <= found.figures["tensors/changed"]


def test_tensors_in_use_need_no_mismatch_that_can_be_seen(make_pair: MakePair) -> None:
    """A mismatch beside which no change of the weights is seen: without the tensors that is a note."""

    class Noisy(faults.StaleTensors):
        def answer(self, one: Completion, sampling: Any, batch: int) -> Completion:  # noqa: ARG002
            noise = np.random.default_rng(batch).normal(0, 1, len(one.logp_behavior))
            return replace(one, logp_behavior=(one.logp_behavior + noise).astype(np.float32))

    pair = plant(make_pair(), lambda e: Noisy(e, "layers.1.mlp.down_proj"))
    assert check_weights(pair, {}).status == "note"
    pair.weights_in_use = True
    found = check_weights(pair, {})
    assert found.status == "fail"
    assert "not published: model.layers.1.mlp.down_proj.weight" in found.detail


def test_an_interrupted_check_gives_the_sampler_its_weights_back(make_pair: MakePair) -> None:
    class Interrupted(faults.Wrapped):
        calls = 0

        def generate(self, *args: Any, **rest: Any) -> list[list[Completion]]:
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return super().generate(*args, **rest)

    pair = plant(make_pair(), Interrupted)
    with pytest.raises(KeyboardInterrupt):
        check_weights(pair, {})
    assert pair.compare(pair.prompts[:4], 8).k3 < 1e-9


def test_a_kernel_that_depends_on_the_batch_is_named(make_pair: MakePair) -> None:
    pair = plant(make_pair(), faults.BatchDependent)
    found = checklist.check_batch_sizes(pair, {})
    assert found.status == "fail"
    assert "batch-invariant" in found.next_step
    assert min(found.figures.values()) > 1e-7


def test_raw_log_probs_at_temperature_1_are_a_note(make_pair: MakePair) -> None:
    pair = plant(make_pair(), faults.RawLogprobs)
    found = checklist.check_sampling_settings(pair, {})
    assert (found.status, found.next_step) == ("note", "")
    assert "at temperature 0.7" in found.detail


@pytest.mark.parametrize(
    ("sets", "change"),
    [((), "every trained weight changed by 10%"), ((LORA,), "every lora_B matrix got noise of 0.02")],
)
def test_weights_and_versions_are_restored(make_pair: MakePair, sets: Sequence[str], change: str) -> None:
    pair = make_pair(sets=sets)
    before = {name: p.clone() for name, p in pair.model.named_parameters()}
    first = pair.sample(pair.prompts[:4], 20)
    found = check_weights(pair, {})
    assert (found.status, found.detail.partition(":")[0]) == ("ok", change)
    assert all(torch.equal(before[name], p) for name, p in pair.model.named_parameters())
    assert not np.any(common_log_ratio(first, pair.sample(pair.prompts[:4], 20)))


def test_what_the_engine_refuses_has_failed(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise TrimtabError("set top_p = 1")

    monkeypatch.setitem(checklist.CHECKS, "sampling settings", checklist.CheckOfPair("?", refuse))  # pyright: ignore[reportArgumentType]
    result = checklist.run_checks(make_pair(), [8], {"model": "laboratory"}, lambda _: None)
    [failed] = [check for check in result.checks if check.status == "fail"]
    assert (failed.name, failed.detail) == ("sampling settings", "set top_p = 1")
    assert result.verdict == "not fit to train: sampling settings"


def test_a_dead_engine_ends_the_checks(make_pair: MakePair) -> None:
    class Dying(faults.Wrapped):
        def generate(self, prompts: Any, samples: int, sampling: Any, **rest: Any) -> list[list[Completion]]:
            if sampling.top_logprobs:  # as `distribution` asks first
                raise EngineDeadError("the engine's process was killed during generate")
            return super().generate(prompts, samples, sampling, **rest)

    result = checklist.run_checks(plant(make_pair(), Dying), [8], {"model": "laboratory"}, lambda _: None)
    assert [check.name for check in result.checks] == ["mismatch", "prefill", "distribution"]
    assert [check.status for check in result.checks] == ["ok", "ok", "fail"]
    assert result.checks[-1].detail == "the engine's process was killed during generate"


def test_dropout_is_named(make_pair: MakePair) -> None:
    pair = make_pair()
    samples = {20: pair.compare(pair.prompts[:4], 20)}
    pair.model.model.layers[0].mlp.register_forward_hook(
        lambda module, _, output: torch.nn.functional.dropout(output, 0.5, module.training)
    )
    found = checklist.check_training_mode(pair, samples)
    assert found.status == "fail"
    assert "dropout" in found.next_step


def test_prompts_of_a_file_are_repeated_and_short_contexts_shorten_responses(
    make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("3141592653=\n\n27=\n")
    pair = make_pair(file=file)
    assert [len(prompt.ids) for prompt in pair.prompts] == [11, 3] * 32
    assert pair.room(pair.prompts, 2048) == 64 - 11
    file.write_text("\n")
    monkeypatch.setattr(engine_pair, "build_model", None)  # the file is read before
    with pytest.raises(TrimtabError, match="no line with text"):
        make_pair(file=file)


def test_the_engine_is_closed_if_the_pair_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []  # kept, as a notebook keeps what is in the traceback of the last error

    def engines(*rest: Any) -> list[Any]:
        built.extend(build_engines(*rest))
        return built

    monkeypatch.setattr(engine_pair, "build_engines", engines)
    config = pair_config("laboratory", None, "float32", None, ["engine.workers=1", "task.name=other"])
    with pytest.raises(TrimtabError, match="unknown task"), build_pair(config, "trimtab", None, 0.0, print):
        pass
    assert not psutil.pid_exists(built[0].transport.pid)


def test_the_tokens_that_two_answers_share() -> None:
    def answer(ids: list[int], logps: list[float]) -> Completion:
        values = np.array(logps, dtype=np.float32)
        return Completion(np.array(ids), values, np.zeros(len(ids), dtype=np.int64), "length", "")

    a, b = answer([1, 2, 3], [-1.0, -2.0, -3.0]), answer([1, 2, 4], [-1.0, -2.5, -9.0])
    np.testing.assert_array_equal(common_log_ratio([a], [b]), np.array([0.0, -0.5], dtype=np.float32))
