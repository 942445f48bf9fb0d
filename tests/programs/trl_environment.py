"""Trains one step with TRL's GRPOTrainer and one with Trimtab, with the same class as environment.

Run by the interpreter of `make bench-install`: `python trl_environment.py MODEL OUT`. TRL trains MODEL, Trimtab the
bundled one. Prints what each of the two did with the class, as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path

import trl
from datasets import Dataset
from transformers import AutoTokenizer
from trl import chat_template_utils

import trimtab

COUNTS: Counter[str] = Counter()


class Treasure:
    """A hidden number: every episode begins elsewhere, one tool is a coroutine, the environment has the reward."""

    def reset(self, **_row: object) -> str | None:
        COUNTS["reset"] += 1
        self.place, self.goal = random.randrange(1, 1000), 0
        return f" You are at {self.place}."

    def walk(self, steps: int) -> str:
        """Walks some steps.

        Args:
            steps: how many.
        """
        COUNTS["walk"] += 1
        self.place += steps
        return f"at {self.place}"

    async def listen(self) -> str:
        """Listens."""
        COUNTS["listen"] += 1
        return "nothing"

    def get_reward(self) -> float:
        COUNTS["get_reward"] += 1
        return 1.0 / (1 + abs(self.goal - self.place))


def train_with_trl(model: str, out: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    # The model's own template knows no tools.
    tokenizer.chat_template = chat_template_utils.qwen3_chat_template
    tokenizer.response_template = chat_template_utils.qwen3_template
    arguments = trl.GRPOConfig(
        output_dir=str(out),
        max_completion_length=16,
        per_device_train_batch_size=4,
        num_generations=4,
        max_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,  # not every processor has instructions for it
        save_strategy="no",
    )
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Where is the treasure?"}]] * 4})
    trainer = trl.GRPOTrainer(
        model=model, processing_class=tokenizer, train_dataset=rows, args=arguments, environment_factory=Treasure
    )
    trainer.train()


def train_with_trimtab(out: Path) -> dict[str, float]:
    example = "Question: 3 * 4 = You are at 7.\nAnswer: <walk>2</walk><output>at 9</output> 12\n\n"
    config = {
        "base": "quickstart-tools",
        "model": {"autocast": "none"},
        "engine": {"dtype": "float32"},
        "environment": {"name": "trl:Treasure", "format": "tag", "max_turns": 2, "instructions": 3 * example},
        "trainer": {"steps": 1, "prompts": 2, "samples": 4},
        "eval": {"problems": 1},
    }
    return trimtab.train(config, environment=Treasure, out=out, progress=False).metrics


if __name__ == "__main__":
    model, out = sys.argv[1], Path(sys.argv[2])
    train_with_trl(model, out / "trl")
    by_trl = dict(COUNTS)
    COUNTS.clear()
    metrics = train_with_trimtab(out / "trimtab")
    keys = ("episode/calls", "episode/failed", "reward/mean", "reward/std")
    print(json.dumps({"trl": by_trl, "trimtab": dict(COUNTS), "metrics": {key: metrics[key] for key in keys}}))
