"""`trimtab rescore` on a real model: the side with a planted fault is named, whichever of the two it is."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.chat_tokenizers import bundled_tokenizer
from torch.nn.utils.rnn import pad_sequence

from trimtab.cli.main import run
from trimtab.diagnosis.answer import Diagnosis
from trimtab.diagnosis.measure.rescored import rescored_sides
from trimtab.diagnosis.pipeline import diagnose
from trimtab.trainer.models.load import BUNDLED, load_plain

PROMPTS = (
    "The capital of France is",
    "def add(a, b):",
    "Once upon a time",
    "Water boils at",
    "Roses are red,",
    "1 + 1 =",
)
COPIES, TIME = 3, 32
Responses = list[tuple[list[int], list[int]]]
"""Ids of prompts, each after a start token, and of responses."""


def logps(model: Any, responses: Responses) -> list[list[float]]:
    rows = [torch.tensor(prompt + ids) for prompt, ids in responses]
    with torch.inference_mode():
        scores = model(pad_sequence(rows, batch_first=True)).logits.float().log_softmax(-1)
    return [
        one[len(prompt) - 1 :][range(TIME), ids].tolist() for one, (prompt, ids) in zip(scores, responses, strict=True)
    ]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """The model in bfloat16, and with another base of its rotary positions."""
    right = load_plain(BUNDLED).bfloat16()
    theta = copy.deepcopy(right)
    theta.model.rotary_emb.inv_freq.copy_(theta.model.rotary_emb.inv_freq**1.15)
    return {"right": right, "theta": theta}


@pytest.fixture(scope="module")
def responses(models: dict[str, Any]) -> Responses:
    """Sampled from the model, all at once."""
    tokenizer = bundled_tokenizer()
    prompts = [[tokenizer.bos_token_id, *tokenizer(text).input_ids] for text in PROMPTS for _ in range(COPIES)]
    given = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    torch.manual_seed(0)
    whole = models["right"].generate(**given, do_sample=True, top_k=0, min_new_tokens=TIME, max_new_tokens=TIME)
    return list(zip(prompts, whole[:, -TIME:].tolist(), strict=True))


@pytest.fixture(scope="module")
def sides(models: dict[str, Any], responses: Responses) -> dict[str, list[list[float]]]:
    """Log-probs of the responses without and with a fault."""
    return {
        "none": logps(models["right"], responses),
        "doubled start": logps(models["right"], [(prompt[:1] + prompt, ids) for prompt, ids in responses]),
        "theta": logps(models["theta"], responses),
    }


@pytest.fixture(scope="module")
def rescored(tmp_path_factory: pytest.TempPathFactory, responses: Responses, sides: dict[str, Any]) -> Diagnosis:
    """The diagnosis of a rescored dump whose sampler had a doubled start token."""
    folder = tmp_path_factory.mktemp("rescore")
    dump, out = folder / "dump.jsonl", folder / "rescored.parquet"
    with dump.open("w") as file:
        for (prompt, ids), behavior, proximal in zip(responses, sides["doubled start"], sides["none"], strict=True):
            row = {"prompt_ids": prompt, "response_ids": ids, "logp_behavior": behavior, "logp_proximal": proximal}
            file.write(json.dumps(row) + "\n")
    assert run(["rescore", str(dump), "--model", BUNDLED, "--out", str(out)]) == 0
    return diagnose(out)


def test_the_finding_names_the_side(rescored: Diagnosis) -> None:
    [found] = [one for one in rescored.answer.findings if one.name == "rescored"]
    assert "the sampler is the side that differs" in found.detail
    sides = rescored_sides(rescored.measured.sample)
    assert sides is not None
    assert sides.mismatch.value == pytest.approx(rescored.measured.size.mismatch["k3"], rel=1e-6)
    assert sides.tokens == len(PROMPTS) * COPIES * TIME


@pytest.mark.parametrize(
    ("sampler", "trainer", "side"),
    [
        ("doubled start", "none", "sampler"),
        ("none", "doubled start", "trainer"),
        ("theta", "none", "sampler"),
        ("none", "theta", "trainer"),
        ("none", "none", "neither"),
        ("theta", "doubled start", "both"),
    ],
)
def test_the_side_with_the_fault_is_named(
    rescored: Diagnosis, sides: dict[str, list[list[float]]], sampler: str, trainer: str, side: str
) -> None:
    behavior, proximal = (np.concatenate(sides[name]).astype(np.float32) for name in (sampler, trainer))
    found = rescored_sides(replace(rescored.measured.sample, behavior=behavior, proximal=proximal))
    assert found is not None
    assert found.side == side
    assert not found.is_other_model
