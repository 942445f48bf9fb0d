"""The parts of the server engine that need no server: protocols, completions and the weight folder."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.support.engines import EOS, PIECES, prompt, tokenizer
from tests.support.turns import ScriptedTurns

from trimtab.errors import TrimtabError
from trimtab.trainer.config.consistency import address_problem
from trimtab.trainer.config.rollout_sections import ServerConfig
from trimtab.trainer.engines.decoding_rows import GenerateCall
from trimtab.trainer.engines.request import EngineModel, request_seed
from trimtab.trainer.engines.server import http_client
from trimtab.trainer.engines.server.http_client import (
    Connection,
    RequestRejected,
    ServerUnavailable,
    WrongAnswer,
)
from trimtab.trainer.engines.server.request_dispatch import RequestDispatch
from trimtab.trainer.engines.server.server_engine import CallResponses
from trimtab.trainer.engines.server.server_protocol import CompletionRequest, CompletionResult, Model, check_result
from trimtab.trainer.engines.server.sglang_protocol import SglangProtocol
from trimtab.trainer.engines.server.vllm_protocol import VllmProtocol
from trimtab.types import AbortSignal, Completion, Prompt, SamplingParams

SAMPLING = SamplingParams(max_tokens=6, stop=("ab",))
ASK = CompletionRequest(ids=(3, 4), max_tokens=4, seed=(1 << 62) + 5, sampling=SAMPLING, stop_ids=(EOS,))
MODEL = Model("m", 64)


@pytest.mark.parametrize(
    ("tokens", "temperature", "possible"),
    [(7, 1, True), (8, 1, False), (13, 0.6, True), (14, 0.6, False), (7, 2, True), (8, 2, False), (50, 0, True)],
)
def test_how_many_log_probs_of_0_are_possible(tokens: int, temperature: float, possible: bool) -> None:
    """Eight tokens at temperature 1 or above, and as many more as the temperature is lower: 8 / 0.6 = 13.3."""
    request = replace(ASK, max_tokens=99, sampling=SamplingParams(temperature=temperature))
    ids, zeros = [5] * tokens, [0.0] * tokens
    with nullcontext() if possible else pytest.raises(WrongAnswer, match=f"log-prob 0 for all {tokens} tokens"):
        check_result("http://x", CompletionResult(ids, zeros, "length"), request, 6)
    check_result("http://x", CompletionResult(ids, [*zeros[1:], -1e-7], "length"), request, 6)
    one_of_one = replace(request, sampling=replace(request.sampling, top_k=1))
    check_result("http://x", CompletionResult(ids, zeros, "length"), one_of_one, 6)


@pytest.mark.parametrize(
    ("logp", "possible"),
    [
        ([-0.5] * 7, True),
        ([-0.5] * 8, False),
        ([-1e-9, -2e-9] * 4, False),
        ([-7.0] * 8, False),
        ([-math.log(6)] * 20, True),  # all six ids are as probable, as before any training
        # Nearly certain in float32: such values are 0 or sums of 2^-24.
        ([0.0, -(2.0**-24)] * 10, True),
        ([-3e-5, -4e-5] * 10, True),
        ([-51.0, -0.5], True),
        ([-52.0, -0.5], False),  # 50 + log 6 = 51.8
        ([-9998.0] * 3, False),
    ],
)
def test_log_probs_that_carry_no_information(logp: list[float], possible: bool) -> None:
    result = CompletionResult([5] * len(logp), logp, "length")
    with nullcontext() if possible else pytest.raises(WrongAnswer, match="returned log-prob"):
        check_result("http://x", result, replace(ASK, max_tokens=99), 6)


def test_what_may_be_improbable() -> None:
    """A given token, and one sampled at a high temperature, which shows log-probs from before it."""
    result = CompletionResult([3, 4], [-80.0, -0.5], "length")
    check_result("http://x", result, replace(ASK, ids=(3, 4), max_tokens=2, scored=2), 6)
    check_result("http://x", result, replace(ASK, sampling=SamplingParams(temperature=1e4)), 6)


def test_results_that_no_server_can_have_sampled() -> None:
    for result, said in (
        (CompletionResult([5, 5], [-0.5], "stop"), "returned 2 tokens with 1 log-probs"),
        (CompletionResult([5] * 5, [-0.5] * 5, "stop"), "returned 5 tokens, asked for 4"),
        (CompletionResult([5, 6], [-0.5] * 2, "stop"), "returned token 6, beyond the vocabulary of 6"),
        (CompletionResult([], [], "length"), "returned a response without tokens"),
    ):
        with pytest.raises(WrongAnswer, match=said):
            check_result("http://x", result, ASK, 6)
    check_result("http://x", CompletionResult([], [], "abort"), ASK, 6)
    check_result("http://x", CompletionResult([5] * 4, [-0.5] * 4, "length"), ASK, 6)


class Answers(RequestDispatch):
    """Answers requests in order, remembers them, and aborts the call when there is no answer left."""

    def __init__(self, *answers: CompletionResult, aborts_waits: bool = False) -> None:
        super().__init__([], None, ServerConfig(kind="vllm"), lambda _: None)
        self.asked: list[CompletionRequest] = []
        self._answers = list(answers)
        self._aborts_waits = aborts_waits

    async def run(self, responses: Sequence[Coroutine[Any, Any, Any]], abort: AbortSignal | None) -> list[Any]:
        del abort
        return await asyncio.gather(*responses)

    async def ask(self, response: int, request: CompletionRequest) -> CompletionResult | None:
        del response
        self.aborted = not self._answers
        if self.aborted:
            return None
        self.asked.append(request)
        self.aborted = self._aborts_waits
        return self._answers.pop(0)


def call(
    dispatch: Answers,
    prompts: list[Prompt],
    sampling: SamplingParams = SAMPLING,
    prefixes: list[list[Completion]] | None = None,
    turns: ScriptedTurns | None = None,
) -> list[Completion]:
    model = EngineModel(tokenizer(), frozenset({EOS}), len(PIECES), context=None)
    asked = GenerateCall.begin(model, 9, prompts, 1, sampling, 3, prefixes, turns)
    asyncio.run(CallResponses(asked, dispatch).sample(None))
    return [one for [one] in asked.completions()]


def finished(answer: CompletionResult, prefix: Completion | None = None) -> Completion:
    return call(Answers(answer), [prompt([2])], SAMPLING, None if prefix is None else [[prefix]])[0]


def ids(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


def test_a_stop_that_begins_in_the_prefix_ends_the_response() -> None:
    """The server takes the prefix for a part of the prompt and goes on; its later tokens were never needed."""
    old = Completion(np.array(ids("c", "a")), np.float32([-1, -2]), np.array([4, 4]), "abort", "ca")
    one = finished(CompletionResult(ids("b", "c", "c"), [-0.1, -0.2, -0.3], "length"), old)
    assert one.response_ids.tolist() == ids("c", "a", "b")
    np.testing.assert_array_equal(one.logp_behavior, np.float32([-1, -2, -0.1]))
    assert one.policy_version.tolist() == [4, 4, 9]
    assert (one.finish_reason, one.text, one.entropy) == ("stop", "c", None)


def test_how_a_response_ended() -> None:
    def ended(pieces: list[str], finish: Any) -> tuple[str, int]:
        one = finished(CompletionResult(ids(*pieces), [-0.5] * len(pieces), finish))
        return one.finish_reason, len(one.response_ids)

    assert ended(["c", "<eos>"], "stop") == ("stop", 2)
    assert ended(["c"] * 6, "length") == ("length", 6)
    assert ended(["c"] * 5 + ["ab"], "length") == ("stop", 6)  # a stop in the last token is a stop
    assert ended(["c", "c"], "abort") == ("abort", 2)
    assert ended(["c"] * 6, "abort") == ("length", 6)  # there was nothing left to end
    assert ended(["c", "c"], "stop") == ("stop", 2)  # an end that only the server knows
    assert finished(CompletionResult([], [], "abort")).finish_reason == "abort"


TURNS = SamplingParams(max_tokens=30, stop=("ab",))


def test_the_next_turn_is_a_request_with_all_ids_so_far() -> None:
    """What comes back is that of every engine: tests/contract/test_every_engine.py."""
    handler = ScriptedTurns(30, late={0: 1}, max_turn_tokens=5)
    answers = Answers(
        CompletionResult(ids("c", "ab"), [-0.5, -0.25], "stop"), CompletionResult(ids("c") * 5, [-1.0] * 5, "length")
    )
    [one] = call(answers, [prompt([2, 3])], TURNS, turns=handler)
    first, second = answers.asked
    assert (first.ids, first.max_tokens) == ((2, 3), 5)
    observation = second.ids[4:]
    assert second.ids[:4] == (2, 3, *ids("c", "ab"))
    assert observation
    assert second.max_tokens == 5
    assert second.seed == request_seed(3, 0, 0, 2 + len(observation))
    assert one.response_ids.tolist() == [*ids("c", "ab"), *observation, *ids("c") * 5]


@pytest.mark.parametrize(
    ("pieces", "finish", "rest"),
    [
        (["c", "ab"], "stop", None),  # the turn had ended, and its result was not known
        (["c", "a"], "abort", CompletionResult(ids("b"), [-0.5], "length")),  # completes a stop that had begun
    ],
)
def test_an_aborted_turn_goes_on_and_one_that_had_ended_is_handled_first(
    pieces: list[str], finish: Any, rest: CompletionResult | None
) -> None:
    handler = ScriptedTurns(30, late={0: 10**9})
    answer = CompletionResult(ids(*pieces), [-0.5] * 2, finish)
    [begun] = call(Answers(answer, aborts_waits=True), [prompt([2])], TURNS, turns=handler)
    assert (begun.finish_reason, begun.response_ids.tolist()) == ("abort", ids(*pieces))
    handler._late = {}
    answers = Answers(*filter(None, [rest]), CompletionResult(ids("c"), [-0.5], "abort"))
    call(answers, [prompt([2])], TURNS, [[begun]], turns=handler)
    requests = [request.ids for request in answers.asked]
    assert requests[0][:3] == (2, *ids(*pieces))
    if rest:
        assert requests.pop(0) == (2, *ids(*pieces))
    [continued] = requests
    whole = (2, *ids(*pieces), *(rest.ids if rest else ()))
    assert continued[: len(whole)] == whole
    assert len(continued) > len(whole)  # the observation
    assert handler.submitted == {(0, 0): 1 if rest else 2}


def test_seeds_are_of_a_response_and_another_one_for_its_rest() -> None:
    keys = [(seed, p, s, begun) for seed in (0, 1) for p in range(3) for s in range(3) for begun in (0, 1, 2)]
    seeds = [request_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert seeds == [request_seed(*key) for key in keys]


NO_URLS = ("127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://x/v1", "http://x?y", "http://x:99999")
NO_HOSTS = ("http://x:65536", "http://x:0", "http://x:-1", "x:1", "http://[::1", "http://x y")


def test_a_url_that_is_none() -> None:
    for url in (*NO_URLS, *NO_HOSTS):
        assert "not the base URL of a server" in (address_problem("urls", url, "") or ""), url
    assert address_problem("urls", "https://host:8000/", "") is None
    with pytest.raises(TrimtabError, match="not the base URL of a server"):
        Connection("http://256.1.1.1", 5.0)


def test_credentials_belong_into_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.headers.get("Authorization"))
        return httpx2.Response(401 if asked[-1] is None else 200)

    monkeypatch.setattr(http_client, "open_transport", lambda: httpx2.MockTransport(answer))
    with pytest.raises(RequestRejected, match="answered 401"):
        asyncio.run(Connection("http://server", 5.0).call("/health"))
    monkeypatch.setenv("TRIMTAB_SERVER_AUTHORIZATION", " Bearer key ")
    asyncio.run(Connection("http://server", 5.0).call("/health"))
    assert asked == [None, "Bearer key"]
    monkeypatch.setenv("TRIMTAB_SERVER_AUTHORIZATION", "Bearer hunter2\r\nHost: x")
    with pytest.raises(TrimtabError, match="characters that a header cannot have") as refused:
        Connection("http://server", 5.0)
    assert "hunter2" not in str(refused.value)


class Scripted:
    """Answers every request with the result of its path, and remembers what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.results: dict[str, tuple[int, Any]] = {}
        self.asked: list[tuple[str, Any]] = []
        monkeypatch.setattr(http_client, "open_transport", lambda: httpx2.MockTransport(self.answer))
        self.connection = Connection("http://server", 5.0)

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.raw_path.decode()
        self.asked.append((path, json.loads(request.content) if request.content else None))
        status, body = self.results[path]
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx2.Response(status, content=content)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return Scripted(monkeypatch)


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (400, {"error": {"message": "too\nlong", "code": 400}}, RequestRejected, "answered 400: too long"),
        (404, {"detail": "Not Found"}, RequestRejected, "answered 404: Not Found"),
        (500, b"<html>", RequestRejected, "answered 500: <html>"),
        (503, {"detail": "starting"}, ServerUnavailable, "answered 503: starting"),
        (429, {}, ServerUnavailable, "answered 429"),
        (500, b"[" * 100_000, RequestRejected, r"answered 500: \[{300}$"),
        (500, {"error": {"message": "x" * 1000}}, RequestRejected, "answered 500: x{300}$"),
    ],
)
def test_errors_are_distinguished(scripted: Scripted, status: int, body: Any, kind: type[Exception], said: str) -> None:
    scripted.results["/x"] = (status, body)
    with pytest.raises(kind, match=said):
        asyncio.run(scripted.connection.call("/x", {}))


