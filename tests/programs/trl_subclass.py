"""Trains with the subclass of docs/frameworks.md for three generations; the environment must have TRL.

    python tests/programs/trl_subclass.py

It writes where the block says, below the current directory.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from trl_trainer import build

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


def main() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("### TRL without")[2]
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[0], names)  # noqa: S102 - our own page
    # Each generation serves two iterations, without which TRL has no log-probs of its own but with vLLM.
    build(names["WithLogProbs"], Path("out"), steps=6, own={}, num_iterations=2).train()


if __name__ == "__main__":
    main()
