"""An engine over running inference servers on any machines: vLLM `serve` or SGLang."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from trimtab.config import EngineConfig
from trimtab.engines.embedded.decoding_rows import Prefixes, check_prefixes, check_tokens, complete
from trimtab.engines.request import check_vllm_temperature, validate_request
from trimtab.engines.server.http_client import Connection, ServerUnavailable, check_url
from trimtab.engines.server.request_queue import Batch, Job
from trimtab.engines.server.server_connection import Server, Teller, WrongWeights, await_any
from trimtab.engines.server.server_protocol import Answer, CompletionRequest, Model, Wire
from trimtab.engines.server.sglang_protocol import SglangProtocol
from trimtab.engines.server.vllm_protocol import VllmProtocol
from trimtab.engines.server.weight_folder import WeightFolder
from trimtab.engines.stopping import StopChecker, eos_ids
from trimtab.engines.weight_manifest import WeightManifest
from trimtab.errors import EngineDeadError, TrimtabError, TrimtabWarning
from trimtab.types import AbortSignal, Completion, FinishReason, Prompt, Sampling

# Seconds between two looks at `interrupt`, and between two tries to end requests that may not have arrived yet.
LOOK, AGAIN = 0.02, 1.0


class ServerEngine:
    """Samples from every server of `config.server.urls` at once (`types.Engine`); each response is one request.

    A server that fails gives its unanswered responses to the others and works on once it is back, with the weights it
    had been given. Where all are lost the call waits `patience` seconds for the first to return, then it raises
    `EngineDeadError`. An answer is kept, whatever happens to servers after it: only what was not answered is asked for
    again, from its beginning and with its seed; that holds for a call that is repeated after `EngineDeadError` under
    the same weights, too.

    Equal arguments and weights give equal tokens as far as the servers' own arithmetic does: it depends on what else
    they compute at the moment, and SGLang uses seeds only if it is told to. `policy_version` starts at 0.
    """

    def __init__(
        self,
        urls: Sequence[str],
        tokenizer: Any,
        config: EngineConfig,
        model_folder: Path | str,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """Waits up to `patience` for all servers.

        Args:
            model_folder: config files of the model the servers were started with; no weights are read.
            notify: gets a line for people at once and every few seconds where servers are waited for, from any thread;
                default: a `TrimtabWarning`. It may be exchanged later.
        """
        self.notify = notify or _warn
        settings = config.server
        self.policy_version = 0
        self.decoded = 0
        self.prefilled = 0
        self._tokenizer = tokenizer
        self._settings = settings
        model = AutoConfig.from_pretrained(model_folder, trust_remote_code=False)
        self._vocabulary: int = model.vocab_size
        self._eos = eos_ids(SimpleNamespace(config=model, generation_config=_generation(Path(model_folder))), tokenizer)
        self._inventory = WeightManifest.read(model_folder)
        wire: Wire = VllmProtocol(settings.model) if settings.kind == "vllm" else SglangProtocol()
        self._servers = [Server(check_url(url), wire, settings.timeout, self._vocabulary) for url in urls]
        self._published = WeightFolder(settings.folder, getattr(torch, config.dtype))
        self._unclaimed: tuple[int, list[CompletionRequest], dict[int, Answer]] | None = None
        self._calls = 0
        await_any(self._servers, None, settings.patience, self.notify, everyone=True)
        self._model = self._one_model()

    @property
    def context(self) -> int | None:
        """Tokens of the longest sequence the servers take, as far as they say."""
        return self._model.context

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling,
        *,
        seed: int,
        prefixes: Prefixes | None = None,
        interrupt: AbortSignal | None = None,
    ) -> list[list[Completion]]:
        """`samples` completions for each prompt, in order; see `types.Engine`.

        Raises:
            EngineDeadError: no server is left, and none came back.
            TrimtabError: the arguments cannot be met; a server refuses a request or returns a token without its
                log-prob; a response was not answered after many attempts.
        """
        self._check(sampling)
        context = self._model.context
        validate_request(prompts, samples, sampling, seed, vocabulary=self._vocabulary, context=context)
        check_prefixes(prefixes, prompts, samples, sampling)
        stop = StopChecker(self._tokenizer, self._eos, sampling)
        check_tokens(prefixes, prompts, stop, self._vocabulary)
        begun = [None if prefixes is None else prefixes[p][s] for p in range(len(prompts)) for s in range(samples)]
        jobs = self._jobs(prompts, samples, sampling, seed, begun)
        answers = self._answers(jobs, interrupt)
        asked = {job.index for job in jobs}
        done = [
            prefix
            if prefix is not None and index not in asked
            else _completion(prefix, answers.get(index), stop, sampling, self.policy_version)
            for index, prefix in enumerate(begun)
        ]
        self.decoded += sum(len(answer.ids) for answer in answers.values())
        self.prefilled += sum(len(job.ask.ids) for job in jobs if job.index in answers)
        return [done[p * samples : (p + 1) * samples] for p in range(len(prompts))]

    def publish(self, weights: Iterable[tuple[str, Any]], version: int, *, exact: bool = False) -> None:  # noqa: ARG002
        """Hand over named weights to every server that is alive; one that is not gets them when it is back.

        Nothing is done to weights on purpose here, so `exact` changes nothing.

        Raises:
            EngineDeadError: no server is left.
            TrimtabError: the weights do not fit the model, or a server does not take them.
        """
        tensors = self._inventory.check(weights)
        folder, label = self._published.write(tensors, version)
        with ThreadPoolExecutor(len(self._servers)) as pool:
            lost = [error for error in pool.map(lambda server: _give(server, folder, label), self._servers) if error]
        if len(lost) == len(self._servers):
            raise EngineDeadError(f"no inference server is left: {lost[0]}")
        self.policy_version = version

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What was published last, as it was handed over."""
        return self._published.read()

    def recover(self) -> None:
        """Wait up to `patience` for the first server that is back; it must serve the model it served before."""
        await_any(self._servers, self._published.current, self._settings.patience, self.notify, everyone=False)

    def close(self) -> None:
        """Remove the weights that were handed over; the servers are not ours to end."""
        self._published.remove()

    def _one_model(self) -> Model:
        first = self._servers[0]
        assert first.model is not None
        for server in self._servers[1:]:
            assert server.model is not None
            if server.model != first.model:
                raise TrimtabError(
                    f"{first.url} serves {first.model.name!r} (context {first.model.context}), {server.url} serves "
                    f"{server.model.name!r} (context {server.model.context}): start all servers alike"
                )
        return first.model

    def _check(self, sampling: Sampling) -> None:
        if self._settings.kind == "vllm":
            check_vllm_temperature(sampling)
        if sampling.truncated:
            raise TrimtabError(
                "servers do not say which tokens were kept under top_p or top_k, so ratios would be biased: set top_p "
                '= 1 and top_k = 0, or use engine.type = "vllm"'
            )

    def _jobs(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling,
        seed: int,
        begun: Sequence[Completion | None],
    ) -> list[Job]:
        """What is to be asked: nothing where a response is complete already."""
        stop_ids = () if sampling.ignore_stop else tuple(sorted({*self._eos, *sampling.stop_ids}))
        self._calls += 1
        call, jobs = f"{self._published.token}-{self._calls}", []
        for index, prefix in enumerate(begun):
            p, s = divmod(index, samples)
            if prefix is not None and complete(prefix, sampling.max_tokens):
                continue
            old = [] if prefix is None else prefix.response_ids.tolist()
            ask = CompletionRequest(
                name=f"{call}-{index}",
                ids=prompts[p].ids.tolist() + old,
                max_tokens=sampling.max_tokens - len(old),
                seed=_seed(seed, p, s, len(old)),
                sampling=sampling,
                stop_ids=stop_ids,
            )
            jobs.append(Job(index, ask))
        return jobs

    def _answers(self, jobs: list[Job], interrupt: AbortSignal | None) -> dict[int, Answer]:
        """By the jobs' indices; only an interrupted call leaves some out."""
        asks, found = [job.ask for job in jobs], dict[int, Answer]()
        if self._unclaimed is not None and self._unclaimed[:2] == (self.policy_version, asks):
            found = self._unclaimed[2]
        self._unclaimed = None
        batch = Batch([job for job in jobs if job.index not in found], len(self._servers))
        batch.answers |= found
        try:
            self._run(batch, interrupt, threads=-(-len(jobs) // len(self._servers)))
        except EngineDeadError:
            self._unclaimed = (self.policy_version, asks, batch.answers)
            raise
        return batch.answers

    def _run(self, batch: Batch, interrupt: AbortSignal | None, threads: int) -> None:
        connections = [
            (index, server.connect())
            for index, server in enumerate(self._servers)
            for _ in range(min(threads, self._settings.concurrency))
        ]
        teller = Teller(self.notify)
        workers = [threading.Thread(target=self._work, args=(*one, batch, teller), daemon=True) for one in connections]
        for worker in workers:
            worker.start()
        try:
            self._watch(batch, interrupt)
        except BaseException as error:
            batch.fail(error)
            raise
        finally:
            # Only after an error is anybody still asking.
            for _, connection in connections:
                connection.cancel()
            for worker in workers:
                worker.join()
        if batch.error is not None:
            raise batch.error

    def _watch(self, batch: Batch, interrupt: AbortSignal | None) -> None:
        """Until the end. An abort is repeated: a request may not have reached its server when the first one did."""
        while not batch.wait(None if interrupt is None else LOOK):
            if interrupt is not None and interrupt.is_set():
                batch.interrupt()
                for server in self._servers:
                    server.abort()
                batch.wait(AGAIN)

    def _work(self, index: int, connection: Connection, batch: Batch, teller: Teller) -> None:
        """One connection's life: ask for one job after the other until the end of the batch."""
        server = self._servers[index]

        def lost(error: ServerUnavailable) -> None:
            since = [other.lost_at for other in self._servers if other.lost_at is not None]
            if len(since) < len(self._servers):
                return
            patience = self._settings.patience
            if time.monotonic() - max(since) > patience:
                batch.fail(EngineDeadError(f"no inference server is left: {error}"))
            else:
                teller.tell(f"no inference server is left ({error}); waiting {patience:g} s for one to come back")

        def back() -> bool:
            return server.await_return(self._published.current, batch.wait, lost)

        try:
            works = server.alive or back()
            while works and (job := batch.take(index, connection.close)) is not None:
                try:
                    answer = server.ask(connection, job.ask)
                    if answer.finish == "abort" and not batch.interrupted:
                        raise ServerUnavailable(f"{server.url} aborted a response that was not to be aborted")
                except ServerUnavailable as error:
                    batch.give_back(job, index, error, asked=not isinstance(error, WrongWeights))
                    works = back()
                else:
                    batch.finish(job, answer)
        except BaseException as error:
            batch.fail(error)
        finally:
            connection.close()


def _warn(line: str) -> None:
    warnings.warn(line, TrimtabWarning, stacklevel=3)


def _give(server: Server, folder: Path, label: str) -> ServerUnavailable | None:
    """Weights for one server; what keeps it from taking them, if it may take them later."""
    server.label = label
    if not server.alive:
        return ServerUnavailable(f"{server.url} is lost")
    try:
        server.load(folder, label)
    except ServerUnavailable as error:
        return error
    return None


def _completion(
    prefix: Completion | None, answer: Answer | None, stop: StopChecker, sampling: Sampling, version: int
) -> Completion:
    """The whole response. Servers see a prefix as part of the prompt, so a stop may begin in it that they overlook."""
    old = [] if prefix is None else prefix.response_ids.tolist()
    answer = Answer([], [], "abort") if answer is None else answer
    ids = old + answer.ids
    end = stop.end(ids, len(old))
    finish: FinishReason = "stop" if end is not None else answer.finish
    new = len(answer.ids) if end is None else end - len(old)
    if finish == "abort" and len(ids) >= sampling.max_tokens:
        finish = "length"
    # Greedy decoding puts all mass on one token, whatever distribution a server reports.
    logp = np.array([0.0] * new if sampling.temperature == 0 else answer.logp[:new], dtype=np.float32)
    versions = np.full(new, version, dtype=np.int64)
    ids = ids[: len(old) + new]
    return Completion(
        response_ids=np.array(ids, dtype=np.int64),
        logp_behavior=logp if prefix is None else np.concatenate([prefix.logp_behavior, logp]),
        policy_version=versions if prefix is None else np.concatenate([prefix.policy_version, versions]),
        finish=finish,
        text=stop.text(ids),
    )


def _seed(seed: int, prompt: int, sample: int, begun: int) -> int:
    """A seed per response, and another one for its rest: a server draws from the beginning of a seed's numbers."""
    key = np.random.SeedSequence(entropy=seed, spawn_key=(prompt, sample, begun))
    return int(key.generate_state(1, np.uint64)[0] >> np.uint64(1))


def _generation(folder: Path) -> GenerationConfig | None:
    return GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None
