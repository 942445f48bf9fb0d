"""Writes `nemo-rl/` with NeMo-RL's own functions: python write_nemo_rl.py CHECKOUT

The flattening, padding and masks are those of `grpo_train`, the lines those of `Logger.log_batched_dict_as_jsonl`. The
two functions of modules that import Ray and loggers are taken out of their source; the rest is imported.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

DATA = Path(__file__).parents[2] / "tests/unit/diagnosis/reading/data"


def function(file: Path, name: str, names: dict[str, Any]) -> Any:
    """A function of a module that is not imported, with the names that it needs."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    (node,) = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]
    node.returns = None
    for argument in node.args.args:
        argument.annotation = None
    exec(compile(ast.Module([node], []), str(file), "exec"), names)  # noqa: S102
    return names[name]


def message(role: str, first: int, count: int, generator: torch.Generator | None = None) -> dict[str, Any]:
    """Tokens first, first + 1, ...; those that were generated have log-probs."""
    result = {"role": role, "content": f"{role} {first}", "token_ids": torch.arange(first, first + count)}
    if generator is not None:
        result["generation_logprobs"] = -torch.rand(count, generator=generator)
    return result


def main(checkout: Path) -> None:
    sys.path.insert(0, str(checkout))
    from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message  # pyright: ignore[reportMissingImports]
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict  # pyright: ignore[reportMissingImports]

    used = {"torch": torch, "np": np, "os": os, "json": json, "cast": cast, "BatchedDataDict": BatchedDataDict}
    masks = function(
        checkout / "nemo_rl/algorithms/grpo.py",
        "add_grpo_token_loss_masks_and_generation_logprobs",
        used | {"backfill_missing_routed_experts": lambda logs: None},  # noqa: ARG005
    )
    write = function(checkout / "nemo_rl/utils/logger.py", "log_batched_dict_as_jsonl", used)
    logger = type("Logger", (), {"base_log_dir": str(DATA / "nemo-rl")})()
    for step in (1, 2):
        generator = torch.Generator().manual_seed(step)
        logs = [
            [message("user", 10, 3), message("assistant", 20, 4, generator)],
            [message("user", 10, 3), message("assistant", 30, 2, generator)],
            # Two turns with a tool's message between them; the prompt holds an assistant's message of its own.
            [
                message("user", 40, 1),
                message("assistant", 41, 1),
                message("assistant", 50, 2, generator),
                message("environment", 60, 2),
                message("assistant", 70, 1, generator),
            ],
            [message("user", 40, 1), message("assistant", 41, 1), message("assistant", 80, 3, generator)],
        ]
        masks(logs)
        flat, lengths = batched_message_log_to_flat_message(
            logs, pad_value_dict={"token_ids": 0}, make_sequence_length_divisible_by=4
        )
        trained = flat["token_loss_mask"]
        noise = 0.01 * torch.randn(trained.shape, generator=generator)
        advantages = torch.tensor([0.5, -0.5, 0.25, -0.25]).unsqueeze(-1).expand(trained.shape)
        log_data = {
            "content": flat["content"],
            "rewards": [1.0, 0.0, 1.0, 0.0],
            "input_lengths": lengths.tolist(),
            "token_ids": flat["token_ids"].tolist(),
            "token_loss_mask": trained.tolist(),
            "sample_loss_mask": torch.tensor([1.0, 1.0, 1.0, 0.0]).tolist(),
            "advantages": advantages.tolist(),
            "generation_logprobs": flat["generation_logprobs"].tolist(),
            # The trainer scores every token, those of prompt, tool and padding too; the first one is 0.
            "prev_logprobs": ((flat["generation_logprobs"] + noise).index_fill_(1, torch.tensor([0]), 0)).tolist(),
        }
        write(logger, log_data, f"train_data_step{step}.jsonl")
    validation = {"content": flat["content"], "rewards": [1.0, 0.0, 1.0, 0.0]}
    write(logger, validation, "val_data_step2.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
