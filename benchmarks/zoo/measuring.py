"""Measures streams: a model samples, another scores the same tokens at every temperature, and both are saved."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import DynamicCache

from trimtab.types import Completion, Prompt, SamplingParams, TopTokens
from zoo.bases import FOLDER
from zoo.streams import Stream
from zoo.synthetic import TRAINER_AT

KEPT_BITS = 16
"""Bits of the mantissa that are saved where sampler and trainer differ by more than float32 arithmetic."""


@dataclass(frozen=True, eq=False)
class Response:
    """One sampled response and what belongs to it. rows: columns of the response."""

    prompt: np.ndarray
    completion: Completion
    rows: dict[str, int]

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.completion.response_ids])


def responses_of(prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]], **rows: int) -> list[Response]:
    return [
        Response(prompt.ids, one, {"prompt": number, "prompt_length": len(prompt.ids), **rows})
        for number, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
        for one in group
    ]


def plain_model(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A copy of a loaded model that runs as transformers runs it."""
    other = copy.deepcopy(model).to(dtype).eval()
    other.set_attn_implementation("sdpa")
    return other


BATCH_BYTES = 1 << 27
"""Size of the logits of a batch."""


def alike(responses: Sequence[Response], vocabulary: int) -> Iterator[tuple[list[int], Tensor, int]]:
    """Yields batches of responses of equal shape: their indices, ids of prompt and response, and response length."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for index, response in enumerate(responses):
        shapes.setdefault((len(response.prompt), len(response.completion.response_ids)), []).append(index)
    for (_, count), members in shapes.items():
        rows = max(1, BATCH_BYTES // (4 * count * vocabulary))
        for start in range(0, len(members), rows):
            part = members[start : start + rows]
            yield part, torch.from_numpy(np.stack([responses[i].ids for i in part])), count


@torch.inference_mode()
def logits(model: Any, responses: Sequence[Response], *, autocast: bool = False) -> Iterator[tuple[int, Tensor]]:
    """Yields (index, logits of all its positions in float32) for every response."""
    for part, ids, count in alike(responses, model.config.vocab_size):
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            out = model(ids[:, :-1], logits_to_keep=count).logits
        yield from zip(part, out.float(), strict=True)


def at(scores: Tensor, response: Response, temperature: float = 1.0) -> np.ndarray:
    """The log-probs of a response's tokens."""
    ids = torch.from_numpy(response.completion.response_ids)[:, None]
    return torch.log_softmax(scores.double() / temperature, -1).gather(1, ids)[:, 0].numpy()


def within(scores: Tensor, response: Response, temperature: float) -> np.ndarray:
    """The same, renormalized over the ids that each token was drawn from."""
    kept = response.completion.sampling_mask
    if kept is None:
        return at(scores, response, temperature)
    own = at(scores, response, temperature)
    whole = torch.log_softmax(scores.double() / temperature, -1)
    return own - np.array([float(whole[i, torch.from_numpy(ids)].logsumexp(0)) for i, ids in enumerate(kept)])


def stream(
    responses: Sequence[Response],
    trainer: Any,
    sampling: SamplingParams,
    *,
    sampler: Any = None,
    autocast: bool = False,
    conditions: bool = False,
    turns: bool = False,
) -> Stream:
    """Scores responses. `sampler`: adds its own log-probs before temperature and truncation, `raw`, and the trainer's.

    conditions: adds the trainer's log-probs at other temperatures. turns: adds the mask and the number of the turn.
    """
    found: list[dict[str, np.ndarray]] = [{} for _ in responses]
    for index, scores in logits(trainer, responses, autocast=autocast):
        response, one = responses[index], responses[index].completion
        columns = found[index]
        columns["ids"], columns["behavior"] = one.response_ids.astype(np.int32), one.logp_behavior
        columns["trainer"] = within(scores, response, sampling.temperature)
        if one.top is not None:
            columns["top"] = one.top.logps[:, 0]
        if turns:
            columns["mask"], columns["turn"] = one.sampled, one.turn.astype(np.int32)
        if conditions:
            columns |= {name: at(scores, response, t) for name, t in TRAINER_AT.items()}
        if sampler is not None:
            columns["trainer_raw"] = at(scores, response)
    if sampler is not None:
        for index, scores in logits(sampler, responses):
            found[index]["raw"] = at(scores, responses[index])
    starts = np.append(0, np.cumsum([len(response.completion.response_ids) for response in responses]))
    rows = {name: np.array([response.rows[name] for response in responses]) for name in responses[0].rows}
    return Stream(starts, {name: np.concatenate([one[name] for one in found]) for name in found[0]}, rows)


