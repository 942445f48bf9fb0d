"""Which recipes may continue a run: what decides its numbers must be as it was, where it runs may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trimtab.errors import TrimtabError
from trimtab.runs.directory import RunDirectory
from trimtab.runs.layout import CONFIG
from trimtab.trainer.checkpoint.run_state import _check_same_recipe  # pyright: ignore[reportPrivateUsage]
from trimtab.trainer.config import Config, load_config

LAG = "trainer.max_lag=2"
RAY = "placement=ray"
SERVERS = ['engine.type="server"', 'engine.server.urls=["http://127.0.0.1:1"]']


def recipe(*sets: str) -> Config:
    return load_config("laboratory", sets)


def resume(folder: Path, saved: Config, config: Config) -> None:
    RunDirectory.create(folder, saved.dump()).close()
    with RunDirectory.open(folder) as run:
        _check_same_recipe(run, config)
        assert (folder / CONFIG).read_text() == saved.dump(), "`resume` records it when nothing refuses"


@pytest.mark.parametrize(
    ("saved", "config"),
    [
        (["trainer.steps=5"], ["trainer.steps=9", "eval.every=2"]),
        ([LAG], [LAG, "engine.hang_timeout=60"]),
        ([], ["sharding.offload=true"]),
        ([*SERVERS, LAG], [SERVERS[0], 'engine.server.urls=["http://other:2"]', "engine.server.timeout=9", LAG]),
        ([], [RAY]),
        ([LAG], [RAY, LAG, "ray.engines=3"]),
        ([RAY, LAG], [LAG]),
        ([RAY], [RAY, "ray.trainers=4"]),
        (["engine.noise=0.1", LAG], [RAY, "engine.noise=0.1", LAG]),
    ],
)
def test_where_and_how_long_a_run_goes_on_may_change(tmp_path: Path, saved: list[str], config: list[str]) -> None:
    resume(tmp_path / "run", recipe(*saved), recipe(*config))


@pytest.mark.parametrize(
    ("saved", "config", "line"),
    [
        ([], ["optim.lr=0.5"], "another recipe.*lr = 0.5"),
        ([LAG], ["trainer.max_lag=3"], "another recipe.*max_lag = 3"),
        (["engine.workers=1"], [], r"another recipe.*engine.workers = None"),
        ([*SERVERS], [*SERVERS, "engine.server.kind=sglang"], "another recipe.*kind = 'sglang'"),
        ([RAY], [], "cannot go on elsewhere.*placement = 'ray'"),
        (["engine.noise=0.1"], [RAY, "engine.noise=0.1"], "cannot go on elsewhere.*placement = 'local'"),
    ],
)
def test_what_decides_the_numbers_may_not(tmp_path: Path, saved: list[str], config: list[str], line: str) -> None:
    before: Any = recipe(*saved)
    with pytest.raises(TrimtabError, match=line):
        resume(tmp_path / "run", before, recipe(*config))
    assert (tmp_path / "run" / CONFIG).read_text() == before.dump()
