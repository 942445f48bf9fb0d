"""The embedded engine: batched sampling in this process with PyTorch and transformers.

`EmbeddedEngine` splits a call into batches and chooses a decoder; `DecodingLoop` decodes one batch: it samples a token
for every row, detects ends, and applies the results of turns.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.decoding_rows import DecodingRow, GenerateCall
from trimtab.trainer.engines.embedded.decoder import CachedDecoder, Decoder, ExpertRecorder, plan_prefill
from trimtab.trainer.engines.embedded.invariant_decoder import InvariantDecoder, with_trainer_logps
from trimtab.trainer.engines.embedded.sampling import SampledTokens, sample_tokens, uniform_draws
from trimtab.trainer.engines.embedded.shared_prompt_decoder import LlamaBlocks, SharedPromptDecoder, supports
from trimtab.trainer.engines.embedded.weight_quantization import NO_QUANTIZATION, WeightQuantization, matrices
from trimtab.trainer.engines.request import EngineModel, Prefixes, validate_routes
from trimtab.trainer.engines.stopping import eos_ids
from trimtab.trainer.engines.turn_exchange import TurnExchange
from trimtab.trainer.engines.weight_transfer import SUMMED_WEIGHTS, WeightManifest, checksum
from trimtab.trainer.models.architecture import is_invariant
from trimtab.trainer.models.invariant.invariant_attention import round_up
from trimtab.trainer.models.invariant.kernels import KEY_BLOCK
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.trainer.models.matmul import on_accelerator
from trimtab.trainer.models.routing import record_routing, router_info
from trimtab.types import AbortSignal, Completion, FloatArray, Prompt, SamplingParams, TurnHandler

# Limit of the keys and values of one batch. The split into batches depends on the arguments alone, so results repeat.
CACHE_BYTES = 2 << 30
# Finished rows are removed once they exceed this share of the batch. On a CPU any share up to a quarter takes the same
# time on responses of mixed length; never removing rows takes 2.6 times as long. On a GPU more rows take hardly longer,
# and each removal needs another CUDA graph.
COMPACT_SHARE, COMPACT_SHARE_ON_ACCELERATOR = 1 / 16, 1 / 2


class EmbeddedEngine:
    """Samples from its own copy of a transformers causal model (`types.Engine`).

    The copy shares no storage with the original model. `policy_version` starts at 0.

    dtype: of the copy. Log-probs in bfloat16 differ from those of a float32 trainer. quantization: quantization and
    noise applied to published weights, a controlled additional mismatch. routes: whether completions hold the routed
    experts of each token (`types.Completion.routed_experts`). Raises `TrimtabError` if the model has no known routers.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        dtype: torch.dtype = torch.bfloat16,
        *,
        quantization: WeightQuantization = NO_QUANTIZATION,
        routes: bool = False,
    ) -> None:
        self.policy_version = 0
        self.decoded_tokens = 0
        self.prefilled_tokens = 0
        self._model = _copy_model(model, dtype)
        self._specification = EngineModel(
            tokenizer,
            eos_ids(tokenizer, model.config, getattr(model, "generation_config", None)),
            vocabulary=model.get_input_embeddings().num_embeddings,
            context=getattr(model.config, "max_position_embeddings", None),
        )
        self._invariant = is_invariant(self._model)
        self._blocks = LlamaBlocks(self._model) if supports(self._model) else None
        self._manifest = WeightManifest.of(self._model)
        self._quantization = quantization
        self._quantized_names = matrices(self._model) if quantization.active else ()
        self._routes = routes
        if routes and router_info(self._model).layers == 0:
            raise TrimtabError("the engine's model has no experts whose choice could be recorded: it is dense")
        self._quantize()

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: SamplingParams,
        *,
        seed: int,
        prefixes: Prefixes | None = None,
        turns: TurnHandler | None = None,
        abort: AbortSignal | None = None,
    ) -> list[list[Completion]]:
        """See `types.Engine`. Every draw depends on (seed, index of the prompt, sample, position of the token) alone.

        Equal prefixes of one prompt are run through the model once. `abort` is checked before every token. To continue
        an aborted call, pass its completions as `prefixes` with the same seed and weights: the responses are then those
        of a call without abort. This holds in float32 and with invariant numerics; in bfloat16, the keys and values of
        a prefix are rounded slightly differently.
        """
        version = self.policy_version
        call = GenerateCall.begin(self._specification, version, prompts, samples, sampling, seed, prefixes, turns)
        if self._routes:
            validate_routes(prefixes, prompts, router_info(self._model))
        for row in call.rows:
            row.uniform_draws = uniform_draws(seed, row.prompt, row.sample, sampling.max_tokens)
        exchange = TurnExchange(call, abort)
        exchange.resume()
        record = record_routing(self._model) if self._routes else contextlib.nullcontext()
        with record as tape:
            for batch in self._batches([row for row in call.rows if not row.complete], prompts, sampling.max_tokens):
                if exchange.aborted:
                    break
                recorder = None if tape is None else ExpertRecorder(tape)
                decoder = self._decoder(batch, prompts, sampling.max_tokens, recorder)
                loop = DecodingLoop(decoder, batch, call, exchange, recorder, self._invariant)
                loop.run()
                self.prefilled_tokens += decoder.prefilled
                self.decoded_tokens += loop.decoded
        return call.completions()

    @torch.inference_mode()
    def prefill_logps(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[FloatArray]:
        """Returns the log-probs (tokens,) of each response at temperature 1, from one forward over prompt and response.

        Uses the weights and numerics of `generate`, but neither its cache nor its decoding.
        """
        rows = []
        for prompt, one in zip(prompts, completions, strict=True):
            if self._invariant:  # these models run packed rows only
                batch = TokenBatch.pack([prompt.ids], [one.response_ids], [0], pad_id=0)
                logp = score(self._model, batch.to(self._model.device)).logp[0]
            else:
                ids = torch.from_numpy(np.concatenate([prompt.ids, one.response_ids])).to(self._model.device)
                kept = len(one.response_ids) + 1
                logits = self._model(input_ids=ids[None], use_cache=False, logits_to_keep=kept).logits[0, :-1]
                logp = logits.float().log_softmax(-1).gather(-1, ids[1 - kept :, None])[:, 0]
            rows.append(logp.cpu().numpy())
        return rows

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, as_is: bool = False) -> None:
        """Copies named weights into the model, and quantizes them unless `as_is`; see `types.Engine`.

        Names are those of `model.named_parameters()` or `model.state_dict()`; a tied head may be named or left out.
        Raises `TrimtabError`, and copies nothing, if the weights do not fit the model (`WeightManifest.check`).
        """
        given = self._manifest.check(weights)
        state = self._model.state_dict(keep_vars=True)
        for name, tensor in given.items():
            state[name].data.copy_(tensor)
        self.policy_version = version
        if not as_is:
            self._quantize()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Returns the weights in use, not copies."""
        return self._model.named_parameters()

    def weight_checksums(self) -> dict[str, tuple[torch.dtype, int]]:
        """Returns dtype and checksum, by name, of a few weights that quantization and noise do not change."""
        exact = ((name, one) for name, one in self._model.named_parameters() if name not in self._quantized_names)
        return {name: (one.dtype, checksum(one, one.dtype)) for name, one in itertools.islice(exact, SUMMED_WEIGHTS)}

    def restart(self) -> None:
        """Does nothing: the engine runs in this process."""

    def close(self) -> None:
        """Does nothing: the engine runs in this process."""

    @torch.no_grad()
    def _quantize(self) -> None:
        for name in self._quantized_names:
            weight = self._model.get_parameter(name)
            weight.copy_(self._quantization.apply(name, weight, self.policy_version))

    def _batches(self, rows: list[DecodingRow], prompts: Sequence[Prompt], max_tokens: int) -> list[list[DecodingRow]]:
        """Splits rows into batches whose cache stays within `CACHE_BYTES`. Prompts of similar length share a batch."""
        if not rows:
            return []
        rows = sorted(rows, key=lambda row: (len(prompts[row.prompt].ids), row.prompt))
        config, longest = self._model.config, len(prompts[rows[-1].prompt].ids)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = self._blocks.cache_dtype if self._blocks else self._model.dtype
        positions, itemsize = longest + max_tokens, dtype.itemsize
        if self._invariant:
            positions, itemsize = round_up(longest, KEY_BLOCK) + round_up(max_tokens, KEY_BLOCK), 4
        width = 2 * config.num_hidden_layers * heads * size * itemsize
        max_rows = max(1, CACHE_BYTES // (width * positions))
        count = -(-len(rows) // max_rows)
        edges = [len(rows) * i // count for i in range(count + 1)]
        return [rows[start:stop] for start, stop in itertools.pairwise(edges)]

    def _decoder(
        self, rows: list[DecodingRow], prompts: Sequence[Prompt], max_tokens: int, recorder: ExpertRecorder | None
    ) -> Decoder:
        starts = plan_prefill(rows, prompts, self._model.device)
        if self._invariant:
            return InvariantDecoder(self._model, starts)
        window = self._blocks.window if self._blocks else None
        if self._blocks and (window is None or max(len(ids) for ids in starts.prompts) + max_tokens <= window):
            steps = max_tokens - min(row.prefix_length for row in rows)
            decoder = SharedPromptDecoder(self._blocks.packed(len(rows)), starts, steps, recorder)
        else:
            decoder = CachedDecoder(self._model, starts, recorder)
        if recorder is not None:
            recorder.begin(rows, starts.prompt.tolist(), starts.row.tolist())
        return decoder


@dataclass(slots=True, eq=False)
class DecodingLoop:
    """Decodes rows in lockstep until each is complete, or the call is aborted.

    A row that waits for the result of its turn is not decoded.
    """

    decoder: Decoder
    rows: list[DecodingRow]  # in the decoder's order; complete rows are removed from time to time
    call: GenerateCall
    exchange: TurnExchange
    recorder: ExpertRecorder | None
    invariant: bool  # whether the trainer's head computes the log-probs
    decoded: int = field(default=0, init=False)  # tokens run through the model so far

    def run(self) -> None:
        logits = self.decoder.first
        while True:
            sampled = self._sample(logits)
            decoded = [i for i, row in enumerate(self.rows) if row.active]
            self._append(sampled, decoded)
            self.exchange.detect_ends([self.rows[i] for i in decoded])
            self.exchange.join(idle=not any(row.active for row in self.rows))
            if all(row.complete for row in self.rows) or self.exchange.aborted:
                return
            logits = self._step(self._remove_finished(sampled.ids))

    def _append(self, sampled: SampledTokens, live: list[int]) -> None:
        """Appends the sampled tokens to the rows at the indices `live`."""
        ids, logp, entropy = sampled.to_lists()
        top = None if sampled.top is None else tuple(part.cpu().numpy() for part in sampled.top)
        for i in live:
            best = None if top is None else (top[0][i], top[1][i])
            self.rows[i].append(ids[i], logp[i], entropy[i], None if sampled.kept is None else sampled.kept[i], best)

    def _sample(self, logits: Tensor) -> SampledTokens:
        sampling = self.call.sampling
        last = sampling.max_tokens - 1
        uniform = [row.uniform_draws[min(len(row.ids), last)] for row in self.rows]
        draws = torch.tensor(uniform, dtype=torch.float64, device=logits.device)
        sampled = sample_tokens(logits, draws, sampling)
        return with_trainer_logps(sampled, logits, sampling.temperature) if self.invariant else sampled

    def _remove_finished(self, tokens: Tensor) -> Tensor:
        """Removes complete rows if there are many; returns the next input token of every remaining row."""
        index = [i for i, row in enumerate(self.rows) if not row.complete]
        share = COMPACT_SHARE_ON_ACCELERATOR if on_accelerator(tokens.device) else COMPACT_SHARE
        if len(self.rows) - len(index) > share * len(self.rows):
            kept = torch.tensor(index, device=tokens.device)
            self.decoder.keep(kept)
            self.rows, tokens = [self.rows[i] for i in index], tokens[kept]
        if self.call.turns is not None:  # rows that wait or get an observation do not run `tokens`
            tokens = torch.tensor([row.ids[-1] for row in self.rows], device=tokens.device)
        return tokens

    def _step(self, tokens: Tensor) -> Tensor:
        waiting = [i for i, row in enumerate(self.rows) if row.waiting]
        paused = torch.tensor(waiting, device=tokens.device) if waiting else None
        logits = self.decoder.step(tokens, paused)
        active = [row.active for row in self.rows]
        if self.recorder is not None:
            self.recorder.step(self.rows, active)
        self.decoded += active.count(True)
        return logits


def _copy_model(model: Any, dtype: torch.dtype) -> Any:
    """Returns a copy in `dtype` without shared storage. Buffers keep their dtype: rotary frequencies stay float32."""
    cast = {id(p): torch.nn.Parameter(p.detach().to(dtype, copy=True), requires_grad=False) for p in model.parameters()}
    result = copy.deepcopy(model, memo=dict(cast)).eval()
    if is_invariant(model):
        return result
    # SDPA has no soft cap on attention scores (Gemma 2) and would silently omit it.
    result.set_attn_implementation("eager" if getattr(result.config, "attn_logit_softcapping", None) else "sdpa")
    return result
