"""The Ray section of a recipe: what it refuses, and which resources it requests from Ray."""

from __future__ import annotations

import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer.cluster.actors import bundles
from trimtab.trainer.config import load_config


@pytest.mark.parametrize(
    ("overrides", "named"),
    [(["placement=ray", "ray.trainer_gpus=2"], "ray.trainer_gpus"), (["placement=rya"], "placement")],
)
def test_invalid_settings_are_refused(overrides: list[str], named: str) -> None:
    with pytest.raises(TrimtabError, match=named):
        load_config("laboratory", overrides)


def test_one_bundle_for_each_actor_trainers_first() -> None:
    places = ["placement=ray", "ray.engines=2", "ray.engine_gpus=1", "ray.engine_cpus=0", "ray.trainers=1"]
    config = load_config("laboratory", [*places, "ray.trainer_gpus=0.5"])
    assert bundles(config) == [{"CPU": 1, "GPU": 0.5}, {"GPU": 1}, {"GPU": 1}]


def test_servers_need_no_bundles() -> None:
    config = load_config(
        "laboratory", ["placement=ray", "engine.type=server", 'engine.server.urls=["http://127.0.0.1:1"]']
    )
    assert bundles(config) == [{"CPU": 1}]
