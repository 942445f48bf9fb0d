"""The bundled model for real: conversion under SIGKILL and in two processes at once, and scores of real text."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trimtab.files import TEMPORARY
from trimtab.trainer.models import bundled
from trimtab.trainer.models.load import BUNDLED, LoadedModel, load
from trimtab.trainer.models.logprobs import TokenBatch, score

pytestmark = pytest.mark.slow

CONVERT = "from trimtab.trainer.models import bundled; print(bundled.folder())"
TEXTS = [
    ("The capital of France is", " Paris, a city on the Seine known for its art and food."),
    ("Question: 17 + 25\nAnswer: 42\n\nQuestion: 31 + 46\nAnswer:", " 77\n"),
    ("def fibonacci(n):\n", "    if n < 2:\n        return n\n"),
]


def start(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "TRIMTAB_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", CONVERT], env=environment, stdout=subprocess.PIPE, text=True)


def test_conversion_survives_a_kill_and_two_converters(tmp_path: Path) -> None:
    name = f"{BUNDLED}-{bundled._find_gguf()[1]}"
    killed = start(tmp_path)
    while not list(tmp_path.glob(f"{TEMPORARY}{name}-*/*")):  # until it writes the model
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / name).exists()

    converters = [start(tmp_path), start(tmp_path)]
    assert {converter.communicate()[0].strip() for converter in converters} == {str(tmp_path / name)}
    assert sorted(path.name for path in tmp_path.iterdir()) in ([name], [name, f"{name}.lock"])
    assert (tmp_path / name / "model.safetensors").stat().st_size > 500e6


@pytest.fixture(scope="module")
def real() -> LoadedModel:
    return load(BUNDLED, dtype=torch.float32)


def tokens(real: LoadedModel) -> tuple[TokenBatch, list[tuple[Any, Any]]]:
    """Two responses to every prompt, one of them cut short."""
    ids = [tuple(np.array(real.tokenizer(part).input_ids) for part in text) for text in TEXTS]
    pairs = [(prompt, response) for prompt, response in ids] + [(prompt, response[:3]) for prompt, response in ids]
    batch = TokenBatch.pack(
        [prompt for prompt, _ in ids], [response for _, response in pairs], [0, 1, 2, 0, 1, 2], pad_id=2
    )
    return batch, pairs


def plain(real: LoadedModel, pairs: list[tuple[Any, Any]]) -> Tensor:
    logps = []
    for prompt, response in pairs:
        row = torch.from_numpy(np.concatenate([prompt, response]))[None]
        logits = real.model(row, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        logps.append(logits.log_softmax(-1).gather(1, torch.from_numpy(response)[:, None])[:, 0])
    return torch.cat(logps)


def test_loaded_as_asked(real: LoadedModel) -> None:
    assert {parameter.dtype for parameter in real.model.parameters()} == {torch.float32}
    assert real.model.lm_head.weight is real.model.model.embed_tokens.weight  # type: ignore[union-attr]
    assert real.tokenizer.pad_token_id is not None
    # The weights are the trained ones: they know what comes next.
    batch, _ = tokens(real)
    with torch.no_grad():
        first = score(real.model, batch).logp[:3, 0]
    assert first[0] > -1.5  # " Paris"


def test_scores_and_gradients_of_real_text_equal_the_plain_forward(real: LoadedModel) -> None:
    batch, pairs = tokens(real)
    packed, reference = score(real.model, batch).logp[batch.response_mask], plain(real, pairs)
    # Float32 logits of this size (up to 35) carry rounding errors of about 4e-5 themselves.
    assert (packed - reference).abs().max() < 1e-4
    weight = torch.linspace(-1, 1, len(packed))
    gradients = []
    for logp in (packed, reference):
        real.model.zero_grad()
        (logp * weight).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in real.model.parameters()])  # type: ignore[union-attr]
    for a, b in zip(*gradients, strict=True):
        assert (a - b).abs().max() <= 1e-3 * b.abs().max()
    real.model.zero_grad()
