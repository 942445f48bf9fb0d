"""The environment "openenv" with real servers of the openenv package, on loopback."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trimtab
from trimtab.runs.trajectories import read
from trimtab.trainer.config import EnvironmentConfig, load_config
from trimtab.trainer.environments import BuiltEnvironment, build
from trimtab.trainer.environments.background import in_background

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-openenv" / "bin" / "python"

EXAMPLES = "".join(
    f"Question: {question} =\n{start}\nAnswer: <add>{first}</add><output>{start + first}</output> {start + first}\n\n"
    for question, start, first in (("412 * 739", 4, 2), ("127 * 856", 7, 5), ("530 * 214", 1, 3))
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no OpenEnv here: make openenv installs it"),
]


@contextmanager
def server(kind: str, capacity: int) -> Iterator[str]:
    command = [str(PYTHON), str(ROOT / "tests" / "support" / "openenv_server.py"), kind, str(capacity)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def count() -> Iterator[str]:
    with server("count", 16) as url:
        yield url


@pytest.fixture(scope="module")
def tools() -> Iterator[str]:
    with server("tools", 3) as url:
        yield url


def built(url: str, **options: Any) -> BuiltEnvironment:
    return build(EnvironmentConfig(name="openenv", url=url, **options))


def call(coroutine: Any) -> Any:
    """What a coroutine of an environment returns, in the event loop of environments."""
    background = in_background(lambda: coroutine, 30.0)
    background.wait(30.0)
    return background.value()


def test_an_action_is_a_tool_with_its_fields(count: str) -> None:
    environment = built(count, tool="add")
    assert environment.tools == ("add",)
    (schema,) = environment.schemas()
    parameters = schema["function"]["parameters"]
    assert parameters["properties"]["step"] == {"type": "integer", "description": "the number to add"}
    assert parameters["required"] == ["step"]
    episode = environment.factory()
    assert call(episode.reset(id="p1", start=5)) == "\n5"
    assert call(episode.add(step=3)) == "8"
    assert call(episode.add(2, twice=True)) == "12"
    with pytest.raises(Exception, match="99 is too much"):
        call(episode.add(step=99))
    assert call(episode.add(step=1)) == "13"
    with pytest.raises(ValueError, match="the episode is over"):
        call(episode.add(step=1))
    assert episode.get_reward() == 3 + 4 + 1
    call(episode.close())


def test_responses_of_one_seed_begin_alike_and_do_not_share_a_session(count: str) -> None:
    environment = built(count)
    one, two, other = (environment.factory() for _ in range(3))
    begins = [call(episode.reset(id="a", seed=seed)).strip() for episode, seed in ((one, 1), (two, 1), (other, 2))]
    assert begins[0] == begins[1] != begins[2]
    call(one.step(step=5))
    assert call(two.step(step=1)) == str(int(begins[1]) + 1)
    for episode in (one, two, other):
        call(episode.close())


def test_mcp_tools_are_tools(tools: str) -> None:
    environment = built(tools, reward=False)
    assert environment.tools == ("add", "double")
    assert not hasattr(environment.kind, "get_reward")
    episode = environment.factory()
    assert call(episode.reset(id="p1")) == ""
    first = int(call(episode.add(step=3)).removeprefix("now "))
    assert call(episode.double()) == f"now {2 * first}"
    with pytest.raises(ValueError, match="99 is too much"):
        call(episode.add(step=99))
    call(episode.close())


def test_a_server_without_rewards_or_sessions_says_so(tools: str) -> None:
    environment = built(tools)
    episodes = [environment.factory() for _ in range(4)]
    for episode in episodes[:3]:
        call(episode.reset(id="p1"))
    with pytest.raises(Exception, match="raise max_concurrent_envs"):
        call(episodes[3].reset(id="p1"))
    assert episodes[0].get_reward() == 0
    call(episodes[0].double())
    with pytest.raises(Exception, match=r"environment\.reward = false"):
        episodes[0].get_reward()
    for episode in episodes:
        call(episode.close())


def test_a_run_trains_on_the_rewards_of_a_server(count: str, tmp_path: Path) -> None:
    config = load_config(
        {
            "base": "quickstart-tools",
            "environment": {"name": "openenv", "url": count, "tool": "add", "max_turns": 2, "instructions": EXAMPLES},
            "trainer": {"steps": 2, "prompts": 2, "samples": 4},
            "eval": {"problems": 2},
        }
    )
    result = trimtab.train(config, out=tmp_path / "run", progress=False)
    assert result.metrics["episode/failed"] == 0
    assert result.metrics["episode/calls"] > 0
    rows = [row.trajectory for file in sorted((tmp_path / "run" / "trajectories").iterdir()) for row in read(file)]
    assert len({row.reward for row in rows}) > 1
    assert all(np.isfinite(row.reward) for row in rows)
