"""Runs one model as the sampler and as the trainer do, over the same texts, for `trainer/bitwise/difference.py`.

Sampler: prompts are prefilled together and responses decoded token by token with a cache, in batches of several sizes
from which finished rows are removed; one response continues a prefix. Trainer: one packed pass with gradient. The texts
consist of random ids, and no two of them have the same id at the same position after their common prefix, so that
position and id identify the token that a row of any tensor belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.trainer.bitwise.difference import Comparison, compare_implementations
from trimtab.trainer.bitwise.forward_recorder import ForwardRecording, record_forward, record_tokens, token_keys
from trimtab.trainer.engines.decoding_rows import PrefillPlan
from trimtab.trainer.engines.embedded.decoder import CachedDecoder, Decoder
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.embedded.invariant_decoder import InvariantDecoder
from trimtab.trainer.models.fused_head import log_probs
from trimtab.trainer.models.invariant import is_invariant
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.types import IntArray

HEAD = "head (log-probs)"
# Lengths of prompts, and of the responses to each: from single tokens to more than one block of keys.
LENGTHS = ((1, (3, 70)), (7, (20, 5)), (30, (24, 1)), (90, (16, 12)))
# Responses that are decoded together. One continues a prefix, so that it reaches the next block of keys in few steps.
BATCHES, CONTINUED, PREFIX = ((0, 1, 2, 3, 4, 5), (6, 7)), 1, 6 / 7


@dataclass(frozen=True)
class SampleTexts:
    """The fixed texts: `responses[i]` continues `prompts[owner[i]]`."""

    prompts: list[IntArray]
    responses: list[IntArray]
    owner: list[int]

    @property
    def run(self) -> int:
        """The number of tokens that the trainer runs: all but the last of every response."""
        return sum(map(len, self.prompts)) + sum(map(len, self.responses)) - len(self.responses)


def make_texts(vocabulary: int, avoid: Sequence[int], context: int | None) -> SampleTexts:
    """Returns fixed texts that fit the context, without the ids of `avoid` (padding).

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
    texts, branch = SampleTexts([], [], []), 0
    for prompt, responses in LENGTHS:
        start = max(1, int(prompt * share))
        for index, length in enumerate(responses):
            stop = start + max(1, int(length * share))
            texts.responses.append(ids[branch + index, start:stop])
            texts.owner.append(len(texts.prompts))
        texts.prompts.append(ids[branch, :start])
        branch += len(responses)
    return texts


@dataclass(frozen=True)
class SamplerAndTrainer:
    """The engine with its copy of a model, the trained model, and the autocast context of the latter."""

    sampler: EmbeddedEngine
    trainer: Any
    precision: Callable[[], AbstractContextManager[Any]]
    temperature: float = 1.0


def compare_sampler_and_trainer(sides: SamplerAndTrainer, padding: int) -> Comparison:
    """Returns the first operation whose bits differ between sampler and trainer.

    Raises:
        TrimtabError: the model cannot be scored, or its vocabulary or context is too small.
    """
    config = sides.trainer.config
    size = sides.trainer.get_input_embeddings().num_embeddings
    texts = make_texts(size, [padding], getattr(config, "max_position_embeddings", None))
    result = compare_implementations(
        lambda recording: _run_sampler(sides, texts, recording),
        lambda recording: _run_trainer(sides, texts, padding, recording),
    )
    if result.tokens < texts.run:
        raise TrimtabError(f"both sides ran only {result.tokens} of {texts.run} tokens: this model reorders them")
    return result


def _run_trainer(sides: SamplerAndTrainer, texts: SampleTexts, padding: int, recording: ForwardRecording) -> None:
    model = sides.trainer
    batch = TokenBatch.pack(texts.prompts, texts.responses, texts.owner, pad_id=padding)
    batch = batch.to(model.device)
    with torch.enable_grad(), sides.precision(), _recorded(model, recording):
        logp = score(model, batch, temperature=sides.temperature).logp
    real = batch.response_mask
    starts = torch.tensor([len(texts.prompts[owner]) for owner in texts.owner], device=model.device)
    positions = starts[:, None] + torch.arange(real.shape[1], device=model.device)
    _record_logps(recording, positions[real], batch.response_ids[real], logp[real])


@torch.inference_mode()
def _run_sampler(sides: SamplerAndTrainer, texts: SampleTexts, recording: ForwardRecording) -> None:
    with _recorded(sides.sampler._model, recording):
        for rows in BATCHES:
            _decode(sides, texts, list(rows), recording)


def _decode(sides: SamplerAndTrainer, texts: SampleTexts, rows: list[int], recording: ForwardRecording) -> None:
    model = sides.sampler._model
    done = {row: int(PREFIX * len(texts.responses[row])) if row == CONTINUED else 0 for row in rows}
    decoder = _decoder(model, _prefill_plan(texts, rows, done, model.device))
    logits = decoder.first
    while True:
        ids = torch.tensor([int(texts.responses[row][done[row]]) for row in rows], device=model.device)
        positions = torch.tensor(
            [len(texts.prompts[texts.owner[row]]) + done[row] for row in rows], device=model.device
        )
        _record_logps(recording, positions, ids, _log_probs(model, logits, ids, sides.temperature))
        for row in rows:
            done[row] += 1
        alive = [index for index, row in enumerate(rows) if done[row] < len(texts.responses[row])]
        if not alive:
            return
        if len(alive) < len(rows):
            index = torch.tensor(alive, device=model.device)
            decoder.keep(index)
            rows, ids = [rows[i] for i in alive], ids[index]
        logits = decoder.step(ids)


def _decoder(model: Any, starts: PrefillPlan) -> Decoder:
    """Returns a decoder that runs the model's own modules, unlike `SharedPromptDecoder`, whose modules are fused."""
    if is_invariant(model):
        return InvariantDecoder(model, starts)
    return CachedDecoder(model, starts, max(max(lengths) for _, lengths in LENGTHS))


def _log_probs(model: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    if is_invariant(model):
        return log_probs(logits, ids, temperature).float()
    return (logits.float() / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]


def _prefill_plan(texts: SampleTexts, rows: Sequence[int], done: dict[int, int], device: torch.device) -> PrefillPlan:
    prompts = list(dict.fromkeys(texts.owner[row] for row in rows))
    start_of = [(prompts.index(texts.owner[row]), row if done[row] else None) for row in rows]
    starts = list(dict.fromkeys(start_of))
    prefixes = [() if row is None else texts.responses[row][: done[row]] for _, row in starts]
    return PrefillPlan(
        prompts=[torch.from_numpy(texts.prompts[prompt]).to(device) for prompt in prompts],
        prefixes=[torch.tensor(np.array(prefix, dtype=np.int64), device=device) for prefix in prefixes],
        prompt=torch.tensor([prompt for prompt, _ in starts], device=device),
        row=torch.tensor([starts.index(start) for start in start_of], device=device),
    )


def _record_logps(recording: ForwardRecording, positions: Tensor, ids: Tensor, logp: Tensor) -> None:
    """Records the log-prob of each token as the output of the head."""
    recording.begin(token_keys(positions, ids))
    recording.add(recording.call(HEAD, "head"), "output", logp)


@contextmanager
def _recorded(model: Any, recording: ForwardRecording) -> Iterator[None]:
    """Records all modules of a model except its head, which the trainer never runs as a module."""
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    with record_tokens(model.base_model, recording), record_forward(model, recording, skip=frozenset({head})):
        yield
