"""A process that trains one recipe after another: a JSON recipe a line in, its last metrics or an error a line out."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from trimtab.config import check_config
from trimtab.errors import TrimtabError
from trimtab.training.run import train


def main() -> None:
    # Whatever a library prints must not land between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _answer(recipe: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"metrics": train(check_config(recipe, "recipe")).metrics}
    except TrimtabError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    main()
