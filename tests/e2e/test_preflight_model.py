"""`trimtab preflight` on the bundled pretrained model in float32: healthy, and with one tensor missing."""

from __future__ import annotations

import pytest
from tests.support import faulty_engines as faults

from trimtab.preflight import checklist
from trimtab.preflight.build_pair import build_pair, default_bound, pair_config
from trimtab.preflight.engine_pair import EnginePair
from trimtab.preflight.weight_checks import weights

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TENSOR = "model.layers.17.self_attn.v_proj.weight"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> EnginePair:
    config = pair_config("smollm2-135m-instruct", None, "float32", None, ())
    folder = tmp_path_factory.mktemp("preflight")
    return build_pair(config, "trimtab", None, default_bound(config, "trimtab"), folder, print)


def test_the_bundled_model_passes(pair: EnginePair) -> None:
    result = checklist.run(pair, [16], {"model": "smollm2-135m-instruct"}, print)
    assert {check.name for check in result.checks if check.status == "fail"} == set()
    assert {check.name for check in result.checks if check.status == "note"} <= {"end tokens"}, "few responses end"
    assert 0 < result.samples[16].k3 < 1e-9


def test_one_of_its_272_tensors_is_missed(pair: EnginePair) -> None:
    healthy, engine = pair.engine, faults.StaleTensors(pair.engine, TENSOR)
    pair.engine = engine  # pyright: ignore[reportAttributeAccessIssue]
    pair.publish()
    found = weights(pair, {})
    pair.engine = healthy
    assert found.status == "fail"
    assert f"not published: {TENSOR};" in found.detail
