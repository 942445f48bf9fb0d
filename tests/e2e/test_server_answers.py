"""Wrong answers of inference servers: real server processes over real sockets, both wire formats."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.server_process import ServerProcess, engine_over, starter

from trimtab.errors import EngineDeadError, TrimtabError, TrimtabWarning
from trimtab.trainer import tasks
from trimtab.trainer.engines.server.server_pool import MAX_WRONG_ANSWERS
from trimtab.trainer.models.load import LoadedModel, load
from trimtab.trainer.sft import laboratory_folder
from trimtab.types import Prompt, SamplingParams

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::trimtab.errors.TrimtabWarning")]

TASK = tasks.build("sort")
SAMPLING = SamplingParams(max_tokens=20, ignore_stop=True)
SEED = 11
SAMPLED = {"vllm": "/v1/completions", "sglang": "/generate"}


@pytest.fixture(scope="module")
def laboratory() -> LoadedModel:
    return load(str(laboratory_folder()), dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(laboratory: LoadedModel) -> list[Prompt]:
    return [tasks.encode(TASK, problem, laboratory.tokenizer) for problem in TASK.train[:2]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServerProcess]]:
    home = tmp_path_factory.mktemp("servers")
    with starter() as start:
        served = {kind: ServerProcess(start, kind, laboratory_folder(), home / kind) for kind in SAMPLED}
        yield served
        for one in served.values():
            one.kill()


@pytest.fixture(params=SAMPLED)
def server(both: dict[str, ServerProcess], request: pytest.FixtureRequest) -> ServerProcess:
    both[request.param].reset()
    return both[request.param]


def one_line(error: BaseException) -> str:
    message = str(error)
    assert type(error) is TrimtabError
    assert len(message.splitlines()) == 1
    assert len(message) < 1000
    return message


def message_of_a_call(laboratory: LoadedModel, server: ServerProcess, prompts: list[Prompt], **sampling: Any) -> str:
    """What ends a call in which every answer is wrong."""
    engine = engine_over(laboratory, [server], concurrency=1)
    with pytest.raises(TrimtabError) as raised:
        engine.generate(prompts[:1], 1, replace(SAMPLING, **sampling), seed=SEED)
    message = one_line(raised.value)
    assert f"{MAX_WRONG_ANSWERS} wrong answers in a row" in message
    return message


IDS, LOGP = [3, 4], [-0.5, -0.25]


def vllm(ids: Any = IDS, logp: Any = LOGP, finish: Any = "stop", **choice: Any) -> dict[str, Any]:
    return {"token_ids": ids, "logprobs": {"token_logprobs": logp}, "finish_reason": finish} | choice


def sglang(ids: Any = IDS, logp: Any = LOGP, finish: Any = "stop", **info: Any) -> dict[str, Any]:
    triples = [[one, i, None] for i, one in zip(ids, logp, strict=False)]
    return {"finish_reason": {"type": finish}, "completion_tokens": len(ids), "output_token_logprobs": triples} | info


BODIES = {
    "empty": ("", "EOF"),
    "truncated": ('{"choices": [{"token_ids"', "EOF"),
    "array": ("[]", "should be an object, got []"),
    "nothing": ("{}", "Field required, got {}"),
    "error": ('{"error": "\\n\\u001b[31m"}', r"Field required, got {'error': '\n\x1b[31m'}"),
    "latin-1": ('{"text": "\xe9"}', "invalid unicode"),
    "deep": ("[" * 100_000, "recursion limit"),
    "long-number": ('{"text": ' + "9" * 100_000 + "}", "number out of range"),
}
# Of either kind: a choice of vLLM, or the `meta_info` of SGLang.
RESULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no-tokens": ({"ids": [], "logp": []}, "without tokens"),
    "negative-id": ({"ids": [3, -1]}, "greater than or equal to 0, got -1"),
    "id-beyond": ({"ids": [3, 10**9]}, "token 1000000000, beyond the vocabulary of"),
    "long-id": ({"ids": [3, 10**40]}, "beyond the vocabulary of"),
    "bool-id": ({"ids": [True, 4]}, "valid integer, got True"),
    "text-id": ({"ids": ["3", 4]}, "valid integer, got '3'"),
    "text-logp": ({"logp": ["-0.5", -0.25]}, "valid number, got '-0.5'"),
    "bool-logp": ({"logp": [False, -0.25]}, "valid number, got False"),
    "null-logp": ({"logp": [-0.5, None]}, "valid number, got None"),
    "nan-logp": ({"logp": [float("nan"), -0.25]}, "finite number, got nan"),
    "placeholder": ({"logp": [-9999.0, -0.25]}, "greater than -9999, got -9999.0"),
    "positive-logp": ({"logp": [-0.5, 2.0]}, "less than or equal to 0.001, got 2.0"),
    "zeros": ({"ids": [3] * 8, "logp": [0.0] * 8}, "log-prob 0 for all 8 tokens, sampled at temperature 1"),
    "tiny": (
        {"ids": [3] * 8, "logp": [-1e-9, -2e-9] * 4},
        "log-prob -1e-09 for all 8 tokens, sampled at temperature 1",
    ),
    "constant": ({"ids": [3] * 8, "logp": [-0.5] * 8}, "log-prob -0.5 for all 8 tokens, sampled at temperature 1"),
    "absurd": ({"logp": [-9998.0, -0.25]}, "log-prob -9998 for a token that it sampled, which no such token has"),
    "too-many": ({"ids": [3] * 200, "logp": [-0.5] * 200}, "returned 200 tokens, asked for 20"),
    "odd-finish": ({"finish": "error"}, "'stop', 'length' or 'abort', got 'error'"),
}
OF_A_KIND: dict[str, list[tuple[str, Any, str]]] = {
    "vllm": [
        ("no-choices", {"choices": []}, "choices.0: Field required"),
        ("null-choices", {"choices": None}, "choices: Input should be a valid array, got None"),
        ("two-choices", {"choices": [vllm(), vllm()]}, "at most 1 item"),
        ("no-ids", {"choices": [vllm(token_ids=None)]}, "token_ids: Input should be a valid array, got None"),
        ("no-logprobs", {"choices": [vllm(logprobs=None)]}, "logprobs: Input should be an object, got None"),
        ("text-ids", {"choices": [vllm(ids="3 4")]}, "token_ids: Input should be a valid array, got '3 4'"),
        ("fewer-logps", {"choices": [vllm(logp=[-0.5])]}, "returned 2 tokens with 1 log-probs"),
    ],
    "sglang": [
        ("null-info", {"meta_info": None}, "meta_info: Input should be an object, got None"),
        ("null-list", {"meta_info": sglang(output_token_logprobs=None)}, "valid array, got None"),
        ("short-triple", {"meta_info": sglang(output_token_logprobs=[[-0.5]])}, "Field required"),
        ("text-count", {"meta_info": sglang(completion_tokens="2")}, "valid integer, got '2'"),
        ("other-count", {"meta_info": sglang(completion_tokens=3)}, "wrote 3 tokens and returned log-probs for 2"),
        ("text-finish", {"meta_info": sglang(finish_reason="stop")}, "finish_reason: Input should be an object"),
    ],
}


def wrong_answers() -> Iterator[Any]:
    for kind in SAMPLED:
        for name, (body, said) in BODIES.items():
            yield pytest.param(kind, body, said, id=f"{kind}-{name}")
        for name, (result, said) in RESULTS.items():
            answer = {"choices": [vllm(**result)]} if kind == "vllm" else {"meta_info": sglang(**result)}
            yield pytest.param(kind, json.dumps(answer), said, id=f"{kind}-{name}")
        for name, answer, said in OF_A_KIND[kind]:
            yield pytest.param(kind, json.dumps(answer), said, id=f"{kind}-{name}")


@pytest.mark.parametrize(("kind", "body", "said"), [*wrong_answers()])
def test_a_wrong_answer_is_one_line_and_a_request_sent_again(
    laboratory: LoadedModel,
    both: dict[str, ServerProcess],
    prompts: list[Prompt],
    kind: str,
    body: str,
    said: str,
) -> None:
    both[kind].configure(replies={SAMPLED[kind]: {"body": body}})
    message = message_of_a_call(laboratory, both[kind], prompts)
    assert message.startswith(both[kind].url)
    assert said in message


def test_one_wrong_answer_of_five_is_said_and_not_trained_on(
    laboratory: LoadedModel, server: ServerProcess, prompts: list[Prompt]
) -> None:
    engine = engine_over(laboratory, [server], concurrency=1)
    right = engine.generate(prompts, 4, SAMPLING, seed=SEED)
    server.reset()
    server.configure(logp=2.0, every=5)
    with pytest.warns(TrimtabWarning, match=r"less than or equal to 0\.001, got 2\.0; the request is sent again"):
        again = engine.generate(prompts, 4, SAMPLING, seed=SEED)
    assert len(server.logged("answered")) == 2 * 4 + 1  # the fifth of nine was wrong
    for one, other in zip(np.ravel(right), np.ravel(again), strict=True):
        np.testing.assert_array_equal(one.logp_behavior, other.logp_behavior)


def test_log_probs_of_0_are_possible(laboratory: LoadedModel, server: ServerProcess, prompts: list[Prompt]) -> None:
    """At temperature 0, for a few tokens, and as a result of rounding."""
    engine = engine_over(laboratory, [server])
    for logp, changes in ((0.0, {"temperature": 0.0}), (0.0, {"max_tokens": 7}), (1e-6, {"max_tokens": 7})):
        server.configure(logp=logp)
        [[one]] = engine.generate(prompts[:1], 1, replace(SAMPLING, **changes), seed=SEED)
        assert one.logp_behavior.tolist() == [np.float32(logp)] * len(one.response_ids)


def test_an_answer_without_end_is_not_read(
    laboratory: LoadedModel, server: ServerProcess, prompts: list[Prompt]
) -> None:
    """Each of five answers is read up to its bound, 1 MiB and some bytes for each token."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    server.configure(replies={SAMPLED[server.kind]: {"body": " " * 65_536, "endless": True}})
    assert "answered with more than" in message_of_a_call(laboratory, server, prompts)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10 << 10