def save(name: str, measured: Stream) -> None:
    """Writes a stream. The last bits of log-probs are dropped, which their noise does not reach."""
    fine = measured.k3 < 1e-9
    offsets = pa.array(measured.starts, pa.int32())
    columns: dict[str, Any] = {}
    for key, values in measured.tokens.items():
        kept = values if values.dtype.kind != "f" or fine else _shortened(values)
        flat = pa.array(kept.astype(np.float32) if kept.dtype.kind == "f" else kept)
        columns[key] = pa.ListArray.from_arrays(offsets, flat)
    columns |= {key: pa.array(values.astype(np.int32)) for key, values in measured.rows.items()}
    table = pa.table(columns)
    floats = [f"{key}.list.element" for key, values in measured.tokens.items() if values.dtype.kind == "f"]
    file = FOLDER / f"{name}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        table,
        file,
        compression="zstd",
        compression_level=15,
        use_dictionary=[key for key in table.column_names if f"{key}.list.element" not in floats],
        use_byte_stream_split=floats,
    )
    size = file.stat().st_size
    print(
        f"{name}: {measured.responses} responses, {len(measured)} tokens, k3 {measured.k3:.2e}, {size:,} bytes",
        flush=True,
    )


def _shortened(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    drop = 23 - KEPT_BITS
    return ((bits + (1 << (drop - 1))) & np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)).view(np.float32)


@torch.inference_mode()
def sample_with_cache(
    model: Any, older: Any, prompt: np.ndarray, cached: int, samples: int, sampling: SamplingParams, seed: int
) -> list[Completion]:
    """Samples as an engine does whose cache holds the first `cached` tokens of the prompt as `older` weights left them.

    The tokens after these, and those of the response, are run through `model`; the last token of a prompt always is.
    """
    cached = min(cached, len(prompt) - 1)
    ids, cache = torch.from_numpy(prompt[None]), DynamicCache(config=model.config)
    if cached:
        older(ids[:, :cached], past_key_values=cache)
    scores = model(ids[:, cached:], past_key_values=cache).logits[:, -1].repeat(samples, 1)
    cache.batch_repeat_interleave(samples)
    generator = torch.Generator().manual_seed(seed)
    drawn: list[list[tuple[int, float, float]]] = [[] for _ in range(samples)]
    going = np.ones(samples, dtype=bool)
    for _ in range(sampling.max_tokens):
        logps = torch.log_softmax(scores.float(), -1)
        chosen = torch.multinomial(logps.exp(), 1, generator=generator)
        values = logps.gather(1, chosen)[:, 0]
        for row in np.flatnonzero(going):
            drawn[row].append((int(chosen[row]), float(values[row]), float(logps[row].max())))
        going &= ~np.isin(chosen[:, 0].numpy(), sampling.stop_ids)
        if not going.any():
            break
        scores = model(chosen, past_key_values=cache).logits[:, -1]
    return [_completion(tokens) for tokens in drawn]


def _completion(tokens: list[tuple[int, float, float]]) -> Completion:
    ids, logps, top = (np.array(values) for values in zip(*tokens, strict=True))
    none = np.full((len(ids), 1), -1)
    tops = TopTokens(none, top[:, None].astype(np.float32))
    versions = np.zeros(len(ids), np.int64)
    return Completion(ids, logps.astype(np.float32), versions, "stop", "", top=tops)


@dataclass(frozen=True, eq=False)
class Training:
    """Weights of a model after each of a number of updates, and what was sampled for them."""

    weights: list[dict[str, Tensor]]

    def model(self, like: Any, update: int) -> Any:
        """A copy of `like` with the weights after `update` updates."""
        other = copy.deepcopy(like)
        other.load_state_dict(self.weights[update])
        return other


def train(
    model: Any,
    updates: int,
    lr: float,
    batch: Callable[[Any, int], tuple[list[Response], np.ndarray]],
    keep: Iterable[int],
) -> Training:
    """Policy gradient on `batch(model, update)`, which returns responses and their advantages.

    keep: numbers of updates whose weights are kept; others are empty.
    """
    own, kept = copy.deepcopy(model), set(keep)
    own.requires_grad_(True)
    optimizer = torch.optim.AdamW(own.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    weights: list[dict[str, Tensor]] = []
    for update in range(updates + 1):
        weights.append({name: t.detach().clone() for name, t in own.state_dict().items()} if update in kept else {})
        if update == updates:
            break
        responses, advantages = batch(own, update)
        tokens = sum(len(response.completion.response_ids) for response in responses)
        for part, ids, count in alike(responses, own.config.vocab_size):
            scores = own(ids[:, :-1], logits_to_keep=count).logits
            chosen = torch.log_softmax(scores, -1).gather(-1, ids[:, -count:, None])[..., 0].sum(-1)
            (-(torch.from_numpy(advantages[part]) * chosen).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return Training(weights)


def centered(rewards: np.ndarray, samples: int) -> np.ndarray:
    """Advantages of responses in groups of `samples`: rewards less their mean, over their deviation."""
    groups = rewards.reshape(-1, samples)
    return ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-6)).ravel()


def flat(groups: Sequence[Sequence[Completion]]) -> list[Completion]:
    return list(chain(*groups))
