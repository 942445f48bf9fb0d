"""vLLM's protocol: `/v1/completions` with token ids, weights through a worker extension.

Sources, of vllm 0.32.0: entrypoints/openai/completion/{protocol,serving}.py, entrypoints/rl/online/api_router.py,
entrypoints/serve/dev/{rpc,cache}/api_router.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import FailFast, PositiveInt

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.server.http_client import Answer, Connection, RequestRejected, excerpt
from trimtab.trainer.engines.server.server_protocol import (
    CompletionRequest,
    CompletionResult,
    LogProb,
    Model,
    Name,
    TokenId,
    scored_result,
)
from trimtab.trainer.engines.weight_transfer import FILE, require_all_loaded
from trimtab.types import SamplingParams

EXTENSION = "trimtab.trainer.engines.vllm.worker_extension.WeightLoading"
START = f"start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {EXTENSION}"
_COMMON = {"add_special_tokens": False, "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}


class _ModelCard(Answer):
    id: Name
    max_model_len: PositiveInt | None = None


class _Models(Answer):
    data: Annotated[list[_ModelCard], FailFast()]


class _WeightInfo(Answer):
    weight_version: Name | None


class _Outcome(Answer):
    success: bool


class _NotLoaded(Answer):
    results: Annotated[list[list[Name]], FailFast()]  # names, by worker (`WeightLoading.load_published`)


class _LogProbs(Answer):
    token_logprobs: Annotated[list[LogProb], FailFast()]


class _Choice(Answer):
    token_ids: Annotated[list[TokenId], FailFast()]
    logprobs: _LogProbs
    finish_reason: Literal["stop", "length", "abort"]


class _Completion(Answer):
    choices: tuple[_Choice]


class _PromptToken(Answer):
    logprob: LogProb


class _Scored(Answer):
    prompt_logprobs: Annotated[list[dict[str, _PromptToken] | None], FailFast()]


class _Scores(Answer):
    choices: tuple[_Scored]


class VllmProtocol:
    """The protocol of `vllm serve`. `name`: the served model name; None: the first one the server lists."""

    # With top_k = 1 the processed log-prob is 0. vLLM refuses temperatures above 2, such as SGLang's probe.
    probe = SamplingParams(top_k=1, ignore_stop=True)

    def __init__(self, name: str | None) -> None:
        self._name = name

    async def model(self, connection: Connection) -> Model:
        served = {card.id: card for card in (await connection.ask(_Models, "/v1/models")).data}
        name = self._name or next(iter(served), None)
        if name is None or name not in served:
            known = excerpt(", ".join(served)) or "no model"
            raise TrimtabError(f"{connection.url} serves {known}, not {name!r}: set engine.server.model")
        return Model(name, served[name].max_model_len)

    async def label(self, connection: Connection) -> str:
        with _add_advice():
            return str((await connection.ask(_WeightInfo, "/weight_info")).weight_version)

    async def request(self, connection: Connection, request: CompletionRequest, model: Model) -> CompletionResult:
        body = {
            **request.fields,
            **_COMMON,
            "model": model.name,
            "prompt": request.ids,
            "max_tokens": request.max_tokens,
            "top_k": request.sampling.top_k,
            "seed": request.seed,
        }
        if request.scored:
            body |= {"max_tokens": 1, "prompt_logprobs": 0, "seed": None}  # a seed ends vLLM on a CPU at long prompts
            [scored] = (await connection.ask(_Scores, "/v1/completions", body)).choices
            return scored_result(connection, request, [_by_id(entry) for entry in scored.prompt_logprobs])
        [choice] = (await connection.ask(_Completion, "/v1/completions", body)).choices
        return CompletionResult(choice.token_ids, choice.logprobs.token_logprobs, choice.finish_reason)

    def is_processed(self, logp: Sequence[float], vocabulary: int) -> bool:  # noqa: ARG002
        return not any(logp)

    async def abort(self, connection: Connection) -> None:
        with _add_advice():
            await connection.call("/abort_requests", {})

    async def load(self, connection: Connection, folder: Path, label: str) -> None:
        with _add_advice():
            # No request may run while weights change. No call waits for the requests that still run: they are aborted.
            await connection.call("/pause?mode=abort", {})
            try:
                with _add_advice(f"{folder} must be seen by the server (engine.server.folder); {START}"):
                    body = {"method": "load_published", "args": [str(folder / FILE)]}
                    answer = await connection.ask(_NotLoaded, "/collective_rpc", body)
                require_all_loaded(answer.results, connection.url)
                if not (await connection.ask(_Outcome, "/reset_prefix_cache", {})).success:
                    raise TrimtabError(f"{connection.url} did not reset its prefix cache: requests are still running")
                await connection.call("/update_weight_version", {"new_version": label})
            finally:
                await connection.call("/resume", {})


def _by_id(entry: dict[str, _PromptToken] | None) -> dict[int, float]:
    """Returns the log-probs by id at a token of the prompt; empty at the first token."""
    return {int(name): token.logprob for name, token in (entry or {}).items() if name.isdecimal()}


@contextmanager
def _add_advice(advice: str = START) -> Iterator[None]:
    """Adds advice to the error of a route that exists only in vLLM's development mode."""
    try:
        yield
    except RequestRejected as error:
        raise TrimtabError(f"{error}; {advice}") from error
