"""SGLang's protocol: `/generate` with token ids, weights from a folder.

Sources: docs/advanced_features/sglang_for_rl.md, docs/basic_usage/native_api.md, srt/managers/io_struct.py and
tokenizer_manager.py of sgl-project/sglang.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from trimtab.engines.server.http_client import Connection, RequestRejected, ServerUnavailable
from trimtab.engines.server.server_protocol import Answer, CompletionRequest, Model, checked
from trimtab.errors import TrimtabError

# Older releases keep seeds in int32.
SEEDS = 1 << 31
# At this temperature every token is equally likely, so a log-prob that belongs to it is -log(vocabulary).
HOT, HOT_TOKENS, HOT_TOLERANCE = 1e4, 8, 0.5
_COMMON = {
    # Left out, these may be filled in by the server's preferred sampling parameters.
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
}


class SglangProtocol:
    """Log-probs are those of softmax(logits / temperature), unless the server runs with SGLANG_RETURN_ORIGINAL_LOGPROB.
    Seeds are used only by servers started with `--enable-deterministic-inference`.
    """

    def model(self, connection: Connection) -> Model:
        info = connection.get("/model_info")
        # `model_path` becomes the folder of the weights loaded last; the tokenizer stays.
        return Model(str(info.get("tokenizer_path")), None)

    def label(self, connection: Connection) -> str:
        return str(connection.get("/model_info").get("weight_version"))

    def ask(self, connection: Connection, ask: CompletionRequest, model: Model) -> Answer:  # noqa: ARG002
        sampling = ask.sampling
        params = {
            "max_new_tokens": ask.max_tokens,
            "temperature": sampling.temperature,
            "stop": [] if sampling.ignore_stop else list(sampling.stop),
            "stop_token_ids": list(ask.stop_ids),
            "ignore_eos": sampling.ignore_stop,
            "sampling_seed": ask.seed % SEEDS,
        }
        # Without a name: one that is asked again would be refused while the server has not yet noticed the broken call.
        return _generate(connection, {"input_ids": ask.ids}, params)

    def processed(self, connection: Connection, ids: list[int], model: Model, vocabulary: int) -> bool:  # noqa: ARG002
        params = {"max_new_tokens": HOT_TOKENS, "temperature": HOT, "ignore_eos": True}
        answer = _generate(connection, {"input_ids": ids}, params)
        return all(abs(logp + math.log(vocabulary)) < HOT_TOLERANCE for logp in answer.logp)

    def abort(self, connection: Connection) -> None:
        connection.post("/abort_request", {"rid": "", "abort_all": True})

    def load(self, connection: Connection, folder: Path, label: str) -> None:
        body = {
            "model_path": str(folder),
            "weight_version": label,
            "flush_cache": True,
            "abort_all_requests": True,
        }
        try:
            reply = connection.post("/update_weights_from_disk", body)
            why = None if reply.get("success") is True else str(reply.get("message"))
        except RequestRejected as error:
            why = str(error)
        if why is not None:
            raise TrimtabError(
                f"{connection.url} did not take the weights in {folder} ({why}): engine.server.folder must be seen by "
                "the trainer and by every server"
            )


def _generate(connection: Connection, body: dict[str, Any], params: dict[str, Any]) -> Answer:
    url = connection.url
    reply = connection.post("/generate", {**body, "return_logprob": True, "sampling_params": {**_COMMON, **params}})
    info = reply.get("meta_info") or {}
    reason = info.get("finish_reason") or {}
    kind = reason.get("type")
    if kind not in ("stop", "length", "abort"):
        raise TrimtabError(f"{url}/generate finished for an unknown reason: {reason}")
    if kind == "abort" and reason.get("status_code"):
        raise ServerUnavailable(f"{url}/generate gave up: {reason.get('message')}")
    # A request that was aborted before it began has neither tokens nor log-probs.
    triples = info.get("output_token_logprobs") or []
    ids = [int(triple[1]) for triple in triples]
    if len(ids) != info.get("completion_tokens", 0):
        raise TrimtabError(
            f"{url}/generate wrote {info.get('completion_tokens')} tokens and returned log-probs for {len(ids)} of them"
        )
    return checked(f"{url}/generate", ids, [triple[0] for triple in triples], kind)
