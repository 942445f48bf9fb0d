"""Writes `art/1.jsonl` with ART's `Trajectory` and OpenAI's types: python write_art.py CHECKOUT

The trainer's log-probs are added to each row, since ART keeps none. The package `openai` is needed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

DATA = Path(__file__).parents[2] / "tests/unit/diagnosis/reading/data"


def main(checkout: Path) -> None:
    package = ModuleType("art")
    package.__path__ = [str(checkout / "src/art")]
    sys.modules["art"] = package
    from art.trajectories import Trajectory  # pyright: ignore[reportMissingImports]
    from openai.types.chat import ChatCompletion  # pyright: ignore[reportMissingImports]

    def choice(*logprobs: float) -> Any:
        content = [
            {"token": f"token_id:{index}", "bytes": None, "logprob": value, "top_logprobs": []}
            for index, value in enumerate(logprobs)
        ]
        message = {"role": "assistant", "content": "text"}
        completion = {
            "id": "1",
            "created": 0,
            "model": "m",
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": message,
                    "logprobs": {"content": content, "refusal": None},
                }
            ],
        }
        return ChatCompletion.model_validate(completion).choices[0]

    user, tool = {"role": "user", "content": "q"}, {"role": "user", "content": "what the tool returned"}
    rows = [
        ([user, choice(-0.5, -1.25), tool, choice(-0.25)], 1.0, [-0.75, -1.0, -0.25]),
        ([user, choice(-2.0)], 0.0, [-1.5]),
    ]
    (DATA / "art").mkdir(exist_ok=True)
    with (DATA / "art/1.jsonl").open("w") as file:
        for messages, reward, trainer in rows:
            row = Trajectory(messages_and_choices=messages, reward=reward).model_dump(mode="json")
            file.write(json.dumps({**row, "logp_proximal": trainer}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