def test_a_compressed_answer_is_refused(laboratory: LoadedModel, server: ServerProcess, prompts: list[Prompt]) -> None:
    server.configure(replies={SAMPLED[server.kind]: {"body": "{}", "encoding": "gzip"}})
    assert "Content-Encoding 'gzip', which was not asked for" in message_of_a_call(laboratory, server, prompts)


LONG = "name\n" * 1000
MODELS = [
    ("vllm", "/v1/models", "[]", "should be an object"),
    ("vllm", "/v1/models", "{}", "data: Field required"),
    ("vllm", "/v1/models", '{"data": null}', "data: Input should be a valid array"),
    ("vllm", "/v1/models", '{"data": [{}]}', "data.0.id: Field required"),
    ("vllm", "/v1/models", '{"data": [{"id": 3}]}', "data.0.id: Input should be a valid string, got 3"),
    ("vllm", "/v1/models", '{"data": [{"id": "m", "max_model_len": -1}]}', "greater than 0, got -1"),
    ("vllm", "/v1/models", '{"data": [{"id": "m", "max_model_len": "64"}]}', "valid integer, got '64'"),
    ("vllm", "/v1/models", json.dumps({"data": [{"id": LONG}]}), "at most 1000 characters"),
    ("vllm", "/v1/models", '{"data": [{"id": "\\u001b[31m"}]}', "should match pattern"),
    ("vllm", "/v1/models", '{"data": [{"id": "a\\u2028b"}]}', "should match pattern"),
    ("vllm", "/v1/models", "[" * 100_000, "recursion limit"),
    ("vllm", "/weight_info", "{}", "weight_version: Field required"),
    ("vllm", "/weight_info", '{"weight_version": 3}', "valid string, got 3"),
    ("sglang", "/model_info", "", "EOF"),
    ("sglang", "/model_info", '{"weight_version": "default"}', "tokenizer_path: Field required"),
    ("sglang", "/model_info", '{"tokenizer_path": null, "weight_version": "default"}', "valid string, got None"),
    ("sglang", "/model_info", '{"tokenizer_path": "m", "weight_version": []}', "valid string, got []"),
]


