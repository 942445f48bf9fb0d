"""`trimtab preflight` over real vLLM in bfloat16: healthy, and with one tensor that is not published."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support import faulty_engines as faults
from tests.support.engines import tokenizer
from tests.support.vllm_support import needs_vllm, policy

from trimtab.preflight import checklist
from trimtab.preflight.engine_pair import EnginePair, build_pair, default_bound, pair_config
from trimtab.preflight.weight_checks import check_weights

pytestmark = [pytest.mark.slow, needs_vllm]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    folder = tmp_path_factory.mktemp("vllm")
    policy().save_pretrained(folder / "policy")
    tokenizer().save_pretrained(folder / "policy")
    prompts = folder / "prompts.txt"
    prompts.write_text("ab c w1 w2 w3 \nc a b w9 w8 w7 \n")
    sets = ["engine.vllm.memory=0.05", "engine.vllm.context=256"]
    config = pair_config(str(folder / "policy"), "vllm", "bfloat16", None, sets)
    bound = default_bound(config, "transformers")
    with build_pair(config, "transformers", prompts, bound, print) as built:
        yield built


def test_a_healthy_engine_passes(pair: EnginePair) -> None:
    result = checklist.run_checks(pair, [16, 64], {"model": "policy"}, print)
    assert {check.name: check.status for check in result.checks} == dict.fromkeys(checklist.CHECKS, "ok")
    assert 1e-6 < result.samples[64].k3 < 5e-3


def test_a_tensor_that_vllm_misses_is_seen(pair: EnginePair) -> None:
    healthy, engine = pair.engine, faults.StaleTensors(pair.engine, "layers.0.self_attn.q_proj")
    pair.engine = engine  # pyright: ignore[reportAttributeAccessIssue]
    pair.publish()
    found = check_weights(pair, {})
    pair.engine = healthy
    assert found.status == "fail"
    assert "a part of the weights did not arrive" in found.detail
