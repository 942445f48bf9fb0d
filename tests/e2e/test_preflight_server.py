"""`trimtab preflight` asks servers of both dialects, and names what is wrong with one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

import pytest
from tests.support.server_process import ServerProcess, starter

from trimtab.cli import main
from trimtab.preflight.checklist import PARTS
from trimtab.trainer.sft import laboratory_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def forker() -> Iterator[IO[str]]:
    with starter() as start:
        yield start


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest, forker: IO[str], tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    home = tmp_path_factory.mktemp("servers") / request.param
    return ServerProcess(forker, request.param, laboratory_folder(), home)


def run(server: ServerProcess, *lengths: str) -> int:
    words = ["preflight", "laboratory", "--sampler", "server", "--url", server.url, "--lengths", *lengths, "--json"]
    return main.run([*words, "--set", f"engine.server.kind={server.kind}"])


def preflight(server: ServerProcess, capsys: pytest.CaptureFixture[str], *lengths: str) -> tuple[int, dict[str, Any]]:
    code = run(server, *lengths)
    result = json.loads(capsys.readouterr().out)
    return code, {check["name"]: check for check in result["checks"]}


def test_a_healthy_server_passes(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = preflight(server, capsys, "8")
    print(server.kind, {name: check["detail"] for name, check in checks.items()})
    # These servers report the sampled token alone.
    assert {name: check["status"] for name, check in checks.items() if check["status"] != "ok"} == {
        "distribution": "note"
    }
    assert code == 0
    assert checks["mismatch"]["figures"]["k3"] < 1e-10
    assert max(checks["prefill"]["figures"][f"k3/{name}"] for name in PARTS) < 1e-10


def test_one_value_in_place_of_log_probs_is_named(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    server.configure(logp=-0.5)
    code, checks = preflight(server, capsys, "4", "7")  # of longer responses such an answer is refused
    assert code == 1
    assert checks["mismatch"]["status"] == "fail"
    assert checks["prefill"]["detail"].endswith(PARTS["decode/prefill"][0])  # scores of prompts are not replaced
    assert run(server, "8") == 2
    assert "returned log-prob -0.5 for all 8 tokens, sampled at temperature 1" in capsys.readouterr().err
