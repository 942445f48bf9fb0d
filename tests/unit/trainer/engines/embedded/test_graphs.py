"""Decoding by CUDA graphs: the same responses as without, also where a graph cannot be captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.engines import prompts, tiny, tokenizer

from trimtab.errors import TrimtabWarning
from trimtab.trainer.engines.embedded import shared_prompt_decoder
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.embedded.shared_prompt_decoder import SharedPromptDecoder
from trimtab.types import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEVER = 10**9  # eager steps before a graph is captured


def engine() -> EmbeddedEngine:
    return EmbeddedEngine(tiny("llama").to(DEVICE), tokenizer(), torch.float32)


def responses(engine: EmbeddedEngine, seed: int) -> list[tuple[list[int], list[float]]]:
    groups = engine.generate(prompts([5, 1, 17]), 4, SamplingParams(max_tokens=70), seed=seed)
    return [(one.response_ids.tolist(), one.logp_behavior.tolist()) for group in groups for one in group]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_graphs_change_no_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches, whose rows end at different steps and whose keys outgrow their first block."""
    monkeypatch.setattr(shared_prompt_decoder, "BLOCK_ON_ACCELERATOR", 16)
    with_graphs, without = engine(), engine()
    with monkeypatch.context() as patched:
        patched.setattr(shared_prompt_decoder, "EAGER_STEPS", NEVER)
        expected = [responses(without, seed) for seed in (0, 1)]
    assert [responses(with_graphs, seed) for seed in (0, 1)] == expected
    captured = [one._blocks is not None and one._blocks.captures.graph is not None for one in (with_graphs, without)]
    assert captured == [True, False]


def test_a_batch_goes_on_where_its_graph_finds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(shared_prompt_decoder, "EAGER_STEPS", NEVER)
        expected = responses(engine(), 0)

    def with_graphs(self: Any, *arguments: Any) -> None:
        plain(self, *arguments)
        self._use_graphs = True

    def short(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    plain = SharedPromptDecoder.__init__
    monkeypatch.setattr(SharedPromptDecoder, "__init__", with_graphs)
    monkeypatch.setattr(SharedPromptDecoder, "_capture", short)
    with pytest.warns(TrimtabWarning, match="without a CUDA graph, which is slower: no memory is left") as warned:
        assert responses(engine(), 0) == expected
    assert len(warned) == 1
