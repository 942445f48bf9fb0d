"""Wrong answers of inference servers: real server processes over real sockets, both wire formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.server_process import ServerProcess, engine_over, starter

from trimtab.errors import EngineDeadError, TrimtabError, TrimtabWarning
from trimtab.trainer.engines.server.request_dispatch import MAX_ATTEMPTS
from trimtab.trainer.models.load import LoadedModel
from trimtab.trainer.sft import laboratory_folder
from trimtab.types import Prompt, SamplingParams

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::trimtab.errors.TrimtabWarning")]

SAMPLING = SamplingParams(max_tokens=20, ignore_stop=True)
SEED = 11
SAMPLED = {"vllm": "/v1/completions", "sglang": "/generate"}


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
    assert f"{MAX_ATTEMPTS} times without a usable answer; {server.url}" in message
    return message


IDS, LOGP = [3, 4], [-0.5, -0.25]


def vllm(ids: Any = IDS, logp: Any = LOGP, finish: Any = "stop", **choice: Any) -> dict[str, Any]:
    return {"token_ids": ids, "logprobs": {"token_logprobs": logp}, "finish_reason": finish} | choice


def sglang(ids: Any = IDS, logp: Any = LOGP, finish: Any = "stop", **info: Any) -> dict[str, Any]:
    triples = [[one, i, None] for i, one in zip(ids, logp, strict=False)]
    return {"finish_reason": {"type": finish}, "completion_tokens": len(ids), "output_token_logprobs": triples} | info


BODIES = {
    "empty": "",
    "truncated": '{"choices": [{"token_ids"',
    "array": "[]",
    "nothing": "{}",
    "error": '{"error": "\\n\\u001b[31m"}',
    "latin-1": '{"text": "\xe9"}',
    "deep": "[" * 100_000,
    "long-number": '{"text": ' + "9" * 100_000 + "}",
}
# Of either kind: a choice of vLLM, or the `meta_info` of SGLang. What else cannot be right: test_server_parts.py.
RESULTS: dict[str, dict[str, Any]] = {
    "negative-id": {"ids": [3, -1]},
    "long-id": {"ids": [3, 10**40]},
    "bool-id": {"ids": [True, 4]},
    "text-id": {"ids": ["3", 4]},
    "text-logp": {"logp": ["-0.5", -0.25]},
    "bool-logp": {"logp": [False, -0.25]},
    "null-logp": {"logp": [-0.5, None]},
    "nan-logp": {"logp": [float("nan"), -0.25]},
    "placeholder": {"logp": [-9999.0, -0.25]},
    "positive-logp": {"logp": [-0.5, 2.0]},
    "odd-finish": {"finish": "error"},
}
OF_A_KIND: dict[str, dict[str, Any]] = {
    "vllm": {
        "no-choices": {"choices": []},
        "null-choices": {"choices": None},
        "two-choices": {"choices": [vllm(), vllm()]},
        "no-ids": {"choices": [vllm(token_ids=None)]},
        "no-logprobs": {"choices": [vllm(logprobs=None)]},
        "text-ids": {"choices": [vllm(ids="3 4")]},
        "fewer-logps": {"choices": [vllm(logp=[-0.5])]},
    },
    "sglang": {
        "null-info": {"meta_info": None},
        "null-list": {"meta_info": sglang(output_token_logprobs=None)},
        "short-triple": {"meta_info": sglang(output_token_logprobs=[[-0.5]])},
        "text-count": {"meta_info": sglang(completion_tokens="2")},
        "other-count": {"meta_info": sglang(completion_tokens=3)},
        "text-finish": {"meta_info": sglang(finish_reason="stop")},
    },
}


def wrong_answers() -> Iterator[Any]:
    for kind in SAMPLED:
        of_either = {
            name: {"choices": [vllm(**result)]} if kind == "vllm" else {"meta_info": sglang(**result)}
            for name, result in RESULTS.items()
        }
        answers = {name: json.dumps(answer) for name, answer in (of_either | OF_A_KIND[kind]).items()}
        for name, body in (BODIES | answers).items():
            yield pytest.param(kind, body, id=f"{kind}-{name}")


@pytest.mark.parametrize(("kind", "body"), [*wrong_answers()])
def test_a_wrong_answer_is_one_line_and_a_request_sent_again(
    laboratory: LoadedModel, both: dict[str, ServerProcess], prompts: list[Prompt], kind: str, body: str
) -> None:
    both[kind].configure(replies={SAMPLED[kind]: {"body": body}})
    message_of_a_call(laboratory, both[kind], prompts)


def test_one_wrong_answer_of_five_is_said_and_not_trained_on(
    laboratory: LoadedModel, server: ServerProcess, prompts: list[Prompt]
) -> None:
    engine = engine_over(laboratory, [server], concurrency=1)
    right = engine.generate(prompts[:2], 4, SAMPLING, seed=SEED)
    server.reset()
    server.configure(logp=2.0, every=5)
    with pytest.warns(TrimtabWarning, match=r"less than or equal to 0\.001, got 2\.0; the request is sent again"):
        again = engine.generate(prompts[:2], 4, SAMPLING, seed=SEED)
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


LONG = "name\n" * 1000
MODELS = [
    *(
        ("vllm", "/v1/models", body)
        for body in ("[]", "{}", '{"data": null}', '{"data": [{}]}', '{"data": [{"id": 3}]}')
    ),
    ("vllm", "/v1/models", '{"data": [{"id": "m", "max_model_len": -1}]}'),
    ("vllm", "/v1/models", '{"data": [{"id": "m", "max_model_len": "64"}]}'),
    ("vllm", "/v1/models", json.dumps({"data": [{"id": LONG}]})),
    ("vllm", "/v1/models", '{"data": [{"id": "\\u001b[31m"}]}'),
    ("vllm", "/v1/models", '{"data": [{"id": "a\\u2028b"}]}'),
    ("vllm", "/v1/models", "[" * 100_000),
    *(("vllm", "/weight_info", body) for body in ("{}", '{"weight_version": 3}')),
    ("sglang", "/model_info", ""),
    ("sglang", "/model_info", '{"weight_version": "default"}'),
    ("sglang", "/model_info", '{"tokenizer_path": null, "weight_version": "default"}'),
    ("sglang", "/model_info", '{"tokenizer_path": "m", "weight_version": []}'),
]


@pytest.mark.parametrize(("kind", "path", "body"), MODELS)
def test_a_wrong_answer_about_the_model_is_one_line(
    laboratory: LoadedModel, both: dict[str, ServerProcess], kind: str, path: str, body: str
) -> None:
    both[kind].configure(replies={path: {"body": body}})
    with pytest.raises(TrimtabError) as raised:
        engine_over(laboratory, [both[kind]], reconnect_timeout=0.01)
    assert f"{path} gave a wrong answer: " in one_line(raised.value)


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        ("vllm", "/reset_prefix_cache", "{}"),
        ("vllm", "/reset_prefix_cache", '{"success": 1}'),
        ("sglang", "/update_weights_from_disk", "null"),
        ("sglang", "/update_weights_from_disk", '{"success": "yes"}'),
        ("sglang", "/update_weights_from_disk", json.dumps({"success": False, "message": LONG})),
    ],
)
def test_a_wrong_answer_to_new_weights_is_one_line(
    laboratory: LoadedModel, both: dict[str, ServerProcess], kind: str, path: str, body: str
) -> None:
    both[kind].reset()
    engine = engine_over(laboratory, [both[kind]])
    both[kind].configure(replies={path: {"body": body}})
    with pytest.raises(TrimtabError) as raised:
        engine.update_weights(laboratory.model.named_parameters(), 1)
    assert isinstance(raised.value, EngineDeadError) == ('"message"' not in body)
    assert len(str(raised.value)) < 1000
    assert "\n" not in str(raised.value)
