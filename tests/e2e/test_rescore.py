"""`trimtab rescore` on a real model: the side with a planted fault is named, whichever of the two it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.chat_tokenizers import bundled_tokenizer
from torch.nn.utils.rnn import pad_sequence

from trimtab.cli.main import run
from trimtab.diagnosis.measure.rescored_sides import judge_sides
from trimtab.diagnosis.pipeline import diagnose
from trimtab.trainer.models.load import BUNDLED, load_plain

PROMPTS = [
    "The capital of France is",
    "def add(a, b):",
    "Once upon a time",
    "Water boils at",
    "Roses are red,",
    "1 + 1 =",
]
COPIES, TIME = 3, 32
Responses = list[tuple[list[int], list[int]]]
"""Ids of prompts, each after a start token, and of responses."""


def sampled(model: Any) -> Responses:
    """From the model, all at once."""
    tokenizer = bundled_tokenizer()
    prompts = [[tokenizer.bos_token_id, *tokenizer(text).input_ids] for text in PROMPTS for _ in range(COPIES)]
    given = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    torch.manual_seed(0)
    whole = model.generate(**given, do_sample=True, top_k=0, min_new_tokens=TIME, max_new_tokens=TIME)
    return list(zip(prompts, whole[:, -TIME:].tolist(), strict=True))


def logps(model: Any, responses: Responses) -> list[list[float]]:
    rows = [torch.tensor(prompt + ids) for prompt, ids in responses]
    with torch.inference_mode():
        scores = model(pad_sequence(rows, batch_first=True)).logits.float().log_softmax(-1)
    return [
        one[len(prompt) - 1 :][range(TIME), ids].tolist() for one, (prompt, ids) in zip(scores, responses, strict=True)
    ]


@pytest.mark.slow
def test_the_finding_names_the_side(tmp_path: Path) -> None:
    """The sampler had a doubled start token."""
    model = load_plain(BUNDLED).bfloat16()
    responses = sampled(model)
    doubled = logps(model, [(prompt[:1] + prompt, ids) for prompt, ids in responses])
    dump, out = tmp_path / "dump.jsonl", tmp_path / "rescored.parquet"
    with dump.open("w") as file:
        for (prompt, ids), behavior, proximal in zip(responses, doubled, logps(model, responses), strict=True):
            row = {"prompt_ids": prompt, "response_ids": ids, "logp_behavior": behavior, "logp_proximal": proximal}
            file.write(json.dumps(row) + "\n")
    assert run(["rescore", str(dump), "--model", BUNDLED, "--out", str(out)]) == 0
    rescored = diagnose(out)
    [found] = [one for one in rescored.answer.findings if one.name == "rescored"]
    assert "the sampler is the side that differs" in found.detail
    sample = rescored.measured.sample
    sides = judge_sides(sample)
    assert sides is not None
    assert sides.mismatch.value == pytest.approx(rescored.measured.size.mismatch["k3"], rel=1e-6)
    assert sides.tokens == len(PROMPTS) * COPIES * TIME
    for behavior, proximal, side in (
        (sample.proximal, sample.behavior, "trainer"),
        (sample.proximal, sample.proximal, "neither"),
    ):
        other = judge_sides(replace(sample, behavior=behavior, proximal=proximal))
        assert other is not None
        assert other.side == side
