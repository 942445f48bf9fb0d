"""Requests of a call over servers that fail: in a fake network of SGLang servers, and connections over real sockets."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from trimtab.errors import EngineDeadError, TrimtabError
from trimtab.trainer.config.rollout_sections import ServerConfig
from trimtab.trainer.engines.server import http_client, inference_server, request_dispatch
from trimtab.trainer.engines.server.http_client import Connection, RequestRejected, ServerUnavailable, WrongAnswer, run
from trimtab.trainer.engines.server.inference_server import InferenceServer, load_weights
from trimtab.trainer.engines.server.request_dispatch import MAX_ATTEMPTS, RequestDispatch
from trimtab.trainer.engines.server.server_protocol import CompletionRequest, CompletionResult, Model
from trimtab.trainer.engines.server.sglang_protocol import SglangProtocol
from trimtab.types import SamplingParams

MODEL, LABEL = Model("m", None), "current"
RIGHT, WRONG = -0.25, -9.0  # log-probs under the current weights and under others


class FakeServer:
    """An SGLang server. A request is answered with its own ids, under the weights of the process that answers it.

    `network.disturb` is called before a request reaches it, `network.generate` while it samples; both may raise.
    """

    def __init__(self, network: FakeNetwork, url: str) -> None:
        self.server = InferenceServer(url, SglangProtocol(), 5.0, 10 * TURN)
        self.server.model, self.server.label = MODEL, LABEL
        self.network = network
        self.loads_weights = True
        self.process: object = None
        self.label = ""
        self.paths: list[str] = []
        self.asked: list[int] = []
        self.restart(LABEL)

    def restart(self, label: str = "default") -> None:
        self.process, self.label = object(), label

    async def answer(self, path: str, body: Any) -> Any:
        self.paths.append(path)
        if path == "/model_info":
            return {"tokenizer_path": MODEL.name, "weight_version": self.label}
        if path == "/update_weights_from_disk":
            self.label = body["weight_version"] if self.loads_weights else self.label
            return {"success": True}
        if path != "/generate":
            return {}
        [index] = body["input_ids"]
        self.asked.append(index)
        early = await self.network.generate(self, index)
        if isinstance(early, httpx2.Response):
            return early
        logp = RIGHT if self.label == LABEL else WRONG
        tokens = [] if early == "abort" else [[logp, index, None]]
        info = {"finish_reason": {"type": early or "stop"}, "completion_tokens": len(tokens)}
        return {"meta_info": info | {"output_token_logprobs": tokens}}


TURN = 10_000


def request(token: int) -> CompletionRequest:
    """The prompt, and the only token of its answer, is `token`: that of turn t of response i is i + TURN * t."""
    return CompletionRequest((token,), 4, token, SamplingParams(), ())


class FakeNetwork:
    """Replaces TCP: a connection keeps to one process of its server and is silently opened again after a restart."""

    def __init__(self, servers: int) -> None:
        self.servers = [FakeServer(self, f"http://server{i}") for i in range(servers)]
        self.delivered = Counter[int]()  # answers under the current weights, over connections that were checked
        self.generate: Callable[[FakeServer, int], Awaitable[Any]] = self.at_once
        self.disturb: Callable[[FakeServer, str], None] = lambda *_: None

    @staticmethod
    async def at_once(server: FakeServer, index: int) -> None:  # noqa: ARG004
        await asyncio.sleep(0)

    def open_transport(self) -> httpx2.MockTransport:
        connections: list[dict[str, Any]] = []

        async def handle(request: httpx2.Request) -> httpx2.Response:
            fake, path = self.servers[int(request.url.host.removeprefix("server"))], request.url.path
            self.disturb(fake, path)
            if not connections or connections[-1]["process"] is not fake.process:
                connections.append({"process": fake.process, "checked": False})
            connection = connections[-1]
            body = json.loads(request.content) if request.content else None
            reply = await fake.answer(path, body)
            if connection["process"] is not fake.process:
                raise httpx2.ReadError("killed")
            if isinstance(reply, httpx2.Response):
                return reply
            if path == "/generate" and connection["checked"] and reply["meta_info"]["finish_reason"]["type"] == "stop":
                self.delivered[body["input_ids"][0]] += 1
            connection["checked"] |= path == "/model_info" and fake.label == LABEL
            return httpx2.Response(200, json=reply, extensions={"network_stream": connection})

        return httpx2.MockTransport(handle)

    def call(self, count: int, abort: Any = None, turns: int = 1, **settings: Any) -> dict[int, CompletionResult]:
        """Asks for the turns of `count` responses; returns the results by token of the request."""
        config = ServerConfig.model_validate({"kind": "sglang", "reconnect_timeout": 30.0, "concurrency": 1} | settings)
        dispatch = RequestDispatch([fake.server for fake in self.servers], Path("weights"), config, [].append)
        results = dict[int, CompletionResult]()

        async def respond(index: int) -> None:
            for token in range(index, index + TURN * turns, TURN):
                result = await dispatch.ask(index, request(token))
                if result is not None:
                    results[token] = result
                if result is None or result.finish == "abort":
                    return

        async def run_all() -> None:
            await dispatch.run([respond(index) for index in range(count)], abort)

        asyncio.run(run_all())
        assert dispatch.prefilled_tokens == len(results)
        assert dispatch.decoded_tokens == sum(len(result.ids) for result in results.values())
        return results


Network = Callable[[int], FakeNetwork]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    for name in ("INITIAL_BACKOFF", "MAX_BACKOFF", "ABORT_RETRY_INTERVAL"):
        monkeypatch.setattr(inference_server, name, 0.0)
    for name in ("INITIAL_BACKOFF", "MAX_BACKOFF", "POLL_INTERVAL"):
        monkeypatch.setattr(request_dispatch, name, 0.0)

    def build(servers: int) -> FakeNetwork:
        made = FakeNetwork(servers)
        monkeypatch.setattr(http_client, "open_transport", made.open_transport)
        return made

    return build


def fails(random_numbers: random.Random) -> Callable[[FakeServer, int], Awaitable[Any]]:
    """Each request fails in one of eight ways, with a probability of 1.5 % each."""

    async def generate(fake: FakeServer, index: int) -> Any:  # noqa: ARG001
        for _ in range(random_numbers.randrange(3)):
            await asyncio.sleep(0)
        fault = int(random_numbers.random() / 0.015)
        if fault in (0, 1):  # the answer is lost, or was never written
            raise (httpx2.ReadError if fault else httpx2.RemoteProtocolError)("gone")
        if fault in (2, 3, 4):
            return httpx2.Response((500, 503, 429)[fault - 2])
        if fault == 5:
            return httpx2.Response(200, content=b'{"meta_info"')
        if fault == 6:
            return "abort"
        if fault == 7:
            fake.restart()  # kills all requests in progress
        return None

    return generate


@pytest.mark.parametrize(("seed", "turns"), [(0, 1), (2, 4)])
def test_of_a_thousand_requests_with_random_failures_none_is_lost_and_none_is_answered_twice(
    network: Network, seed: int, turns: int
) -> None:
    numbers, made = random.Random(seed), network(3)
    made.generate = fails(numbers)

    def disturb(fake: FakeServer, path: str) -> None:
        if numbers.random() < 0.01:
            raise httpx2.ConnectError("refused")
        if path == "/generate" and numbers.random() < 0.01:
            fake.restart()  # the next answer comes from a process with its first weights

    made.disturb = disturb
    results = made.call(1000 // turns, concurrency=16, turns=turns)
    wrong = [(i, result) for i, result in results.items() if result != CompletionResult([i], [RIGHT], "stop")]
    asked = [index + TURN * turn for turn in range(turns) for index in range(1000 // turns)]
    assert (wrong, sorted(results)) == ([], asked)
    assert made.delivered == dict.fromkeys(asked, 1)
    assert sum(len(fake.asked) for fake in made.servers) > 1100  # the failures took place


def test_an_answer_of_a_server_that_swapped_its_weights_between_two_requests_is_not_used(network: Network) -> None:
    made = network(1)
    [fake] = made.servers

    def disturb(fake: FakeServer, path: str) -> None:
        if path == "/generate" and fake.asked == [0]:
            fake.restart()

    made.disturb = disturb
    assert made.call(2) == {i: CompletionResult([i], [RIGHT], "stop") for i in range(2)}
    assert fake.asked == [0, 1, 1]
    check = ["/health", "/model_info", "/model_info", "/update_weights_from_disk"]
    assert fake.paths == ["/model_info", "/generate", "/generate", *check, "/model_info", "/generate"]


def test_samples_of_a_prompt_stay_together_until_a_server_is_idle(network: Network) -> None:
    made = network(2)
    first, second = made.servers

    async def generate(fake: FakeServer, index: int) -> None:  # noqa: ARG001
        while not second.asked or (fake is second and len(first.asked) < 7):
            await asyncio.sleep(0)

    made.generate = generate
    made.call(8)
    assert second.asked == [4]
    assert first.asked == [0, 1, 2, 3, 7, 6, 5]  # the farthest ones of the other server


def test_the_next_turn_goes_to_the_server_that_sampled_the_last_one(network: Network) -> None:
    made = network(2)
    results = made.call(8, concurrency=4, turns=5)
    assert len(results) == 8 * 5
    for fake, own in zip(made.servers, (range(4), range(4, 8)), strict=True):
        assert sorted(fake.asked) == [index + TURN * turn for turn in range(5) for index in own]


def test_a_request_that_always_fails_ends_the_call(network: Network) -> None:
    made = network(2)

    async def generate(fake: FakeServer, index: int) -> Any:  # noqa: ARG001
        return httpx2.Response(500, json={"error": "boom"})

    made.generate = generate
    said = r"8 times without a usable answer; .*/generate answered 500: boom; raise engine.server.timeout"
    with pytest.raises(TrimtabError, match=said):
        made.call(1)
    assert sum(len(fake.asked) for fake in made.servers) == MAX_ATTEMPTS


def test_wrong_answers_are_asked_for_again_until_a_request_has_failed_too_often(network: Network) -> None:
    made = network(1)
    [fake] = made.servers

    async def generate(fake: FakeServer, index: int) -> Any:
        return None if fake.asked.count(index) == MAX_ATTEMPTS else httpx2.Response(200, content=b"[]")

    made.generate = generate
    assert made.call(3) == {i: CompletionResult([i], [RIGHT], "stop") for i in range(3)}
    assert fake.asked == [i for i in range(3) for _ in range(MAX_ATTEMPTS)]

    def disturb(fake: FakeServer, path: str) -> None:
        if path == "/model_info" and "/health" not in fake.paths[-2:]:
            raise WrongAnswer("odd")

    made.disturb = disturb  # the label is right in every check of the server and wrong before every request
    with pytest.raises(TrimtabError, match="8 times without a usable answer; odd; check the server's version"):
        made.call(1)


def test_a_refusal_ends_the_call_with_what_the_server_says(network: Network) -> None:
    made = network(2)

    async def generate(fake: FakeServer, index: int) -> Any:
        return httpx2.Response(400, json={"error": "too long"}) if index == 3 else await made.at_once(fake, index)

    made.generate = generate
    with pytest.raises(RequestRejected, match="answered 400: too long"):
        made.call(8)


def test_a_call_ends_if_all_servers_are_lost_and_the_next_one_checks_them_first(network: Network) -> None:
    made = network(2)

    def disturb(fake: FakeServer, path: str) -> None:  # noqa: ARG001
        if len(made.delivered) >= 5:
            raise httpx2.ConnectError("refused")

    made.disturb = disturb
    with pytest.raises(EngineDeadError, match=r"no inference server is left: .*refused"):
        made.call(8, reconnect_timeout=1e-9)
    assert 5 <= len(made.delivered) < 8
    with pytest.raises(EngineDeadError, match=r"no inference server is left: http://server0 is lost"):
        asyncio.run(load_weights([fake.server for fake in made.servers], Path("weights"), LABEL))
    made.disturb = lambda *_: None
    for fake in made.servers:
        fake.paths.clear()
    assert len(made.call(8)) == 8
    assert [fake.paths[0] for fake in made.servers] == ["/health"] * 2


def test_a_server_that_never_loads_its_weights_ends_the_call(network: Network) -> None:
    made = network(1)
    [fake] = made.servers
    fake.loads_weights = False
    fake.restart()
    said = r"8 times without .*its weights are 'default', not 'current'; give each server a separate URL"
    with pytest.raises(TrimtabError, match=said):
        made.call(4, concurrency=4)
    assert 0 < fake.paths.count("/update_weights_from_disk") <= MAX_ATTEMPTS
    assert fake.asked == []


class Aborts:
    """Servers that hold every request until the first one has received three aborts, none of which it answers."""

    def __init__(self, made: FakeNetwork) -> None:
        self.made, self.signal, self.arrived = made, threading.Event(), 0
        made.disturb, made.generate = self.disturb, self.generate

    def disturb(self, fake: FakeServer, path: str) -> None:
        if path == "/abort_request":
            self.arrived += fake is self.made.servers[0]
            raise httpx2.ReadTimeout("busy")

    async def generate(self, fake: FakeServer, index: int) -> str:  # noqa: ARG002
        if sum(len(server.asked) for server in self.made.servers) == 32:
            self.signal.set()
        while self.arrived < 3:
            await asyncio.sleep(0)
        return "abort"


def test_an_abort_is_repeated_until_all_requests_in_progress_are_answered(network: Network) -> None:
    made = network(2)
    aborts = Aborts(made)
    results = made.call(100, aborts.signal, concurrency=16)
    assert sorted(results) == [*range(16), *range(50, 66)]
    assert {result.finish for result in results.values()} == {"abort"}
    assert aborts.arrived >= 3
    assert sorted(made.servers[0].asked + made.servers[1].asked) == sorted(results)  # nothing is asked after the abort


def test_a_request_that_fails_after_the_abort_is_not_asked_again(network: Network) -> None:
    made, abort = network(1), threading.Event()

    async def generate(fake: FakeServer, index: int) -> None:  # noqa: ARG001
        abort.set()
        while "/abort_request" not in fake.paths:
            await asyncio.sleep(0)
        raise httpx2.ReadError("gone")

    made.generate = generate
    assert made.call(3, abort) == {}
    assert made.servers[0].asked == [0]
    assert made.call(3, abort) == {}  # an abort before the first request
    assert made.servers[0].asked == [0]


def test_a_connection_tells_processes_apart_over_real_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server closes a connection after two answers, without saying so. No proxy of the environment is used."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    closed = asyncio.Event()
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            status = b"307 Moved\r\nLocation: /x" if "GET /moved" in heads[-1] else b"200 OK"
            writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        closed.set()

    async def talk() -> list[Any]:
        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        connection = Connection(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", 5.0)
        streams = []
        for _ in range(2):
            assert await connection.call("/x") == b"{}"
            streams.append(connection.stream)
        await closed.wait()
        await connection.call("/x")
        streams.append(connection.stream)
        with pytest.raises(RequestRejected, match="answered 307"):
            await connection.call("/moved")
        assert connection.stream is None
        await connection.aclose()
        listener.close()
        return streams

    first, second, third = asyncio.run(talk())
    assert first is second
    assert third is not first
    assert len(heads) == 4  # the redirect is not followed
    assert "accept-encoding: identity" in heads[0].lower()


def test_connections_are_kept_alive_by_the_kernel() -> None:
    async def option() -> int:
        listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        connection = Connection(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", 5.0)
        options: list[int] = []

        async def trace(event: str, info: dict[str, Any]) -> None:
            if event == "connection.connect_tcp.complete":
                raw = info["return_value"].get_extra_info("socket")
                options.append(raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE))
                options.append(raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
                raise httpx2.ReadError("seen enough")

        with pytest.raises(httpx2.ReadError):
            await connection._client.get("/x", extensions={"trace": trace})
        await connection.aclose()
        listener.close()
        return options

    assert asyncio.run(option()) == [30, 1]


def test_a_late_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(request: httpx2.Request) -> httpx2.Response:  # noqa: ARG001
        return await asyncio.Future()

    monkeypatch.setattr(http_client, "open_transport", lambda: httpx2.MockTransport(never))
    with pytest.raises(ServerUnavailable, match=r"http://x/health: no answer within 0\.001 s"):
        asyncio.run(Connection("http://x", 0.001).call("/health"))


def test_a_call_runs_while_an_event_loop_runs_and_is_canceled_with_its_caller() -> None:
    async def answer() -> int:
        return 3

    async def notebook() -> int:
        return run(answer())

    assert asyncio.run(notebook()) == 3
    canceled = threading.Event()

    async def interrupted() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            await asyncio.Future()
        finally:
            canceled.set()

    with pytest.raises(KeyboardInterrupt):
        run(interrupted())
    assert canceled.is_set()
