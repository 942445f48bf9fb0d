"""Log-probs and entropy of response tokens: one function for scoring (no grad) and training.

    real tokens of prompts and responses, one packed row --backbone--> hidden states --head--> scores

A group's responses share one pass over their prompt (`packed_attention.py`), padding is never run, and only positions
that predict a response token reach the head (`fused_head.py`), which works in tiles.

All passes over a micro-batch, with and without gradient, have the same numerics.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int16
from numpy.typing import NDArray
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.trainer.models.architecture import ModelParts, model_parts
from trimtab.trainer.models.fused_head import HeadScores, token_scores
from trimtab.trainer.models.matmul import MULTIPLE, padding_rows
from trimtab.trainer.models.packed_attention import PackedLayout
from trimtab.trainer.models.routing import record_routing, replay_routing
from trimtab.trainer.models.sharding import with_full_weights

IntRow = NDArray[np.int64]


@dataclass(frozen=True)
class TokenBatch:
    """A micro-batch. Prompts are padded on the left, responses on the right; the values at padding have no effect."""

    prompt_ids: Int[Tensor, "prompts prompt_time"]
    prompt_mask: Bool[Tensor, "prompts prompt_time"]
    response_ids: Int[Tensor, "batch time"]
    response_mask: Bool[Tensor, "batch time"]
    prompt_index: Int[Tensor, " batch"]  # which row of prompt_ids a response continues

    @classmethod
    def pack(
        cls, prompts: Sequence[IntRow], responses: Sequence[IntRow], prompt_index: Sequence[int], *, pad_id: int
    ) -> TokenBatch:
        """Pads rows of token ids: `responses[i]` continues `prompts[prompt_index[i]]`.

        Raises `TrimtabError` for an empty prompt (its response's first token would have no distribution).
        """
        if empty := [i for i, row in enumerate(prompts) if len(row) == 0]:
            raise TrimtabError(f"prompt {empty[0]} has no tokens; start it with the model's beginning-of-text token")
        prompt_ids, prompt_mask = _pad(prompts, pad_id, left=True)
        response_ids, response_mask = _pad(responses, pad_id, left=False)
        return cls(prompt_ids, prompt_mask, response_ids, response_mask, torch.tensor(list(prompt_index)).long())

    @cached_property
    def places(self) -> TokenPlaces:
        """The indices of the tokens."""
        return TokenPlaces.of(self)

    def to(self, device: torch.device) -> TokenBatch:
        """Copies the batch to a device. `places` are computed before, so that no forward has to wait for the device."""
        moved = TokenBatch(**{item.name: getattr(self, item.name).to(device) for item in fields(self)})
        moved.__dict__["places"] = self.places.to(device)
        return moved

    def at_tokens(self, values: Float[Tensor, "batch time *x"] | Int[Tensor, "batch time *x"]) -> Tensor:
        """Returns the values at response tokens, row by row, (tokens, *x)."""
        return values.flatten(0, 1).index_select(0, self.places.real)

    def padded(self, values: Float[Tensor, "tokens *x"]) -> Float[Tensor, "batch time *x"]:
        """Returns values of response tokens as padded rows, with 0 at padding: the inverse of `at_tokens`."""
        flat = values.new_zeros(self.response_ids.numel(), *values.shape[1:])
        return flat.index_copy(0, self.places.real, values).unflatten(0, self.response_ids.shape)


@dataclass(frozen=True, eq=False)
class TokenPlaces:
    """Where the tokens of a micro-batch are, as indices into its flattened tensors and into the packed row."""

    prompt: Int[Tensor, " prompt_tokens"]
    real: Int[Tensor, " tokens"]  # response tokens
    run: Int[Tensor, " run_tokens"]  # response tokens that the model runs: all but the last of a row
    positions: Int[Tensor, " packed"]  # of each packed token in its own sequence
    source: Int[Tensor, " tokens"]  # the packed token that predicts each response token
    layout: PackedLayout
    lengths: tuple[int, ...]  # of responses, in tokens

    @classmethod
    def of(cls, batch: TokenBatch) -> TokenPlaces:
        prompt, real, device = batch.prompt_mask, batch.response_mask, batch.response_mask.device
        columns, lengths = torch.arange(real.shape[1], device=device), prompt.sum(-1)
        run = real & (columns < real.sum(-1, keepdim=True) - 1)
        layout = PackedLayout.build(prompt, run, batch.prompt_index)
        positions = lengths[batch.prompt_index, None] + columns
        last = (lengths.cumsum(0) - 1)[batch.prompt_index, None]
        packed = torch.zeros_like(batch.response_ids)
        packed[run] = torch.arange(layout.prompts.stop, layout.responses.stop, device=device)
        return cls(
            prompt=prompt.flatten().nonzero()[:, 0],
            real=real.flatten().nonzero()[:, 0],
            run=run.flatten().nonzero()[:, 0],
            positions=torch.cat([(prompt.cumsum(-1) - 1)[prompt], positions[run]]),
            source=torch.cat([last, packed[:, :-1]], dim=1)[real],
            layout=layout,
            lengths=tuple(real.sum(-1).tolist()),
        )

    def to(self, device: torch.device) -> TokenPlaces:
        moved = [item.name for item in fields(self) if item.name != "lengths"]
        return replace(self, **{name: getattr(self, name).to(device) for name in moved})


def pack_kept(kept: Sequence[Sequence[IntRow]], time: int) -> Int[Tensor, "batch time k"]:
    """Packs sampling masks (the vocabulary ids each token was drawn from) into one tensor, padded with -1."""
    width = max((len(ids) for row in kept for ids in row), default=1)
    packed = np.full((len(kept), time, max(width, 1)), -1, dtype=np.int64)
    for i, row in enumerate(kept):
        for t, ids in enumerate(row):
            packed[i, t, : len(ids)] = ids
    return torch.from_numpy(packed)


def _pad(rows: Sequence[IntRow], pad_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    width = max([1, *(len(row) for row in rows)])
    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.bool_)
    for i, row in enumerate(rows):
        real = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, real] = row
        mask[i, real] = True
    return torch.from_numpy(ids), torch.from_numpy(mask)


class TokenScores(NamedTuple):
    """Scores of each response token in float32 (float64 for a float64 model); exactly 0 without gradient at padding."""

    logp: Float[Tensor, "batch time"]
    entropy: Float[Tensor, "batch time"] | None  # nats
    routes: Int16[Tensor, "run layers chosen"] | None = None  # the routers' own choices, if `record`
    head: Float[Tensor, "batch time k"] | None = None  # log-probs of the ids in `head`; -inf for an id of -1
    squares: Float[Tensor, "batch time"] | None = None  # sum of p^2 over the vocabulary, no gradient


def score(
    model: Any,
    batch: TokenBatch,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    kept: Int[Tensor, "batch time k"] | None = None,
    routes: Int16[Tensor, "run layers chosen"] | None = None,
    record: bool = False,
    head: Int[Tensor, "batch time k"] | None = None,
    squares: bool = False,
) -> TokenScores:
    """Returns the log-prob of every response token under softmax(logits / temperature), optionally with its entropy.

    Entropies are in nats. The caller's grad mode and autocast apply. `kept`: each token's ids (padded with -1) to
    renormalize its distribution over, which replays top-p/top-k sampling. `head`: further ids to score at each token,
    padded with -1. `squares`: also the sum of p^2. `routes`: experts to replay, in the order of the packed row.
    `record`: also the experts that the routers chose, or with `routes` would have chosen themselves.

    The log-prob of a token outside its own sampling mask is NaN: a check would wait for the device. Raises
    `TrimtabError` as `model_parts` does, and for a temperature that is not positive, or routes of another model.
    """
    if not temperature > 0:
        raise TrimtabError(f"temperature {temperature} must be positive to score")
    places, chosen = batch.places, None

    def work() -> HeadScores:
        nonlocal chosen
        parts = model_parts(model)
        with (
            nullcontext() if routes is None else replay_routing(model, routes.to(places.run.device)),
            record_routing(model) if record else nullcontext() as tape,
        ):
            hidden = _packed_hidden(parts, batch)
        chosen = None if tape is None else tape.take()
        return token_scores(
            hidden,
            batch.at_tokens(batch.response_ids),
            parts,
            temperature=temperature,
            entropy=entropy,
            kept=None if kept is None else batch.at_tokens(kept),
            further=None if head is None else batch.at_tokens(head),
            squares=squares,
        )

    scores = with_full_weights(model, work)
    if kept is not None:
        inside = (batch.at_tokens(kept) == batch.at_tokens(batch.response_ids)[:, None]).any(-1)
        scores = scores._replace(logp=scores.logp.where(inside, torch.nan))
    entropies, further, sums = (None if part is None else batch.padded(part) for part in scores[1:])
    return TokenScores(batch.padded(scores.logp), entropies, chosen, further, sums)


def _packed_hidden(model: ModelParts, batch: TokenBatch) -> Float[Tensor, "tokens hidden"]:
    """Returns the hidden states that predict the response tokens, row by row; runs every prompt once, and no padding.

    For an invariant model on a CPU, fillers are appended: otherwise every product would copy its rows to pad them.
    """
    places = batch.places
    ids = torch.cat([batch.prompt_ids.flatten()[places.prompt], batch.response_ids.flatten()[places.run]])
    fillers = padding_rows(len(ids), MULTIPLE) if model.invariant and ids.is_cpu else 0
    hidden = model.backbone(
        input_ids=F.pad(ids, (0, fillers))[None],
        position_ids=F.pad(places.positions, (0, fillers))[None],
        # transformers passes a 4-D mask through unchanged; the layout determines which token attends to which.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),
        layout=replace(places.layout, masks={}),  # masks are as large as scores: kept for one forward only
        use_cache=False,
    ).last_hidden_state[0]
    return hidden.index_select(0, places.source)