def vllm_reply(**changes: Any) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.25, -0.5]}}
    return {"choices": [choice | changes]}


def test_what_vllm_is_asked_and_how_it_is_read(scripted: Scripted) -> None:
    scripted.results["/v1/completions"] = (200, vllm_reply())
    answer = asyncio.run(VllmProtocol(None).request(scripted.connection, ASK, MODEL))
    assert answer == CompletionResult([5, 6], [-0.25, -0.5], "stop")
    [(_, body)] = scripted.asked
    assert body["prompt"] == [3, 4]
    assert (body["max_tokens"], body["seed"], body["stop"], body["stop_token_ids"]) == (4, ASK.seed, ["ab"], [EOS])
    # Whatever the model's generation config says, the distribution is the one that was asked for.
    assert [body[k] for k in ("top_p", "top_k", "min_p", "repetition_penalty")] == [1.0, 0, 0.0, 1.0]
    assert (body["logprobs"], body["return_token_ids"], body["skip_special_tokens"]) == (0, True, False)
    forced = CompletionRequest((3,), 4, 1, SamplingParams(ignore_stop=True, stop=("ab",)), ())
    asyncio.run(VllmProtocol(None).request(scripted.connection, forced, MODEL))
    assert (scripted.asked[1][1]["ignore_eos"], scripted.asked[1][1]["stop"]) == (True, [])


