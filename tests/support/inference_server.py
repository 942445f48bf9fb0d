"""Real inference servers over a real model, small enough to be killed: embedded engines behind two wire formats.

This process imports torch once and forks a server for each line on its standard input, a JSON list:
[KIND, FOLDER, LOG, EVENTS, PORT]. KIND is "vllm" or "sglang"; what is answered follows those projects' own sources
(named in engines/server/vllm_protocol.py and sglang_protocol.py). FOLDER holds a model with its weights. LOG gets one
JSON line for every request that samples, when it arrives and when its answer is sent. EVENTS is a named pipe: first
`PORT PID`, when the server listens, at last the end of the file, when it is dead.

`POST /configure` with a JSON object sets the options from then on. {"after": N, "tokens": T}: from the N-th request
on, each is held after T tokens until it is aborted, with an event `held`. {"logp": V, "every": N}: every N-th answer,
or every one, has the log-prob V for all tokens. {"factor": F}: F times the tokens asked for. {"reject": true}: weights
are refused. {"release": true}: all held requests are aborted, as by another client. {"replies": {PATH: {"body": B}}}:
what PATH is answered with, as text in latin-1.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from safetensors.torch import load_file

from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models.load import LoadedModel, load
from trimtab.types import Completion, Problem, Prompt, SamplingParams


class Service:
    """What both dialects share: the model, the label of its weights, and the held requests."""

    def __init__(self, kind: str, folder: str, log: str, events: str) -> None:
        loaded = model(folder)
        self.kind = kind
        self.folder = folder
        self.engine = EmbeddedEngine(loaded.model, loaded.tokenizer, torch.float32)
        self.label = "default"
        self.paused = False
        self.options: dict[str, Any] = {}
        self._log = open(log, "a")  # noqa: SIM115  # as long as the process lives
        self._events = open(events, "w")  # noqa: SIM115
        self._lock = threading.Lock()
        self._requests = 0
        self._aborts = 0
        self._aborted = threading.Condition()

    def configure(self, options: dict[str, Any]) -> None:
        with self._lock:
            self.options, self._requests = options, 0
        self.emit("configured")
        if options.get("release"):
            self.abort_all()

    def log(self, **entry: Any) -> None:
        with self._lock:
            self._log.write(json.dumps(entry) + "\n")
            self._log.flush()

    def emit(self, line: str) -> None:
        self._events.write(line + "\n")
        self._events.flush()

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        with self._lock:
            self.engine.update_weights(weights.items(), 0)

    def abort_all(self) -> None:
        with self._aborted:
            self._aborts += 1
            self._aborted.notify_all()

    def sample(self, ids: list[int], sampling: SamplingParams, seed: int) -> tuple[Completion, list[float | None]]:
        """One response, held after some tokens until it is aborted if the options say so, and its log-probs."""
        with self._lock:
            self._requests += 1
            number = self._requests
        self.log(received=seed)
        if number >= self.options.get("after", sys.maxsize):
            with self._aborted:
                aborts = self._aborts
                self.emit("held")
                self._aborted.wait_for(lambda: self._aborts > aborts)
            tokens = self.options.get("tokens", 0)
            if tokens == 0:
                return replace(Completion.empty(), finish_reason="abort"), []
            sampling = replace(sampling, max_tokens=min(tokens, sampling.max_tokens))
        sampling = replace(sampling, max_tokens=self.options.get("factor", 1) * sampling.max_tokens)
        prompt = Prompt(Problem("p", "", ""), "", np.array(ids, dtype=np.int64))
        with self._lock:
            [[result]] = self.engine.generate([prompt], 1, sampling, seed=seed)
        if number >= self.options.get("after", sys.maxsize) and result.finish_reason == "length":
            result = replace(result, finish_reason="abort")
        if "logp" in self.options and number % self.options.get("every", 1) == 0:
            return result, [self.options["logp"]] * len(result.response_ids)
        return result, result.logp_behavior.tolist()

    def prefill(self, ids: list[int]) -> list[float]:
        """Log-probs of all tokens of a prompt but the first."""
        first, rest = (np.array(part, dtype=np.int64) for part in (ids[:1], ids[1:]))
        given = replace(Completion.empty(), response_ids=rest)
        with self._lock:
            [logp] = self.engine.prefill_logps([Prompt(Problem("p", "", ""), "", first)], [given])
        return logp.tolist()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body would wait for the acknowledgement of its headers
    service: Service

    def do_GET(self) -> None:
        self._route()

    def do_POST(self) -> None:
        self._route()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _route(self) -> None:
        parts = urlsplit(self.path)
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(data) if data else {}
        if parts.path == "/health":
            self._reply({} if self.service.kind == "sglang" else None)
            return
        if parts.path == "/configure":
            self.service.configure(body)
            self._reply(None)
            return
        if reply := self.service.options.get("replies", {}).get(parts.path):
            self._send(reply["body"].encode("latin-1"))
            return
        name = f"{self.service.kind}_{parts.path.strip('/').replace('/', '_')}"
        method = getattr(self, name, None)
        if method is None:
            self._reply({"detail": "Not Found"}, 404)
            return
        try:
            reply = method(body)
        except Exception as error:
            self._reply({"error": {"message": repr(error), "code": 500}}, 500)
            return
        self._reply(reply)

    def _reply(self, body: Any, status: int = 200) -> None:
        self._send(b"" if body is None else json.dumps(body).encode(), status)

    def _send(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def vllm_v1_models(self, _body: Any) -> Any:
        return {
            "object": "list",
            "data": [{"id": self.service.folder, "root": self.service.folder, "max_model_len": 64}],
        }

    def vllm_weight_info(self, _body: Any) -> Any:
        return {"weight_version": self.service.label}

    def vllm_v1_completions(self, body: Any) -> Any:
        assert body["logprobs"] == 0
        assert body["return_token_ids"] is True
        assert not self.service.paused
        sampling = SamplingParams(
            temperature=body["temperature"],
            top_k=body["top_k"],
            max_tokens=body["max_tokens"],
            stop=tuple(body.get("stop", ())),
            stop_ids=tuple(body.get("stop_token_ids", ())),
            ignore_stop=body["ignore_eos"],
        )
        result, logp = self.service.sample(body["prompt"], sampling, body.get("seed") or 0)
        self.service.log(answered=body.get("seed"))
        logprobs = {"token_logprobs": logp, "tokens": [], "top_logprobs": [], "text_offset": []}
        prompt = None
        if body.get("prompt_logprobs") == 0:
            assert body["seed"] is None  # vLLM fails with one on a CPU where it reads a prompt in several steps
            logps = zip(body["prompt"][1:], self.service.prefill(body["prompt"]), strict=True)
            prompt = [None, *({str(id_): {"logprob": one, "rank": 1, "decoded_token": None}} for id_, one in logps)]
        choice = {
            "index": 0,
            "prompt_logprobs": prompt,
            "text": result.text,
            "logprobs": logprobs,
            "finish_reason": result.finish_reason,
            "token_ids": result.response_ids.tolist(),
        }
        return {"id": f"cmpl-{body.get('request_id')}", "object": "text_completion", "choices": [choice]}

    def vllm_abort_requests(self, body: Any) -> Any:
        assert not body.get("request_ids")
        self.service.abort_all()
        return {"status": "aborted"}

    def vllm_pause(self, _body: Any) -> Any:
        self.service.paused = True
        self.service.abort_all()
        return {"status": "paused"}

    def vllm_resume(self, _body: Any) -> Any:
        self.service.paused = False
        return {"status": "resumed"}

    def vllm_collective_rpc(self, body: Any) -> Any:
        assert self.service.paused
        assert body["method"] == "load_published"
        if "reject" in self.service.options:
            raise AttributeError("'CPUWorker' object has no attribute 'load_published'")
        [path] = body["args"]
        self.service.load(load_file(path))
        return {"results": [[]]}  # for each worker, the parameters that were not loaded

    def vllm_reset_prefix_cache(self, _body: Any) -> Any:
        return {"success": True}

    def vllm_update_weight_version(self, body: Any) -> Any:
        self.service.label = body["new_version"]
        return {"success": True, "new_version": self.service.label}

    def sglang_model_info(self, _body: Any) -> Any:
        return {
            "model_path": self.service.folder,
            "tokenizer_path": self.service.folder,
            "is_generation": True,
            "weight_version": self.service.label,
        }

    def sglang_generate(self, body: Any) -> Any:
        params = body["sampling_params"]
        assert body["return_logprob"] is True
        sampling = SamplingParams(
            temperature=params["temperature"],
            max_tokens=params["max_new_tokens"],
            stop=tuple(params.get("stop", ())),
            stop_ids=tuple(params.get("stop_token_ids", ())),
            ignore_stop=params["ignore_eos"],
        )
        result, logp = self.service.sample(body["input_ids"], sampling, params.get("sampling_seed", 0))
        self.service.log(answered=params.get("sampling_seed"))
        ids = result.response_ids.tolist()
        info = {
            "id": body.get("rid"),
            "finish_reason": {"type": result.finish_reason},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "weight_version": self.service.label,
            "output_token_logprobs": [[one, i, None] for one, i in zip(logp, ids, strict=True)],
        }
        if (start := body.get("logprob_start_len", -1)) >= 0:
            logps = [None, *self.service.prefill(body["input_ids"])[start:]]
            info["input_token_logprobs"] = [
                [one, i, None] for one, i in zip(logps, body["input_ids"][start:], strict=True)
            ]
        if result.finish_reason == "abort" and not ids:  # before prefill
            del info["output_token_logprobs"]
        return {"text": result.text, "output_ids": ids, "meta_info": info}

    def sglang_abort_request(self, body: Any) -> Any:
        assert body["abort_all"] is True
        self.service.abort_all()

    def sglang_update_weights_from_disk(self, body: Any) -> Any:
        assert body["flush_cache"] is True
        if "reject" in self.service.options:
            return {"success": False, "message": "no such folder", "num_paused_requests": 0}
        [file] = Path(body["model_path"]).glob("*.safetensors")
        self.service.load(load_file(file))
        self.service.label = body["weight_version"]
        return {"success": True, "message": "Succeeded", "num_paused_requests": 0}


@cache
def model(folder: str) -> LoadedModel:
    return load(folder, dtype=torch.float32)


def serve(kind: str, folder: str, log: str, events: str, port: int) -> None:
    """Answer requests as long as the process that started this one lives."""
    Handler.service = Service(kind, folder, log, events)
    ThreadingHTTPServer.request_queue_size = 128  # of connections: beyond 5, clients would wait for seconds
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    parent = os.getppid()
    server.service_actions = lambda: None if os.getppid() == parent else os._exit(1)
    Handler.service.emit(f"{server.server_address[1]} {os.getpid()}")
    server.serve_forever()


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their exit codes are not read
    for line in sys.stdin:
        kind, folder, log, events, port = json.loads(line)
        model(folder)
        if os.fork() == 0:
            serve(kind, folder, log, events, port)


if __name__ == "__main__":
    main()
