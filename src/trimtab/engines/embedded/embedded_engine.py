"""The embedded engine: batched sampling in this process, in its own numerics."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.engines.embedded.decoder import CachedDecoder, Decoder
from trimtab.engines.embedded.decoding_rows import (
    Prefixes,
    Row,
    abort,
    build_rows,
    check_prefixes,
    check_routes,
    check_tokens,
    plan_prefill,
    record,
)
from trimtab.engines.embedded.expert_recorder import ExpertRecorder, Tape
from trimtab.engines.embedded.fused_llama import FusedLlama, supports
from trimtab.engines.embedded.invariant_decoder import InvariantDecoder, scored
from trimtab.engines.embedded.sampling import draw
from trimtab.engines.embedded.shared_prompt_decoder import SharedPromptDecoder
from trimtab.engines.embedded.weight_quantization import EXACT, WeightQuantization, matrices
from trimtab.engines.request import validate_request
from trimtab.engines.stopping import StopChecker, eos_ids
from trimtab.engines.weight_manifest import WeightManifest
from trimtab.errors import TrimtabError, nearest
from trimtab.models.invariant import is_invariant
from trimtab.models.invariant.invariant_attention import KEYS, up
from trimtab.models.routing import recorded, routers
from trimtab.types import AbortSignal, Completion, Prompt, Sampling

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Keys and values of one batch; more rows are split into several batches, by arguments alone, so that results repeat.
CACHE_BYTES = 2 << 30
# Finished rows leave once they are more than this share of the batch. Any share up to a quarter takes the same time on
# responses of mixed length; moving no rows at all takes 2.6 times as long.
COMPACT_SHARE = 1 / 16


class EmbeddedEngine:
    """Samples from its own copy of a transformers causal model (`types.Engine`).

    The copy lives in `dtype` ("float32" or "bfloat16", or the torch dtype), so that bfloat16 rollouts really differ
    from a float32 trainer; it shares no storage with the model it was made from. `rounding` makes it differ more.
    `routes`: completions hold the experts each token was sent to (`types.Completion.routes`); the model must be a
    mixture of experts whose routers are known (`TrimtabError`). `policy_version` starts at 0.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        dtype: str | torch.dtype = torch.bfloat16,
        *,
        rounding: WeightQuantization = EXACT,
        routes: bool = False,
    ) -> None:
        if isinstance(dtype, str):
            if dtype not in DTYPES:
                raise TrimtabError(f"unknown engine dtype {dtype!r}{nearest(dtype, DTYPES)}")
            dtype = DTYPES[dtype]
        self.policy_version = 0
        self.decoded = 0
        self.prefilled = 0
        self._tokenizer = tokenizer
        self._eos = eos_ids(model, tokenizer)
        self._model = _own_copy(model, dtype)
        self._invariant = is_invariant(self._model)
        self._lean = FusedLlama(self._model) if supports(self._model) else None
        self._inventory = WeightManifest.of(self._model)
        self._rounding = rounding
        self._rounded = matrices(self._model) if rounding.active else ()
        self._routes = routes
        if routes and routers(self._model).layers == 0:
            raise TrimtabError("the engine's model has no experts whose choice could be recorded: it is dense")
        self._round()

    @torch.inference_mode()
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
        """`samples` completions for each prompt, in order.

        Equal arguments and weights give equal tokens: every draw depends on (seed, position of the prompt, sample,
        position of the token) alone. `prefixes[p][s]` holds the first tokens of a response, of any origin; equal
        prefixes of one prompt are run through the model once, and a whole response comes back as it is.

        `interrupt` is looked at before every token. What an interrupted call returned, given back as `prefixes` with
        the same seed, leads under the same weights to the tokens of the uninterrupted call (in float32, and with
        invariant numerics; else keys and values of a prefix are rounded a little differently in bfloat16).

        Raises:
            TrimtabError: a prompt is empty or does not fit the context with `max_tokens`; a prefix is longer than
                `max_tokens`, has ended unnoticed, or does not fit the rest; the sampling contract cannot be met; the
                model's logits are not finite.
        """
        vocabulary = self._model.get_input_embeddings().num_embeddings
        context = getattr(self._model.config, "max_position_embeddings", None)
        validate_request(prompts, samples, sampling, seed, vocabulary=vocabulary, context=context)
        check_prefixes(prefixes, prompts, samples, sampling)
        stop = StopChecker(self._tokenizer, self._eos, sampling)
        check_tokens(prefixes, prompts, stop, vocabulary)
        if self._routes:
            check_routes(prefixes, prompts, routers(self._model))
        rows = build_rows(len(prompts), samples, sampling, seed, prefixes)
        with recorded(self._model) if self._routes else contextlib.nullcontext() as tape:
            for batch in self._batches([row for row in rows if not row.complete], prompts, sampling.max_tokens):
                if interrupt is not None and interrupt.is_set():
                    abort(batch)
                else:
                    self._decode(batch, prompts, sampling, stop, interrupt, tape)
        done = [row.completion(self.policy_version, stop) for row in rows]
        return [done[p * samples : (p + 1) * samples] for p in range(len(prompts))]

    @torch.no_grad()
    def publish(self, weights: Iterable[tuple[str, Any]], version: int, *, exact: bool = False) -> None:
        """Take over named weights; tokens sampled from now on carry `version`.

        Names are those of `model.named_parameters()` or `model.state_dict()`; a tied head may be named or left out.
        Everything is checked before anything is copied. The engine's own rounding is applied, unless `exact`.

        Raises:
            TrimtabError: a name is missing, unknown or repeated, a shape differs, values are not finite, or two names
                of one tied weight carry different values.
        """
        given = self._inventory.check(weights)
        state = self._model.state_dict(keep_vars=True)
        for name, tensor in given.items():
            state[name].data.copy_(tensor)
        self.policy_version = version
        if not exact:
            self._round()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights in use (not copies), by the names `publish` takes; publishing them `exact` changes no bit."""
        return self._model.named_parameters()

    def recover(self) -> None:
        """Nothing to do: it lives and dies with its process."""

    def close(self) -> None:
        """Nothing to do: it started no process."""

    @torch.no_grad()
    def _round(self) -> None:
        """After the copy, so that what is rounded is what this dtype holds."""
        for name in self._rounded:
            weight = self._model.get_parameter(name)
            weight.copy_(self._rounding.apply(name, weight, self.policy_version))

    def _batches(self, rows: list[Row], prompts: Sequence[Prompt], max_tokens: int) -> list[list[Row]]:
        """Rows in batches whose cache stays within `CACHE_BYTES`, prompts of similar length together."""
        if not rows:
            return []
        rows = sorted(rows, key=lambda row: (len(prompts[row.prompt].ids), row.prompt))
        config, longest = self._model.config, len(prompts[rows[-1].prompt].ids)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        places, itemsize = longest + max_tokens, self._model.dtype.itemsize
        if self._invariant:
            places, itemsize = up(longest, KEYS) + up(max_tokens, KEYS), 4
        width = 2 * config.num_hidden_layers * heads * size * itemsize
        most = max(1, CACHE_BYTES // (width * places))
        count = -(-len(rows) // most)
        edges = [len(rows) * i // count for i in range(count + 1)]
        return [rows[start:stop] for start, stop in itertools.pairwise(edges)]

    def _decoder(
        self, rows: list[Row], prompts: Sequence[Prompt], max_tokens: int, recorder: ExpertRecorder | None = None
    ) -> Decoder:
        starts = plan_prefill(rows, prompts, self._model.device)
        if self._invariant:
            return InvariantDecoder(self._model, starts)
        steps = max_tokens - min(row.begun for row in rows)
        window = self._lean.window if self._lean else None
        if self._lean and (window is None or max(len(ids) for ids in starts.prompts) + max_tokens <= window):
            decoder = SharedPromptDecoder(self._lean, starts, steps, recorder)
        else:
            decoder = CachedDecoder(self._model, starts, steps, recorder)
        if recorder is not None:
            recorder.begin(rows, starts.prompt.tolist(), starts.row.tolist())
        return decoder

    def _decode(
        self,
        rows: list[Row],
        prompts: Sequence[Prompt],
        sampling: Sampling,
        stop: StopChecker,
        interrupt: AbortSignal | None,
        tape: Tape | None,
    ) -> None:
        """Grow all rows in lockstep; `live` holds, for each row of the decoder's batch, whether it is still growing."""
        recorder = None if tape is None else ExpertRecorder(tape)
        decoder, last = self._decoder(rows, prompts, sampling.max_tokens, recorder), sampling.max_tokens - 1
        self.prefilled += decoder.prefilled
        logits, live = decoder.first, [True] * len(rows)
        while True:
            uniform = [row.uniforms[min(len(row.ids), last)] for row in rows]
            drawn = draw(logits, torch.tensor(uniform, dtype=torch.float64, device=logits.device), sampling)
            if self._invariant:
                drawn = scored(drawn, logits, sampling.temperature)
            grown = [i for i, growing in enumerate(live) if growing]
            record(rows, grown, drawn)
            for i, ended in zip(grown, stop.ended([rows[i].ids for i in grown]), strict=True):
                if ended:
                    rows[i].finish = "stop"
                live[i] = not ended and len(rows[i].ids) <= last
            growing = live.count(True)
            if not growing:
                return
            if interrupt is not None and interrupt.is_set():
                abort(row for row, alive in zip(rows, live, strict=True) if alive)
                return
            tokens = drawn.ids
            if len(live) - growing > COMPACT_SHARE * len(live):
                index = torch.tensor([i for i, alive in enumerate(live) if alive], device=tokens.device)
                decoder.keep(index)
                rows, live, tokens = (
                    [row for row, alive in zip(rows, live, strict=True) if alive],
                    [True] * growing,
                    tokens[index],
                )
            logits = decoder.step(tokens)
            if recorder is not None:
                recorder.step(rows, live)
            self.decoded += growing


def _own_copy(model: Any, dtype: torch.dtype) -> Any:
    """A copy in `dtype` that shares no storage. Buffers keep their dtype: rotary frequencies must not be rounded."""
    cast = {id(p): torch.nn.Parameter(p.detach().to(dtype, copy=True), requires_grad=False) for p in model.parameters()}
    own = copy.deepcopy(model, memo=dict(cast)).eval()
    if is_invariant(model):
        return own
    # SDPA has no soft cap on attention scores (Gemma 2) and would leave it out without a word.
    own.set_attn_implementation("eager" if getattr(own.config, "attn_logit_softcapping", None) else "sdpa")
    return own
