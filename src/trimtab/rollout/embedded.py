"""The engine that needs nothing but the model: batched sampling in this process, in its own numerics."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.errors import TrimtabError, nearest
from trimtab.rollout.decoder import Decoder, GenericDecoder
from trimtab.rollout.lean import LeanDecoder, LeanModel, supports
from trimtab.rollout.sampling import draw, uniforms
from trimtab.rollout.stops import StopRule, eos_ids
from trimtab.types import Completion, Finish, Prompt, Sampling

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Keys and values of one batch; more rows are split into several batches, by arguments alone, so that results repeat.
CACHE_BYTES = 2 << 30
# Finished rows leave once they are more than this share of the batch. Any share up to a quarter takes the same time on
# responses of mixed length; moving no rows at all takes 2.6 times as long.
COMPACT_SHARE = 1 / 16


@dataclass(slots=True)
class _Row:
    """One response while it grows."""

    prompt: int
    sample: int
    uniforms: NDArray[np.float64]
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    kept: list[NDArray[np.int64]] = field(default_factory=list)
    finish: Finish = "length"


class EmbeddedEngine:
    """Samples from its own copy of a transformers causal model (`types.Engine`).

    The copy lives in `dtype` ("float32" or "bfloat16", or the torch dtype), so that bfloat16 rollouts really differ
    from a float32 trainer; it shares no storage with the model it was made from. `policy_version` starts at 0.
    """

    def __init__(self, model: Any, tokenizer: Any, dtype: str | torch.dtype = torch.bfloat16) -> None:
        if isinstance(dtype, str):
            if dtype not in DTYPES:
                raise TrimtabError(f"unknown engine dtype {dtype!r}{nearest(dtype, DTYPES)}")
            dtype = DTYPES[dtype]
        self.policy_version = 0
        self._tokenizer = tokenizer
        self._eos = eos_ids(model, tokenizer)
        self._model = _own_copy(model, dtype)
        self._lean = LeanModel(self._model) if supports(self._model) else None
        self._aliases = _aliases(self._model)

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Prompt], samples: int, sampling: Sampling, *, seed: int
    ) -> list[list[Completion]]:
        """`samples` completions for each prompt, in order.

        Equal arguments and weights give equal tokens: every draw depends on (seed, position of the prompt, sample,
        position of the token) alone.

        Raises:
            TrimtabError: a prompt is empty or does not fit the context with `max_tokens`; the sampling contract cannot
                be met; the model's logits are not finite.
        """
        self._check(prompts, samples, sampling, seed)
        stop = StopRule(self._tokenizer, self._eos, sampling)
        rows = [
            _Row(p, s, uniforms(seed, p, s, sampling.max_tokens)) for p in range(len(prompts)) for s in range(samples)
        ]
        for batch in self._batches(rows, prompts, sampling.max_tokens):
            self._decode(batch, prompts, sampling, stop)
        done = [self._completion(row, stop) for row in rows]
        return [done[p * samples : (p + 1) * samples] for p in range(len(prompts))]

    @torch.no_grad()
    def publish(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Take over named weights; tokens sampled from now on carry `version`.

        Names are those of `model.named_parameters()` or `model.state_dict()`; a tied head may be named or left out.
        Everything is checked before anything is copied.

        Raises:
            TrimtabError: a name is missing, unknown or repeated, a shape differs, values are not finite, or two names
                of one tied weight carry different values.
        """
        given: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name in given:
                raise TrimtabError(f"weight {name!r} was published twice; publish each name once")
            given[name] = tensor.detach()
        state = self._model.state_dict(keep_vars=True)
        updates = {}
        for name, tensor in given.items():
            if name not in state:
                raise TrimtabError(f"weight {name!r} is not in the engine's model{nearest(name, state)}")
            if tensor.shape != state[name].shape:
                shapes = f"{tuple(tensor.shape)}, the engine's is {tuple(state[name].shape)}"
                raise TrimtabError(f"weight {name!r} has shape {shapes}; publish merged weights of the same model")
            first = updates.setdefault(self._aliases.get(name, name), tensor)
            if first is not tensor and first.data_ptr() != tensor.data_ptr() and not torch.equal(first, tensor):
                raise TrimtabError(
                    f"weight {name!r} is tied in the engine but differs from its twin; tie them or publish one name"
                )
        missing = [name for name, _ in self._model.named_parameters() if name not in updates]
        if missing:
            raise TrimtabError(
                f"weight {missing[0]!r} is missing ({len(missing)} in all); publish every weight of the model"
            )
        for name, tensor in updates.items():
            # A sum is one cheap pass, and finite but for overflow; only a suspicious one is looked at closely.
            if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
                raise TrimtabError(
                    f"weight {name!r} has non-finite values; the engine keeps version {self.policy_version}"
                )
        for name, tensor in updates.items():
            state[name].data.copy_(tensor)
        self.policy_version = version

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights in use (not copies), by the names `publish` takes; publishing them again changes no bit."""
        return self._model.named_parameters()

    def _check(self, prompts: Sequence[Prompt], samples: int, sampling: Sampling, seed: int) -> None:
        if samples < 1 or sampling.max_tokens < 1:
            raise TrimtabError(f"samples = {samples}, max_tokens = {sampling.max_tokens}: both must be at least 1")
        if seed < 0:
            raise TrimtabError(f"seed = {seed}: it must not be negative")
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            values = f"temperature = {sampling.temperature}, top_p = {sampling.top_p}, top_k = {sampling.top_k}"
            raise TrimtabError(f"{values}: need temperature >= 0, 0 < top_p <= 1, top_k >= 0")
        if sampling.logprobs != "processed":
            raise TrimtabError(
                'this engine returns "processed" log-probs only: those of the distribution it samples from'
            )
        context = getattr(self._model.config, "max_position_embeddings", None)
        vocabulary = self._model.get_input_embeddings().num_embeddings
        for prompt in prompts:
            length = len(prompt.ids)
            if length == 0:
                raise TrimtabError(f"prompt {prompt.problem.id!r} has no tokens; there is nothing to continue")
            if np.min(prompt.ids) < 0 or np.max(prompt.ids) >= vocabulary:
                raise TrimtabError(
                    f"prompt {prompt.problem.id!r} has token ids outside the model's vocabulary of {vocabulary}; "
                    "encode it with the model's own tokenizer"
                )
            if context is not None and length + sampling.max_tokens > context:
                raise TrimtabError(
                    f"prompt {prompt.problem.id!r} has {length} tokens and max_tokens is {sampling.max_tokens}, "
                    f"but the model's context holds {context}; shorten the prompt or lower max_tokens"
                )

    def _batches(self, rows: list[_Row], prompts: Sequence[Prompt], max_tokens: int) -> list[list[_Row]]:
        """Rows in batches whose cache stays within `CACHE_BYTES`, prompts of similar length together."""
        if not rows:
            return []
        rows = sorted(rows, key=lambda row: (len(prompts[row.prompt].ids), row.prompt))
        config, longest = self._model.config, len(prompts[rows[-1].prompt].ids)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = 2 * config.num_hidden_layers * heads * size * self._model.dtype.itemsize
        most = max(1, CACHE_BYTES // (width * (longest + max_tokens)))
        count = -(-len(rows) // most)
        edges = [len(rows) * i // count for i in range(count + 1)]
        return [rows[start:stop] for start, stop in itertools.pairwise(edges)]

    def _decoder(self, rows: list[_Row], prompts: Sequence[Prompt], max_tokens: int) -> tuple[Decoder, Tensor]:
        device = self._model.device
        used = list(dict.fromkeys(row.prompt for row in rows))
        ids = [torch.as_tensor(prompts[p].ids, dtype=torch.int64, device=device) for p in used]
        position = {p: i for i, p in enumerate(used)}
        owner = torch.tensor([position[row.prompt] for row in rows], device=device)
        window = self._lean.window if self._lean else None
        if self._lean and (window is None or max(len(x) for x in ids) + max_tokens <= window):
            return LeanDecoder(self._lean, ids, owner, max_tokens), owner
        return GenericDecoder(self._model, ids, owner, max_tokens), owner

    def _decode(self, rows: list[_Row], prompts: Sequence[Prompt], sampling: Sampling, stop: StopRule) -> None:
        """Grow all rows in lockstep; `live` holds, for each row of the decoder's batch, whether it is still growing."""
        decoder, owner = self._decoder(rows, prompts, sampling.max_tokens)
        logits = decoder.first[owner]
        live = [True] * len(rows)
        for t in range(sampling.max_tokens):
            uniform = torch.tensor([row.uniforms[t] for row in rows], dtype=torch.float64, device=logits.device)
            drawn = draw(logits, uniform, sampling)
            grown = [i for i, growing in enumerate(live) if growing]
            _record(rows, grown, drawn)
            for i, ended in zip(grown, stop.ended([rows[i].ids for i in grown]), strict=True):
                if ended:
                    rows[i].finish, live[i] = "stop", False
            if t + 1 == sampling.max_tokens or not any(live):
                return
            tokens = drawn.ids
            if live.count(False) > COMPACT_SHARE * len(live):
                index = torch.tensor([i for i, growing in enumerate(live) if growing], device=tokens.device)
                decoder.keep(index)
                rows, live, tokens = (
                    [row for row, growing in zip(rows, live, strict=True) if growing],
                    [True] * len(index),
                    tokens[index],
                )
            logits = decoder.step(tokens)

    def _completion(self, row: _Row, stop: StopRule) -> Completion:
        return Completion(
            response_ids=np.array(row.ids, dtype=np.int64),
            logp_behavior=np.array(row.logp, dtype=np.float32),
            policy_version=np.full(len(row.ids), self.policy_version, dtype=np.int64),
            finish=row.finish,
            text=stop.text(row.ids),
            entropy=np.array(row.entropy, dtype=np.float32),
            kept=tuple(row.kept) if row.kept else None,
        )


def _record(rows: list[_Row], grown: list[int], drawn: Any) -> None:
    ids, logp, entropy = drawn.ids.tolist(), drawn.logp.tolist(), drawn.entropy.tolist()
    for i in grown:
        row = rows[i]
        row.ids.append(ids[i])
        row.logp.append(logp[i])
        row.entropy.append(entropy[i])
        if drawn.kept is not None:
            row.kept.append(drawn.kept[i])


def _own_copy(model: Any, dtype: torch.dtype) -> Any:
    """A copy in `dtype` that shares no storage. Buffers keep their dtype: rotary frequencies must not be rounded."""
    cast = {id(p): torch.nn.Parameter(p.detach().to(dtype, copy=True), requires_grad=False) for p in model.parameters()}
    own = copy.deepcopy(model, memo=dict(cast)).eval()
    # SDPA has no soft cap on attention scores (Gemma 2) and would leave it out without a word.
    own.set_attn_implementation("eager" if getattr(own.config, "attn_logit_softcapping", None) else "sdpa")
    return own


def _aliases(model: Any) -> dict[str, str]:
    """Every further name of a tied parameter -> the name `named_parameters` uses for it."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != name}
