"""Writes `open-instruct/` with open-instruct's own functions: python write_open_instruct.py CHECKOUT

Packing, slices of sequence parallelism and lines are those of a run; the trainer's log-probs are made up. The modules
that import Ray and vLLM are stood in for, and the class that cuts the slices is taken out of its source.
"""

from __future__ import annotations

import ast
import dataclasses
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch.nn import functional

DATA = Path(__file__).parents[2] / "tests/unit/diagnosis/reading/data"
PAD, STEP, SLICES = 0, 3, 2
PROMPTS = [[10, 11, 12], [10, 11, 12], [20, 21], [20, 21]]
RESPONSES = [[30, 31, 32, 33], [40, 41], [50, 51, 52, 53, 54], [60, 61, 62]]
MASKS = [[1] * 4, [1] * 2, [1, 1, 0, 0, 1], [1] * 3]  # a tool's output inside the third
MODEL_STEPS = [2, 1, 2, 2]


def modules(checkout: Path) -> tuple[Any, Any]:
    """The modules `rl_utils` and `data_types`."""
    package = ModuleType("open_instruct")
    package.__path__ = [str(checkout / "open_instruct")]
    sys.modules["open_instruct"] = package
    for name in ("logger_utils", "model_utils", "utils"):
        sys.modules[f"open_instruct.{name}"] = MagicMock()
    from open_instruct import data_types, rl_utils  # pyright: ignore[reportMissingImports]

    return rl_utils, data_types


def splitter(checkout: Path, data_types: Any) -> Any:
    """The class `UlyssesSPSplitter`, for ranks that all have rows of one length."""
    tree = ast.parse((checkout / "open_instruct/utils.py").read_text(encoding="utf-8"))
    (node,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "UlyssesSPSplitter"]
    names: dict[str, Any] = {
        "torch": torch, "F": functional, "dataclass": dataclasses.dataclass, "dataclasses": dataclasses,
        "data_types": data_types, "INVALID_LOGPROB": 1.0,
        "dist": SimpleNamespace(all_gather=lambda into, one, group: [part.copy_(one) for part in into]),  # noqa: ARG005
    }  # fmt: skip
    exec(compile(ast.Module([node], []), "utils.py", "exec"), names)  # noqa: S102
    return names["UlyssesSPSplitter"]


def main(checkout: Path) -> None:
    rl_utils, data_types = modules(checkout)
    split = splitter(checkout, data_types)
    generator = torch.Generator().manual_seed(0)
    sampled = [(-torch.rand(len(ids), generator=generator)).tolist() for ids in RESPONSES]
    packed = rl_utils.pack_sequences(
        PROMPTS, RESPONSES, MASKS, 14, PAD, sampled,
        rollout_sample_ids=list(range(4)), model_steps=MODEL_STEPS, mask_tool_use=True,
    )  # fmt: skip
    out = DATA / "open-instruct"
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(DATA / "open-instruct-one", ignore_errors=True)
    rows = [
        data_types.CollatedBatchData(
            **{
                name: [functional.pad(getattr(packed, name)[index], (0, 0)).unsqueeze(0)]
                for name in (
                    *("query_responses", "attention_masks", "position_ids", "response_masks", "vllm_logprobs"),
                    *("prompt_masks", "rollout_sample_ids", "model_steps"),
                )
            },
            advantages=[torch.zeros(1, len(packed.query_responses[index]))],
            # Stands for the trainer's forward pass; the field is cut as all others are.
            rewards=[
                (
                    packed.vllm_logprobs[index]
                    + 0.01 * torch.randn(len(packed.query_responses[index]), generator=generator)
                ).unsqueeze(0)
            ],
        )
        for index in range(len(packed.query_responses))
    ]

    def write(folder: Path, row: Any, rank: int, ranks: int, size: int) -> None:
        masks = [mask[:, 1:].bool() for mask in row.response_masks]
        trainer = [torch.where(mask, lp[:, 1:], 1.0) for mask, lp in zip(masks, row.rewards, strict=True)]
        rl_utils._save_trainer_logprobs(
            str(folder), "run", STEP, trainer, masks, size, trainer_model_step=STEP,
            input_token_ids=row.query_responses, token_ids=[ids[:, 1:] for ids in row.query_responses],
            prompt_masks=[mask[:, 1:] for mask in row.prompt_masks],
            attention_masks=[mask[:, 1:] for mask in row.attention_masks],
            rollout_sample_ids=[ids[:, 1:] for ids in row.rollout_sample_ids],
            model_steps=[steps[:, 1:] for steps in row.model_steps],
            vllm_logprobs=[lp[:, 1:] for lp in row.vllm_logprobs],
            rank=rank, world_size=ranks, dp_rank=rank // size, sp_rank=rank % size,
        )  # fmt: skip

    for index, row in enumerate(rows):
        write(DATA / "open-instruct-one", row, 0, 1, 1)
        for part in range(SLICES):
            one = split(part, None, SLICES, torch.device("cpu"), PAD).split_collated_batch(row)
            write(out, one, SLICES * index + part, SLICES * len(rows), SLICES)
    batch = SimpleNamespace(
        queries=PROMPTS, scores=[1.0, 0.0, 1.0, 0.0], datasets=["math"] * 4, ground_truths=[None] * 4
    )
    result = SimpleNamespace(responses=RESPONSES, finish_reasons=["stop"] * 4, request_info=None, logprobs=sampled)
    rl_utils._save_rollouts(str(out), "run", STEP, batch, result, np.array([0.5, -0.5, 0.5, -0.5]), 2, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
