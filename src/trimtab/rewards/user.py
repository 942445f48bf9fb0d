"""A user's own reward: `module:function` or any callable `(completion: str, problem: Problem) -> float`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trimtab.plugins import check_arguments
from trimtab.rewards.base import Built
from trimtab.rewards.response import Response
from trimtab.types import Problem


def build(function: Callable[..., Any], name: str) -> Built:
    """Wrap a checked function; it will run in a worker process."""
    check_arguments(function, f"reward {name!r}", {"completion": "str", "problem": "Problem"})

    def user(response: Response, problem: Problem) -> Any:
        return function(response.text, problem)

    return Built(user, isolated=True)
