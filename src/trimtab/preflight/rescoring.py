"""Scores the ids of a dump again with transformers in float32: a third implementation beside sampler and trainer.

    files -> ids of prompts and responses -> log-probs from the checkpoint -> the same rows with `logp_rescored`

Nothing is tokenized: the sampler's own ids of prompts and responses are scored. `trimtab diagnose` on the result tells
which side differs from the checkpoint.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from trimtab.diagnosis.reading import open_log
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import TrimtabError
from trimtab.text import json_value
from trimtab.trainer.models.load import default_device, load_plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 1024
"""Tokens of one forward pass at most; longer responses go in parts. Logits take tokens x vocabulary x 4 bytes."""
OnProgress = Callable[[int, int], None]
"""Called with the number of scored responses, and the number of all responses."""
TOKEN_COLUMNS = {
    **{"ids": "response_ids", "mask": "loss_mask", "entropy": "entropy", "version": "policy_version", "turn": "turn"},
    **{name: f"logp_{name}" for name in ("behavior", "proximal", "current", "rescored")},
}
ROW_COLUMNS = {"prompt": "prompt_id"} | {
    name: name for name in ("step", "group", "proximal_version", "reward", "advantage", "temperature", "top_p", "top_k")
}
"""Columns of the result by field of `TokenTable`: `TOKEN_COLUMNS` for values of tokens, `ROW_COLUMNS` of responses."""


def rescore(
    paths: Sequence[Path],
    model: str,
    *,
    framework: str | None = None,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    step: int | None = None,
    temperature: float | None = None,
    on_progress: OnProgress = lambda _done, _all: None,
) -> pa.Table:
    """Returns the responses of files or folders, a row each, with `logp_rescored`: their log-probs under `model`.

    framework, columns: as for `diagnose`. limit: largest number of responses, chosen evenly. step: select this step.
    temperature: divides the logits; None takes the temperature in the data, or 1 if there is none.
    Raises `TrimtabError` if ids of prompts or responses are missing, or are not in the vocabulary of the model.
    """
    log = open_log(paths, framework=framework, columns=columns, with_prompts=True)
    tables = list(log.tables())
    origin = log.summary()
    table = TokenTable.concat(tables)
    if step is not None:
        if table.step is None or not (table.step == step).any():
            raise TrimtabError(f"--step {step}: no response is of that step; leave it out, or name another step")
        table = table.select(table.step == step)
    if limit is not None and limit < table.responses:
        chosen = np.linspace(0, table.responses - 1, limit).round().astype(np.int64)
        table = table.select(np.isin(np.arange(table.responses), chosen))
    _check_ids(table, origin.framework)
    if origin.assumes_current:  # assumed versions must not look like recorded ones
        table = replace(table, version=None, proximal_version=None)
    if temperature is not None:
        table = replace(table, temperature=np.full(table.responses, temperature))
    return _as_rows(replace(table, rescored=_scores(table, model, on_progress)))


def encoded(rows: pa.Table, suffix: str) -> bytes:
    """Returns the rows as a parquet file, or as JSON lines (non-finite numbers as null) for the suffix .jsonl."""
    if suffix == ".jsonl":
        lines = (json.dumps(json_value(row)) + "\n" for row in rows.to_pylist())
        return "".join(lines).encode()
    buffer = io.BytesIO()
    pq.write_table(rows, buffer, compression="zstd")
    return buffer.getvalue()


def _check_ids(table: TokenTable, framework: str) -> None:
    """Raises `TrimtabError` unless each response has its own ids and the ids of its prompt."""
    if table.ids is None:
        raise TrimtabError("the files have no ids of responses: name their column with --columns response_ids=COLUMN")
    if framework == "open-instruct":
        raise TrimtabError(f"the files of {framework} leave out the first token of each prompt: nothing can be scored")
    assert table.prompt_ids is not None, "read with prompts"
    missing = sum(prompt is None or not len(prompt) for prompt in table.prompt_ids)
    if missing:
        raise TrimtabError(
            f"{missing} of {table.responses} responses have no ids of their prompt, without which nothing can be "
            f"scored: name their column with --columns prompt_ids=COLUMN, or write ids that begin with the prompt"
        )


def _scores(table: TokenTable, name: str, on_progress: OnProgress) -> np.ndarray:
    """Returns the log-prob of each token (tokens,) float32, in the order of the table."""
    assert table.ids is not None and table.prompt_ids is not None  # noqa: PT018
    device = default_device()
    model = load_plain(name)
    torch.nn.Module.to(model, device)
    prompts = table.prompt_ids.tolist()
    responses = np.split(table.ids, table.starts[1:-1])
    embedding: Any = model.get_input_embeddings()
    known = len(embedding.weight)
    if wrong := [ids for ids in (*prompts, table.ids) if len(ids) and not 0 <= ids.min() <= ids.max() < known]:
        raise TrimtabError(
            f"the id {max(int(ids.max()) for ids in wrong)} is not among the {known} of model {name!r}: name the "
            f"checkpoint that these responses were sampled from"
        )
    temperature = np.ones(table.responses) if table.temperature is None else table.temperature
    if not (np.isfinite(temperature) & (temperature > 0)).all():
        raise TrimtabError("some responses have no temperature above 0: give the one of the trainer with --temperature")
    scores: list[np.ndarray] = [np.empty(0)] * table.responses
    done = 0
    for batch in _batches([len(prompt) + len(ids) for prompt, ids in zip(prompts, responses, strict=True)]):
        rows = [torch.from_numpy(np.concatenate([prompts[row], responses[row]])) for row in batch]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        logp = _logps(model, ids, torch.tensor(temperature[batch], dtype=torch.float32, device=device)).cpu().numpy()
        for row, values in zip(batch, logp, strict=True):
            start = len(prompts[row]) - 1  # a token is predicted at the position before it
            scores[row] = values[start : start + len(responses[row])]
        done += len(batch)
        on_progress(done, table.responses)
    return np.concatenate(scores)


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Returns row numbers in batches of similar length: at most `TOKENS` tokens, or one row."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not batches or lengths[row] * (len(batches[-1]) + 1) > TOKENS:  # sorted by length: this row is the longest
            batches.append([])
        batches[-1].append(row)
    return batches


@torch.inference_mode()
def _logps(model: PreTrainedModel, ids: Tensor, temperature: Tensor) -> Tensor:
    """Returns the log-prob of each token except the first, (rows, time - 1).

    Padding is on the right, so that causal attention hides it from all real tokens.
    """
    parts, cache = [], None
    time = ids.shape[1] - 1
    for start in range(0, time, TOKENS):
        stop = min(start + TOKENS, time)
        output = model(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=time > TOKENS)
        cache = output.past_key_values
        logits = output.logits.float() / temperature[:, None, None]
        chosen = logits.gather(-1, ids[:, start + 1 : stop + 1, None])[..., 0]
        parts.append(chosen - logits.logsumexp(-1))
    return torch.cat(parts, dim=1)


def _as_rows(table: TokenTable) -> pa.Table:
    columns, starts = table.columns, pa.array(table.starts, pa.int64())
    rows = {ours: pa.array(columns[name]) for name, ours in ROW_COLUMNS.items() if name in columns}
    rows["prompt_ids"] = pa.array(columns["prompt_ids"].tolist(), pa.list_(pa.int64()))
    for name, ours in TOKEN_COLUMNS.items():
        if name in columns:
            rows[ours] = pa.LargeListArray.from_arrays(starts, pa.array(columns[name]))
    if table.raw is not None:
        rows["logprobs"] = pa.array(np.where(table.raw, "raw", "processed"))
    return pa.table(rows)
