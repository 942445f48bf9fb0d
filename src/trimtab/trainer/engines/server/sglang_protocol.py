"""SGLang's protocol: `/generate` with token ids, weights from a folder.

Sources: docs/advanced_features/sglang_for_rl.md, docs/basic_usage/native_api.md, srt/managers/io_struct.py and
tokenizer_manager.py of sgl-project/sglang.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.server.http_client import (
    Answer,
    Connection,
    RequestRejected,
    ServerUnavailable,
    WrongAnswer,
    excerpt,
)
from trimtab.trainer.engines.server.server_protocol import (
    CompletionRequest,
    CompletionResult,
    LogProb,
    Model,
    Name,
    TokenId,
    scored_result,
)
from trimtab.types import SamplingParams

# Older releases store seeds as int32.
MAX_SEED = 1 << 31
PROBE_TOLERANCE = 0.5  # nats


class _ModelInfo(Answer):
    tokenizer_path: Name
    weight_version: Name | None


class _FinishReason(Answer):
    type: Literal["stop", "length", "abort"]
    status_code: int | None = None
    message: str | None = None


class _MetaInfo(Answer):
    finish_reason: _FinishReason
    # A request that was aborted before it started has neither tokens nor log-probs.
    completion_tokens: int = 0
    output_token_logprobs: Annotated[list[tuple[LogProb, TokenId, Any]], FailFast()] = Field(default_factory=list)
    input_token_logprobs: Annotated[list[tuple[LogProb | None, TokenId, Any]], FailFast()] = Field(default_factory=list)


class _Generation(Answer):
    meta_info: _MetaInfo


class _Update(Answer):
    success: bool
    message: str | None = None


class SglangProtocol:
    """The protocol of SGLang.

    Log-probs are those of softmax(logits / temperature), unless the server runs with SGLANG_RETURN_ORIGINAL_LOGPROB.
    Seeds are used only by servers started with `--enable-deterministic-inference`.
    """

    # At this temperature all tokens are equally likely, so that a processed log-prob is close to -log(vocabulary).
    probe = SamplingParams(temperature=1e4, ignore_stop=True)

    async def model(self, connection: Connection) -> Model:
        info = await connection.ask(_ModelInfo, "/model_info")
        # `model_path` changes to the folder of the weights loaded last; the tokenizer path does not.
        return Model(info.tokenizer_path, None)

    async def label(self, connection: Connection) -> str:
        return str((await connection.ask(_ModelInfo, "/model_info")).weight_version)

    async def request(self, connection: Connection, request: CompletionRequest, model: Model) -> CompletionResult:  # noqa: ARG002
        params = {
            **request.fields,
            "top_k": -1,
            "no_stop_trim": True,
            "max_new_tokens": request.max_tokens,
            "sampling_seed": request.seed % MAX_SEED,
        }
        # Without a request id: a retry with the same id is refused until the server notices the broken connection.
        body = {"input_ids": request.ids, "return_logprob": True, "sampling_params": params}
        if request.scored:
            params["max_new_tokens"] = 1
            # The first token returned has no log-prob.
            body["logprob_start_len"] = len(request.ids) - request.scored - 1
        info = (await connection.ask(_Generation, "/generate", body)).meta_info
        reason, where = info.finish_reason, f"{connection.url}/generate"
        if reason.type == "abort" and reason.status_code:
            raise ServerUnavailable(f"{where} gave up: {excerpt(reason.message)}")
        if request.scored:
            prompt = [{id_: value} if value is not None else {} for value, id_, _ in info.input_token_logprobs]
            return scored_result(connection, request, prompt)
        logp = [entry[0] for entry in info.output_token_logprobs]
        ids = [entry[1] for entry in info.output_token_logprobs]
        if len(ids) != info.completion_tokens:
            raise WrongAnswer(f"{where} wrote {info.completion_tokens} tokens and returned log-probs for {len(ids)}")
        return CompletionResult(ids, logp, reason.type)

    def is_processed(self, logp: Sequence[float], vocabulary: int) -> bool:
        return all(abs(value + math.log(vocabulary)) < PROBE_TOLERANCE for value in logp)

    async def abort(self, connection: Connection) -> None:
        await connection.call("/abort_request", {"rid": "", "abort_all": True})

    async def load(self, connection: Connection, folder: Path, label: str) -> None:
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": True, "abort_all_requests": True}
        try:
            update = await connection.ask(_Update, "/update_weights_from_disk", body)
            failure = None if update.success else excerpt(update.message)
        except RequestRejected as error:
            failure = str(error)
        if failure is not None:
            raise TrimtabError(
                f"{connection.url} did not take the weights in {folder} ({failure}): engine.server.folder must be seen "
                "by the trainer and by every server"
            )
