"""Runs one model the sampler's way and the trainer's way over the same texts, for `bitwise/difference.py`.

Sampler: prompts are prefilled together, responses decoded token by token with a cache, in batches of several sizes that
rows leave as they end; one response goes on from a prefix. Trainer: one packed pass with gradient. The texts are made
of random ids: no two of them have the same id at the same position once they have parted, so that position and id tell
which token a row of any tensor belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.bitwise.difference import Comparison, compare
from trimtab.bitwise.forward_recorder import Tape, followed, recorded, token_keys
from trimtab.engines.embedded.decoder import CachedDecoder, Decoder
from trimtab.engines.embedded.decoding_rows import PrefillPlan
from trimtab.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.engines.embedded.invariant_decoder import InvariantDecoder
from trimtab.errors import TrimtabError
from trimtab.models.fused_head import log_probs
from trimtab.models.invariant import is_invariant
from trimtab.models.logprobs import TokenBatch, score
from trimtab.types import IntArray

HEAD = "head (log-probs)"
# Lengths of prompts, and of the responses to each: single tokens, and more than one block of keys of either.
LENGTHS = ((1, (3, 70)), (7, (20, 5)), (30, (24, 1)), (90, (16, 12)))
# Responses that are decoded together. One goes on from a prefix, so that few steps take it into the next block of keys.
BATCHES, CONTINUED, PREFIX = ((0, 1, 2, 3, 4, 5), (6, 7)), 1, 6 / 7


@dataclass(frozen=True)
class Texts:
    """`responses[i]` continues `prompts[owner[i]]`."""

    prompts: list[IntArray]
    responses: list[IntArray]
    owner: list[int]

    @property
    def run(self) -> int:
        """Tokens that the trainer runs: of every response all but the last."""
        return sum(map(len, self.prompts)) + sum(map(len, self.responses)) - len(self.responses)


def texts(vocabulary: int, avoid: Sequence[int], context: int | None) -> Texts:
    """Fixed texts within the context, without the ids of `avoid` (padding).

    Raises:
        TrimtabError: the vocabulary is too small to tell the texts apart.
    """
    branches = sum(len(lengths) for _, lengths in LENGTHS)
    allowed = np.setdiff1d(np.arange(vocabulary), np.array([0, *avoid]))
    if len(allowed) < branches:
        raise TrimtabError(f"a vocabulary of {vocabulary} ids is too small: {branches} texts must differ everywhere")
    longest = max(prompt + max(responses) for prompt, responses in LENGTHS)
    share = 1.0 if context is None else min(1.0, context / longest)
    rng = np.random.default_rng(0)
    ids = np.stack([rng.choice(allowed, branches, replace=False) for _ in range(longest)], 1)
    found, branch = Texts([], [], []), 0
    for prompt, responses in LENGTHS:
        start = max(1, int(prompt * share))
        for place, length in enumerate(responses):
            stop = start + max(1, int(length * share))
            found.responses.append(ids[branch + place, start:stop])
            found.owner.append(len(found.prompts))
        found.prompts.append(ids[branch, :start])
        branch += len(responses)
    return found


@dataclass(frozen=True)
class Sides:
    """The engine with its copy of a model, the trained model, and how that is run (autocast)."""

    sampler: EmbeddedEngine
    trainer: Any
    precision: Callable[[], AbstractContextManager[Any]]
    temperature: float = 1.0


def compare_sides(sides: Sides, padding: int) -> Comparison:
    """The first operation whose bits differ between the sampler's way and the trainer's way of running a model.

    Raises:
        TrimtabError: the model cannot be scored, or its vocabulary or context is too small.
    """
    config = sides.trainer.config
    size = sides.trainer.get_input_embeddings().num_embeddings
    found = texts(size, [padding], getattr(config, "max_position_embeddings", None))
    result = compare(lambda tape: _sample(sides, found, tape), lambda tape: _train(sides, found, padding, tape))
    if result.tokens < found.run:
        raise TrimtabError(f"both sides met only {result.tokens} of {found.run} tokens: this model reorders them")
    return result


def _train(sides: Sides, found: Texts, padding: int, tape: Tape) -> None:
    model = sides.trainer
    batch = TokenBatch.pack(found.prompts, found.responses, found.owner, pad_id=padding)
    batch = TokenBatch(*(getattr(batch, name).to(model.device) for name in batch.__dataclass_fields__))
    with torch.enable_grad(), sides.precision(), _listening(model, tape):
        logp = score(model, batch, temperature=sides.temperature).logp
    real = batch.response_mask
    starts = torch.tensor([len(found.prompts[owner]) for owner in found.owner], device=model.device)
    positions = starts[:, None] + torch.arange(real.shape[1], device=model.device)
    _note(tape, positions[real], batch.response_ids[real], logp[real])


@torch.inference_mode()
def _sample(sides: Sides, found: Texts, tape: Tape) -> None:
    with _listening(sides.sampler._model, tape):
        for rows in BATCHES:
            _decode(sides, found, list(rows), tape)


def _decode(sides: Sides, found: Texts, rows: list[int], tape: Tape) -> None:
    model = sides.sampler._model
    done = {row: int(PREFIX * len(found.responses[row])) if row == CONTINUED else 0 for row in rows}
    decoder = _decoder(model, _starts(found, rows, done, model.device))
    logits = decoder.first
    while True:
        ids = torch.tensor([int(found.responses[row][done[row]]) for row in rows], device=model.device)
        places = torch.tensor([len(found.prompts[found.owner[row]]) + done[row] for row in rows], device=model.device)
        _note(tape, places, ids, _log_probs(model, logits, ids, sides.temperature))
        for row in rows:
            done[row] += 1
        alive = [index for index, row in enumerate(rows) if done[row] < len(found.responses[row])]
        if not alive:
            return
        if len(alive) < len(rows):
            index = torch.tensor(alive, device=model.device)
            decoder.keep(index)
            rows, ids = [rows[i] for i in alive], ids[index]
        logits = decoder.step(ids)


def _decoder(model: Any, starts: PrefillPlan) -> Decoder:
    """A decoder that runs the model's own modules; the native engine's lean one has other, fused ones."""
    if is_invariant(model):
        return InvariantDecoder(model, starts)
    return CachedDecoder(model, starts, max(max(lengths) for _, lengths in LENGTHS))


def _log_probs(model: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    if is_invariant(model):
        return log_probs(logits, ids, temperature).float()
    return (logits.float() / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]


def _starts(found: Texts, rows: Sequence[int], done: dict[int, int], device: torch.device) -> PrefillPlan:
    used = list(dict.fromkeys(found.owner[row] for row in rows))
    starts = list(dict.fromkeys((used.index(found.owner[row]), row if done[row] else None) for row in rows))
    texts = [() if row is None else found.responses[row][: done[row]] for _, row in starts]
    return PrefillPlan(
        prompts=[torch.from_numpy(found.prompts[prompt]).to(device) for prompt in used],
        prefixes=[torch.tensor(np.array(text, dtype=np.int64), device=device) for text in texts],
        prompt=torch.tensor([prompt for prompt, _ in starts], device=device),
        row=torch.tensor(
            [starts.index((used.index(found.owner[row]), row if done[row] else None)) for row in rows], device=device
        ),
    )


def _note(tape: Tape, positions: Tensor, ids: Tensor, logp: Tensor) -> None:
    """The log-prob of each token, as what the head made."""
    tape.begin(token_keys(positions, ids))
    tape.add(tape.call(HEAD, "head"), "output", logp)


@contextmanager
def _listening(model: Any, tape: Tape) -> Iterator[None]:
    """Hear everything of a model but its head, which the trainer never runs as a module."""
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    with followed(model.base_model, tape), recorded(model, tape, skip=frozenset({head})):
        yield