def test_a_server_without_the_routes_says_how_to_start_it(scripted: Scripted, tmp_path: Path) -> None:
    scripted.results |= {path: (404, {"detail": "Not Found"}) for path in ("/weight_info", "/pause?mode=abort")}
    connection = scripted.connection
    for call in (
        lambda: VllmProtocol(None).label(connection),
        lambda: VllmProtocol(None).load(connection, tmp_path, "l"),
    ):
        with pytest.raises(TrimtabError, match="VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls"):
            asyncio.run(call())


def test_a_parameter_that_vllm_did_not_load_is_an_error(scripted: Scripted, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    done = ("/pause?mode=abort", "/update_weight_version", "/resume")
    scripted.results |= {path: (200, {}) for path in done} | {"/reset_prefix_cache": (200, {"success": True})}
    for results in ([[], []], [[], ["layers.0.bias"]]):  # of two workers, as its api_router.py answers
        scripted.results["/collective_rpc"] = (200, {"results": results})
        with pytest.raises(TrimtabError, match=r"layers\.0\.bias") if any(results) else nullcontext():
            asyncio.run(VllmProtocol(None).load(scripted.connection, tmp_path, "l"))
    asked = [path for path, _ in scripted.asked]
    assert (asked.count("/update_weight_version"), asked.count("/resume")) == (1, 2)


def test_the_served_name_is_found_or_asked_for(scripted: Scripted) -> None:
    cards = [{"id": "base", "max_model_len": 512}, {"id": "other", "max_model_len": 128}]
    scripted.results["/v1/models"] = (200, {"data": cards})
    connection = scripted.connection
    assert asyncio.run(VllmProtocol(None).model(connection)) == Model("base", 512)
    assert asyncio.run(VllmProtocol("other").model(connection)) == Model("other", 128)
    with pytest.raises(TrimtabError, match=r"serves base, other, not 'else': set engine\.server\.model"):
        asyncio.run(VllmProtocol("else").model(connection))


def sglang_reply(**changes: Any) -> dict[str, Any]:
    triples = [[-0.25, 5, None], [-0.5, 6, None]]
    info = {"finish_reason": {"type": "stop", "matched": 1}, "completion_tokens": 2, "output_token_logprobs": triples}
    return {"text": "", "output_ids": [5, 6], "meta_info": info | changes}


def test_what_sglang_is_asked_and_how_it_is_read(scripted: Scripted) -> None:
    protocol, request = SglangProtocol(), lambda: asyncio.run(protocol.request(scripted.connection, ASK, MODEL))
    scripted.results["/generate"] = (200, sglang_reply())
    assert request() == CompletionResult([5, 6], [-0.25, -0.5], "stop")
    [(_, body)] = scripted.asked
    params = body["sampling_params"]
    assert (body["input_ids"], body["return_logprob"]) == ([3, 4], True)
    assert (params["max_new_tokens"], params["sampling_seed"], params["stop"]) == (4, 5, ["ab"])  # 31 bits of the seed
    assert (params["no_stop_trim"], params["top_k"], params["repetition_penalty"]) == (True, -1, 1.0)
    # Aborted before it began: neither tokens nor log-probs.
    early = {"finish_reason": {"type": "abort", "message": "Abort before prefill"}, "completion_tokens": 0}
    scripted.results["/generate"] = (200, {"text": "", "meta_info": early})
    assert request() == CompletionResult([], [], "abort")
    crashed = {"finish_reason": {"type": "abort", "status_code": 503, "message": "scheduler"}}
    scripted.results["/generate"] = (200, sglang_reply(**crashed))
    with pytest.raises(ServerUnavailable, match="gave up: scheduler"):
        request()


def test_sglang_says_why_it_did_not_take_weights(scripted: Scripted, tmp_path: Path) -> None:
    for status in (200, 400):  # it answers 400; a proxy may not
        scripted.results["/update_weights_from_disk"] = (status, {"success": False, "message": "no such folder"})
        with pytest.raises(TrimtabError, match=r"no such folder.*engine\.server\.folder"):
            asyncio.run(SglangProtocol().load(scripted.connection, tmp_path, "label"))
    assert scripted.asked[0][1]["weight_version"] == "label"
    assert scripted.asked[0][1]["flush_cache"] is True