@pytest.mark.parametrize(("kind", "path", "body", "said"), MODELS)
def test_a_wrong_answer_about_the_model_is_one_line(
    laboratory: LoadedModel, both: dict[str, ServerProcess], kind: str, path: str, body: str, said: str
) -> None:
    both[kind].configure(replies={path: {"body": body}})
    with pytest.raises(TrimtabError) as raised:
        engine_over(laboratory, [both[kind]], reconnect_timeout=0.01)
    message = one_line(raised.value)
    assert f"{path} gave a wrong answer: " in message
    assert said in message


@pytest.mark.parametrize(
    ("kind", "path", "body", "said"),
    [
        ("vllm", "/reset_prefix_cache", "{}", "success: Field required"),
        ("vllm", "/reset_prefix_cache", '{"success": 1}', "success: Input should be a valid boolean, got 1"),
        ("sglang", "/update_weights_from_disk", "null", "should be an object, got None"),
        ("sglang", "/update_weights_from_disk", '{"success": "yes"}', "success: Input should be a valid boolean"),
        ("sglang", "/update_weights_from_disk", json.dumps({"success": False, "message": LONG}), "(name name name"),
    ],
)
def test_a_wrong_answer_to_new_weights_is_one_line(
    laboratory: LoadedModel, both: dict[str, ServerProcess], kind: str, path: str, body: str, said: str
) -> None:
    both[kind].reset()
    engine = engine_over(laboratory, [both[kind]])
    both[kind].configure(replies={path: {"body": body}})
    with pytest.raises(TrimtabError) as raised:
        engine.update_weights(laboratory.model.named_parameters(), 1)
    assert isinstance(raised.value, EngineDeadError) == ('"message"' not in body)
    assert len(str(raised.value)) < 1000
    assert "\n" not in str(raised.value)
    assert said in str(raised.value)
